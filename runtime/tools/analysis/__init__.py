"""Analysis of compiled kernels: SASS by stages and loops, differences between two kernels, profiler counters."""
