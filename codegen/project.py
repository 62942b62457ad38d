"""The project's folders.

In a source tree, ``templates/``, ``specs/`` and ``generated/`` are next to the package; in an installed wheel, they are
inside it.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IN_SOURCE_TREE = not (_PACKAGE / "data").is_dir()
"""Whether this is a source tree. Files of an installed package are never written."""
ROOT = _PACKAGE.parent if IN_SOURCE_TREE else _PACKAGE / "data"
"""Folder that holds templates/, specs/ and generated/."""
TEMPLATES = ROOT / "templates"
SPECS = ROOT / "specs"
GENERATED = ROOT / "generated"
