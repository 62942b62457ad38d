"""The page of benchmarks/serving.py, written from a file of JSON lines and from nothing else; read without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from models_page import (
    BACK_TO_BACK,
    GRAPH,
    HOST,
    NO_RECEIPT,
    OLDER,
    SINGLE,
    is_current,
    microseconds,
    read,
    row_name,
    table,
    wrapped,
    written,
)
from records import DASH, OURS, failures

__all__ = ["BACK_TO_BACK", "FLOP_RATE", "GRAPH", "HOST", "INVARIANT", "RATE", "SINGLE", "line", "text_of", "write"]
Record = Mapping[str, Any]
INVARIANT = "ours, batch_invariant"
RATE = "gigabytes_per_second"
FLOP_RATE = "teraflops"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "notebook" / "serving.md"
WORKS = {
    "dense": "Each request has one query, which sees all keys of its request. The name of a row has the requests and "
    "their keys, the heads of q and of K and V, and the tokens of a page. head_dim is 128.",
    "contiguous": "K and V of a request are contiguous, `block_table` is left out. Otherwise as above.",
    "front door": "The same as one call of `block_sparse_attention` with `out`: q is (batch, heads, 1, head_dim), K "
    "and V are (batch, kv_heads, keys, head_dim).",
    "MSA": "MiniMax M3's decoding: each query and K/V head has a list of 16 of 256 blocks of 128 keys, drawn at "
    "random. A page is a block. K and V of a token are in one row. head_dim is 128. A row's queries are those of each "
    "request.",
    "QSA": "Each query has a list of 2048 tokens in groups of 4, drawn at random, for both K/V heads; head_dim is 256. "
    "The peer also multiplies its result by a gate. Requests have 32768 keys; in a batch of 128, 16384.",
    "prefill": "Each request has a chunk of causal queries, at its last keys. head_dim is 128, unless the name has "
    "another. TFLOPS are those of both products over the pairs that are seen.",
    "MSA prefill": "As MSA above, for a chunk of one request. Lists have blocks before the chunk only.",
    "QSA prefill": "As QSA above, for a chunk of one request. Lists have tokens before the chunk only.",
}
"""What rows are about, by their work, in the order of the page."""
TITLES = {
    "dense": "Pages",
    "contiguous": "Contiguous K and V",
    "front door": "Contiguous K and V, by `block_sparse_attention`",
    "MSA": "Lists of blocks",
    "QSA": "Lists of tokens",
    "prefill": "Prefill",
    "MSA prefill": "Prefill with lists of blocks",
    "QSA prefill": "Prefill with lists of tokens",
}


def best_peer(record: Record, figure: str = GRAPH) -> str | None:
    """The peer with the least time of a kind, if one has it."""
    times = {
        label: result[figure]
        for label, result in record["results"].items()
        if label not in (OURS, INVARIANT) and figure in result
    }
    return min(times, key=lambda label: times[label], default=None)


def figure_of(record: Record, label: str | None, figure: str) -> float | None:
    """A figure of a call, if it has one."""
    found: float | None = record["results"].get(label, {}).get(figure)
    return found


def ratio(record: Record) -> float | None:
    """Time of the best peer over ours, in a graph; None if one of both has no time."""
    own, other = figure_of(record, OURS, GRAPH), figure_of(record, best_peer(record), GRAPH)
    return None if own is None or other is None else other / own


def shown_ratio(record: Record) -> str:
    """The ratio; bold if it is below 1."""
    value = ratio(record)
    return f"**{written(value)}**" if value is not None and value < 1 else written(value)


def plain(value: float | None, digits: int = 0) -> str:
    """A number, or a dash."""
    return DASH if value is None else f"{value:.{digits}f}"


def line(record: Record) -> str:
    """A record in a line, as the benchmark prints it."""
    parts = [record["name"]]
    for label, result in record["results"].items():
        times = "/".join(microseconds(result.get(figure)) for figure in (GRAPH, SINGLE, BACK_TO_BACK))
        parts.append(
            f"{label} {times} us, {plain(rate_of(result))} {unit_of(record)}, host {plain(result.get(HOST), 1)}"
        )
    parts += [f"ratio {written(ratio(record))}", *(f"{label}: {why}" for label, why in record["failed"].items())]
    return "; ".join([*parts, f"{record.get('seconds', 0)} s"])


def cells(record: Record, name: Callable[[Record], str]) -> list[str]:
    """A row of the table."""
    peer = best_peer(record)
    times, host = (figure_of(record, OURS, figure) for figure in (GRAPH, HOST))
    rate = rate_of(record["results"].get(OURS, {}))
    return [
        name(record),
        microseconds(times),
        plain(rate),
        peer or DASH,
        microseconds(figure_of(record, peer, GRAPH)),
        shown_ratio(record),
        *(
            f"{microseconds(figure_of(record, OURS, figure))} / {microseconds(figure_of(record, peer, figure))}"
            for figure in (SINGLE, BACK_TO_BACK)
        ),
        f"{plain(host, 1)} / {plain(figure_of(record, peer, HOST), 1)}",
        microseconds(figure_of(record, INVARIANT, GRAPH)),
    ]


def rate_of(result: Mapping[str, float]) -> float | None:
    """Rate of a call: TFLOPS of prefill, GB/s of decoding."""
    return result.get(FLOP_RATE, result.get(RATE))


def unit_of(record: Record) -> str:
    """Unit of the rates of a record."""
    return "TFLOPS" if record["work"].endswith("prefill") else "GB/s"


def headings(unit: str) -> list[str]:
    """Headings of a table."""
    times = ["row", "us in a graph", unit, "best peer", "its us", "ratio"]
    return [*times, *(f"{what}, ours / peer" for what in ("single call", "back to back", "host")), "`batch_invariant`"]


def summary(records: Sequence[Record]) -> str:
    """How many rows are ahead, and which are not."""
    timed = [record for record in records if ratio(record) is not None]
    behind = [record for record in timed if (ratio(record) or 0) < 1]
    ahead = f"{len(timed) - len(behind)} of {len(timed)} rows with a peer take as long as the best peer, or less."
    if not behind:
        return ahead
    named = ", ".join(f"`{record['name']}` {written(ratio(record))}" for record in behind)
    return f"{ahead} Slower: {named}."


def beside_fa3(records: Sequence[Record]) -> str:
    """Ratios to FA3, which reads pages as we do; SDPA's K and V are contiguous."""
    pairs = [(figure_of(record, "FA3", GRAPH), figure_of(record, OURS, GRAPH)) for record in records]
    ratios = [theirs / mine for theirs, mine in pairs if theirs is not None and mine is not None]
    return f"With FA3 as the peer, ratios are {min(ratios):.2f} to {max(ratios):.2f}." if ratios else ""


def remarks(records: Sequence[Record]) -> str:
    """What the records say about missing figures."""
    return " ".join(
        f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(r["remark"] for r in records if "remark" in r)
    )


def text_of(records: Sequence[Record], is_current: Callable[[Record], bool]) -> str:
    """The page.

    Raises:
        SystemExit: if the records are of several machines, or there are none.
    """
    about = {f"{record['device']}, driver {record['driver']}" for record in records}
    if len(about) != 1:
        raise SystemExit(f"error: the rows are of {' and of '.join(sorted(about)) or 'no machine'}: of one, please")
    dates = sorted({record["date"] for record in records})
    versions = ", ".join(f"{name} {version}" for name, version in sorted(records[-1]["versions"].items()))
    name = partial(row_name, is_current=is_current)
    lines = [
        "# Attention over a KV cache",
        "Written by `python benchmarks/serving.py --page FILE`. Do not edit this page by hand.",
        f"{about.pop()}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {versions}.",
        "Each row is one call of `paged_attention` with `out` and `workspace`, in bf16. Times are medians in "
        "microseconds: in a CUDA graph of up to 20 calls, of a single call after a pause, of calls back to back, and "
        "of the host until a call returns ([how times are taken](measuring.md)). GB/s are the bytes of K and V that "
        "some query sees, each counted once for a request and K/V head, over the time in a graph. Rows of less than "
        "50 MB read from the L2 cache. A ratio is the time of the best peer in a graph over ours; it is bold where a "
        "peer is faster. The last column is our time in a graph with `batch_invariant=True`. All of each result was "
        "compared with float32. FA3 and vLLM Triton are the kernels that vLLM 0.33.0 calls on Hopper, taken from its "
        "wheel. SDPA has contiguous copies of K and V. [Serving](../guide/serving.md) describes the call.",
        f"{summary(records)} {beside_fa3(records)}".strip(),
    ]
    lines += [found] if (found := remarks(records)) else []
    shown = " ".join(map(name, records))
    marks = {
        OLDER: "measured with an earlier source of the kernel.",
        NO_RECEIPT: "the kernel had no receipt when this row was measured: only the result of this row was compared.",
    }
    lines += [f"{mark}: {means}" for mark, means in marks.items() if mark in shown]
    parts = [*map(wrapped, lines)]
    for work, text in WORKS.items():
        if found := [record for record in records if record["work"] == work]:
            rows = [cells(record, name) for record in found]
            parts += [f"## {TITLES[work]}", wrapped(text), "\n".join(table(headings(unit_of(found[0])), rows))]
    if missing := failures({"rows": records}):
        items = [f"- {', '.join(f'`{row}`' for row in rows)}: {label}: {why}" for (label, why), rows in missing.items()]
        parts += ["## No time", "\n".join(map(wrapped, items))]
    return "\n\n".join(parts) + "\n"


def write(source: Path, page: Path = PAGE) -> None:
    """Write the page."""
    text = text_of(read(source), is_current)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(f"wrote {page}")
