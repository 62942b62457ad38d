"""The static site of ``codegen report``: a page for each kernel, an index, and what two commits differ in."""
