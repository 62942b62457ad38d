"""What a compiled kernel is made of: its machine code by stages and loops, beside another one, beside a profiler."""
