"""What is worked out on the host before calls, once for many of them. Needs torch, no GPU."""
