"""Results of ``load_kernel``: callables on torch tensors, one module per operator, and shared checks."""
