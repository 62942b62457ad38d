"""Measuring: the clock, the data sets of attention, and kernels beside their peers."""
