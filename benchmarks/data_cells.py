"""The file of benchmarks/data.py, read without torch: a JSON line for each row, data set and type, newest last."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
Key = tuple[str, str, str]

# What a complete file has: rows of benchmarks/attention.py, on data sets of runtime/tools/bench/data_sets.py.
ROWS = (
    *("dense_8k", "causal_8k", "dense_8k_d64", "causal_8k_d64", "topk32", "window2k_h16"),
    *("topk32_b64", "topk32_d64_b64", "topk64_b128x64", "gqa_topk32_b64", "block_lists"),
)
DATA = {
    "fp16": ("std1", "std2", "std4", "std9", "key_norms", "heads", "sink", "rotary", "rising", "falling"),
    "bf16": ("std1", "std4", "std9", "heads"),
}
SHAPE = ("batch", "heads", "kv_heads", "length")


def key(cell: Mapping[str, Any]) -> Key:
    """Key of a cell in its file."""
    return cell["name"], cell["data"], cell["spec"]["dtype"]


def read(path: Path) -> dict[Key, Cell]:
    """The newest cell of each kind; none if there is no file.

    The last line of a run that was killed may be short: it does not count.

    Raises:
        SystemExit: if the cells are of several devices.
    """
    if not path.is_file():
        return {}
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    cells = [json.loads(line) for line in lines if line]
    check_one_device(path, cells)
    return {key(cell): cell for cell in cells}


def check_one_device(path: Path, cells: Iterable[Mapping[str, Any]], device: str | None = None) -> None:
    """Refuse cells of more than one device, ``device`` counted: their times do not belong in one table."""
    devices = list(dict.fromkeys([*(cell["device"] for cell in cells), *([device] if device else [])]))
    if len(devices) > 1:
        raise SystemExit(f"error: {path}: cells of {' and of '.join(devices)}; a file has those of one device")


def drop_short_line(path: Path) -> None:
    """Cut off what a killed run left of its last line, so that the next one begins a line."""
    if path.is_file():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)


def append(path: Path, cell: Cell) -> None:
    """Add a cell as one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line_of(cell))


def line_of(cell: Cell) -> str:
    """A cell as it stands in the file."""
    return json.dumps(cell) + "\n"


def is_measured(cell: Mapping[str, Any] | None, source: str, shape: Mapping[str, int], own: str) -> bool:
    """Whether a cell need not be measured again.

    Args:
        cell: the newest of its kind, if there is one.
        source: hash of today's source of its kernel.
        shape: of today's row.
        own: label of our result, without which a cell is measured again.
    """
    return (
        cell is not None
        and cell["source_sha256"] == source
        and all(cell[name] == shape[name] for name in SHAPE)
        and own in cell["results"]
    )
