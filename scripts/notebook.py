"""Runs examples/masks.ipynb cell by cell, without Jupyter, and stores the outputs of its cells.

python scripts/notebook.py            # rewrites the outputs
python scripts/notebook.py --check    # exits with 1 if they would change
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "masks.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Notebook with the outputs of its cells, which share a namespace, as in Jupyter."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            cells.append(cell)
            continue
        count += 1
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        cells.append(cell | {"execution_count": count, "outputs": outputs})
    return notebook | {"cells": cells}


def main(arguments: list[str] | None = None) -> int:
    """Run the notebook; with ``--check``, return 1 if its outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if an output is not up to date"
    )
    check = parser.parse_args(arguments).check
    text = NOTEBOOK.read_text(encoding="utf-8")
    fresh = json.dumps(executed(json.loads(text)), indent=1, ensure_ascii=False) + "\n"
    if fresh == text:
        print(f"{NOTEBOOK.name} is up to date")
    elif check:
        print(f"{NOTEBOOK.name}: its outputs are not up to date; run: python scripts/notebook.py")
        return 1
    else:
        NOTEBOOK.write_text(fresh, encoding="utf-8")
        print(f"{NOTEBOOK.name}: rewritten")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
