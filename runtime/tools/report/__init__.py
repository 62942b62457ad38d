"""The static site of ``codegen report``: a page per kernel, an index, and the differences between two commits."""
