"""What ``load_kernel`` returns: callables on torch tensors, one module for each operator, and the checks they share."""
