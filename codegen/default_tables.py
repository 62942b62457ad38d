"""Rows of a tile of gathered block rows; :mod:`codegen.select.default_tables` has the tables of defaults."""

from codegen.select.default_tables import GATHERED_ROWS

__all__ = ["GATHERED_ROWS"]
