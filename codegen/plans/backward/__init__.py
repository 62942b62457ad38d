"""Plans of the kernels of the gradients of attention."""
