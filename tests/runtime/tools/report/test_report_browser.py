"""The site of ``codegen report`` in a browser: no complaint, no request, keyboard, a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Chromium
from typer.testing import CliRunner

from runtime.cli import app
from runtime.tools.report import tree
from runtime.tools.report.tree import Tree

if chromium.place() is None:
    pytest.skip("no Chromium: apt-get install chromium", allow_module_level=True)

KERNELS = ("h100_topk32", "h100_bsr_spmm_b128_n16", "l4_topk32", "h100_topk32_b64_self_ordered")
PHONE, DESKTOP = 375, 1280
NAMES = "[...document.querySelectorAll('#kernels tbody tr:not([hidden]) a')].map(a => a.textContent)"
WIDE = """[...document.querySelectorAll('body *')].filter(e => !e.closest('pre, .skip')
  && e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "tree_of", lambda out: Tree("0" * 40, ("a" * 200,)))
        diff = ("--diff", "HEAD", "HEAD") if tree.in_repository() else ()
        assert CliRunner().invoke(app, ["report", *KERNELS, "--out", str(out), *diff]).exit_code == 0
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as found:
        yield found


def test_pages_fit_and_nothing_complains(browser: Chromium, folder: Path) -> None:
    pages = sorted(folder.glob("*.html"))
    assert len(pages) >= len(KERNELS) + 1
    for width in (PHONE, DESKTOP):
        browser.size(width)
        for page in pages:
            browser.open(page)
            browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert browser.evaluate("document.documentElement.scrollWidth") <= width, page.name
            assert browser.evaluate(WIDE) == [], f"{page.name} at {width}"
    assert browser.complaints == []
    own = folder.resolve().as_uri()
    assert not [url for url in browser.requests if not url.startswith((own, "data:", "about:"))]


def focused(browser: Chromium) -> str:
    told = browser.evaluate("document.activeElement.name || document.activeElement.textContent")
    assert isinstance(told, str)
    return told


def tab_to(browser: Chromium, wanted: str) -> None:
    for _ in range(40):
        if focused(browser) == wanted:
            return
        browser.press("Tab")
    raise AssertionError(f"no Tab leads to {wanted}")


@pytest.fixture
def index(browser: Chromium, folder: Path) -> Chromium:
    browser.size(DESKTOP)
    browser.open(folder / "index.html")
    return browser


def test_the_index_is_filtered_by_keyboard(index: Chromium) -> None:
    assert index.evaluate(NAMES) == sorted(KERNELS)
    tab_to(index, "words")
    index.write("TOPK32 attention")
    assert index.evaluate(NAMES) == ["h100_topk32", "h100_topk32_b64_self_ordered", "l4_topk32"]
    assert index.evaluate("document.querySelector('#count').textContent") == "3 of 4 kernels"
    tab_to(index, "arch")
    index.press("ArrowDown")
    assert index.evaluate(NAMES) == ["l4_topk32"]
    tab_to(index, "receipt")
    index.press("Tab")  # to the button that clears
    index.press("Enter")
    index.evaluate("new Promise(done => setTimeout(done, 20))")
    assert index.evaluate(NAMES) == sorted(KERNELS)
    assert index.complaints == []


def test_the_index_is_sorted_by_keyboard(index: Chromium) -> None:
    states = "[...document.querySelectorAll('#kernels thead th')].map(th => th.getAttribute('aria-sort'))"
    assert index.evaluate(states) == ["ascending", *[None] * 8]
    tab_to(index, "TFLOPS")
    index.press("Enter")
    assert index.evaluate(states) == [*[None] * 5, "ascending", *[None] * 3]
    figures = "[...document.querySelectorAll('#kernels tbody tr')].map(r => r.cells[5].dataset.value)"
    known = [float(value) for value in index.evaluate(figures) if value]
    assert known == sorted(known) and len(known) == 3
    assert index.evaluate(figures)[-1] == "", "what was not measured comes last"
    index.press(" ")
    assert index.evaluate(states)[5] == "descending"
    assert [float(value) for value in index.evaluate(figures) if value] == known[::-1]
    assert index.evaluate(figures)[-1] == ""
    for _ in range(5):
        index.press("Tab", shift=True)
    assert focused(index) == "Kernel"
    index.press("Enter")
    assert index.evaluate(NAMES) == sorted(KERNELS)


def test_the_first_tab_leads_past_the_banner(index: Chromium) -> None:
    index.press("Tab")
    assert focused(index) == "Skip to the content"
    index.press("Enter")
    assert index.evaluate("location.hash") == "#content"


def test_a_kernel_is_reached_by_keyboard(index: Chromium) -> None:
    tab_to(index, "l4_topk32")
    index.press("Enter")
    index.evaluate("new Promise(done => setTimeout(done, 300))")
    assert index.evaluate("document.querySelector('h1').textContent") == "l4_topk32"


def test_both_schemes_of_colors_can_be_read(browser: Chromium, folder: Path) -> None:
    """Contrast of text to its ground, by WCAG 2: 4.5 at least."""
    for dark in (False, True):
        browser.size(DESKTOP, dark=dark)
        browser.open(folder / "kernel-h100_topk32.html")
        colors = browser.evaluate(
            "(() => { const s = getComputedStyle(document.documentElement);"
            "return Object.fromEntries(['paper', 'ink', 'soft', 'mark', 'good', 'bad', 'tint', 'warn', 'warn-ink']"
            ".map(n => [n, s.getPropertyValue('--' + n).trim()])); })()"
        )
        for text, ground in [(each, on) for each in ("ink", "soft", "mark", "good", "bad") for on in ("paper", "tint")]:
            assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground, dark)
        assert contrast(colors["warn-ink"], colors["warn"]) >= 4.5
        assert contrast(colors["mark"], colors["warn"]) >= 4.5


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    digits = color.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
