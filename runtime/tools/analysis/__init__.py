"""Analysis of compiled kernels: machine code by stages and loops, differences of two kernels, a profiler's figures."""
