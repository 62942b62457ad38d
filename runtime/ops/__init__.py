"""Functions on torch tensors: the kernel is chosen, compiled at the first use and remembered; and torch's operators."""
