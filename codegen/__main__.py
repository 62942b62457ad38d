"""``python -m codegen`` runs the command line, like ``python -m sparse_kernel_codegen``."""

from __future__ import annotations

from sparse_kernel_codegen.command import main

if __name__ == "__main__":
    main()
