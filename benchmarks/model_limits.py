"""Where the notes say what limits rows of benchmarks/models.py that are slower than a peer: for its page.

Rows are measured again, so a row may be here without being slower. One that is slower and is not here has no
explanation yet.
"""

from __future__ import annotations

from collections.abc import Iterable

NOTES = "ladder/notes-attention.md"
"""Relative to the page."""
SECTIONS = {
    "Shapes of models": (
        *("hunyuanvideo-32896", "llama3-8b-documents-8192", "llama3-8b-documents-32768", "llama3-8b-chunk-2048x8192"),
        *("qwen3-0.6b-4096", "vsa-wan21-1.3b-23296", "vsa-wan21-14b-76800", "dit-xl-2-256-b32", "mistral-7b-8192"),
        *("wan21-14b-cross-32760x512", "wan21-14b-cross-75600x512", "wan21-14b-cross-3600x512", "wan22-ti2v-5b-7040"),
        *("wan21-1.3b-self-14040", "dit-xl-2-256-b16", "phi3-mini-2048", "phi3-mini-4096-b4", "llama3-8b-32768"),
        *("llama3-8b-documents-16384", "llama3-8b-packed-65536", "llama3-8b-chunk-2048x4096"),
        *("llama3-8b-chunk-2048x32768", "vsa-wan21-1.3b-29120", "vsa-wan21-1.3b-11648", "vsa-wan21-14b-29120"),
        *("vsa-wan21-14b-11648", "gemma3-12b-global-32768"),
    ),
    "Beside FlashAttention 4, counter by counter": (
        *("flux1-dev-4608-backward", "vit-l-16-197-b64-backward", "esm2-3b-1024-b8-backward", "gpt2-1024-b16-backward"),
        *("llama3-8b-8192-backward", "llama3-8b-documents-8192-backward", "llama3-8b-packed-16384-backward"),
        *("mistral-7b-16384-backward", "moba-llama3-8b-32768-backward", "phi3-mini-4096-backward"),
    ),
}
"""Headings of the notes, and the rows that they explain."""
UNEXPLAINED = "Not explained yet"


def anchor(heading: str) -> str:
    """The end of a link to a heading."""
    return heading.lower().replace(",", "").replace(" ", "-")


def limits(names: Iterable[str]) -> dict[str, list[str]]:
    """Rows by the link to what limits them, in the order of the notes; those without one last."""
    known = {row: heading for heading, rows in SECTIONS.items() for row in rows}
    found: dict[str, list[str]] = {heading: [] for heading in (*SECTIONS, UNEXPLAINED)}
    for name in dict.fromkeys(names):
        found[known.get(name, UNEXPLAINED)].append(name)
    links = {heading: f"[{heading}]({NOTES}#{anchor(heading)})" for heading in SECTIONS}
    return {links.get(heading, heading): rows for heading, rows in found.items() if rows}
