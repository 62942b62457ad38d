"""Drawings as SVG text, colored by the site's style sheet."""

from __future__ import annotations

from html import escape

from markupsafe import Markup

WIDTH = 480
"""Width of a drawing in units, narrow enough for legible text on a phone."""
CHARACTER = 6.6  # width of a character of labels with font size 12


class Drawing:
    """A stack of shapes.

    Args:
        title: description for screen readers.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, hint: str = "") -> None:
        """Draw a rectangle; ``hint`` is its tooltip."""
        told = f"<title>{escape(hint)}</title>" if hint else ""
        place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._parts.append(f'<rect {place} class="{kind}">{told}</rect>' if told else f'<rect {place} class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text with its baseline at ``y``."""
        look = f' class="{kind}"' if kind else ""
        where = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._parts.append(f'<text x="{number(x)}" y="{number(y)}"{look}{where}>{escape(text)}</text>')

    def path(self, steps: str, kind: str) -> None:
        """Draw a path."""
        self._parts.append(f'<path d="{steps}" class="{kind}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Draw a straight line."""
        self.path(f"M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}", kind)

    def circle(self, x: float, y: float, radius: float, kind: str, hint: str = "") -> None:
        """Draw a disc."""
        told = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" class="{kind}">{told}</circle>'
        )

    def arrow(self, x: float, y1: float, y2: float, kind: str = "arrow") -> None:
        """Draw an arrow down or up."""
        tip = 4 if y2 > y1 else -4
        self.path(f"M{number(x)} {number(y1)}V{number(y2)}m-4 {-tip}l4 {tip}l4 {-tip}", kind)

    def picture(self, height: float, width: float = WIDTH) -> Markup:
        """The SVG text."""
        head = f'<svg viewBox="0 0 {number(width)} {number(height)}" role="img" aria-label="{escape(self._title)}">'
        return Markup("".join([head, *self._parts, "</svg>"]))


def number(value: float) -> str:
    """A coordinate with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def wrapped(words: list[str], width: float, most: int) -> list[str]:
    """Comma-separated words in lines that fit ``width``; at most ``most`` lines, the last one truncated."""
    lines = [""]
    room = int(width / CHARACTER)
    for i, word in enumerate(words):
        piece = word + ("," if i + 1 < len(words) else "")
        if lines[-1] and len(lines[-1]) + 1 + len(piece) > room:
            lines.append("")
        lines[-1] = f"{lines[-1]} {piece}".strip()
    return [*lines[: most - 1], lines[most - 1] + " ..."] if len(lines) > most else lines
