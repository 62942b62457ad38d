"""The command ``codegen bench``: kernels timed beside named peers in one process, and compared with stored timings."""
