"""The site of the documentation: every page is in its menu, and no link of it leads nowhere or to another host."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from scripts import SCRIPTS, load_script

PROJECT = Path(__file__).resolve().parents[2]
site = load_script("site", SCRIPTS)
PLACES = {"docs/guide/a.md": "guide/a.md", "docs/guide/README.md": "guide/README.md", "README.md": "index.md"}


class Page(HTMLParser):
    """The links of a page, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.loaded, self.anchors = list[str](), list[str](), set[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        addresses = [found[name] for name in ("href", "src", "srcset") if name in found]
        (self.links if tag == "a" else self.loaded).extend(addresses)


class Site(NamedTuple):
    """The folder of a site, and its pages by path."""

    folder: Path
    pages: dict[str, Page]

    def broken(self) -> Iterator[str]:
        """The links that lead to no file, or to no anchor of a page."""
        for path, page in self.pages.items():
            for address in (*page.links, *page.loaded):
                parts = urlsplit(address)
                if parts.scheme or parts.netloc or path == "404.html":  # its addresses begin at the root of a host
                    continue
                name = posixpath.join(posixpath.dirname(path), unquote(parts.path)) if parts.path else path
                name = posixpath.normpath(name)
                if (self.folder / name).is_dir():
                    name = posixpath.normpath(posixpath.join(name, "index.html"))
                anchors = self.pages[name].anchors if parts.fragment and name in self.pages else {parts.fragment}
                if not (self.folder / name).is_file() or unquote(parts.fragment) not in anchors:
                    yield f"{path}: {address}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Site:
    pytest.importorskip("zensical")
    folder = site.build(tmp_path_factory.mktemp("site"))
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.html")}
    return Site(folder, {name: Page(path.read_text(encoding="utf-8")) for name, path in files.items()})


def test_it_is_whole_and_has_no_broken_link(built: Site) -> None:
    """`--strict` refuses links to pages that are not there; these are the others too: files, pictures, anchors."""
    expected = {place for path, place in site.pages().items() if path.endswith(".md") and path != "docs/README.md"}
    assert len(built.pages) == len(expected) + 1, "404.html is one more"
    assert not list(built.broken())


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    texts = {"index.html": '<a href="a/#x"></a><a href="a/#y"></a>', "a/index.html": '<p id="x"><img src="../b.svg">'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    made = Site(tmp_path, {name: Page(text) for name, text in texts.items()})
    assert list(made.broken()) == ["index.html: a/#y", "a/index.html: ../b.svg"]


def test_it_loads_nothing_from_another_host(built: Site) -> None:
    assert not [(path, url) for path, page in built.pages.items() for url in page.loaded if urlsplit(url).netloc]


def test_its_search_finds_words_of_pages(built: Site) -> None:
    index = json.dumps(json.loads((built.folder / "search.json").read_text(encoding="utf-8")))
    assert all(word in index for word in ("SlidingWindow", "select_topk_blocks", "CODEGEN_NO_JIT"))


def test_every_page_is_in_the_menu_once() -> None:
    def places(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            for value in entry.values() if isinstance(entry, dict) else [entry]:
                yield from places(value) if isinstance(value, list) else [value]

    found = list(places(site.navigation()))
    expected = {place for path, place in site.pages().items() if path.endswith(".md")}
    assert sorted(found) == sorted(expected), "an index page of docs/ does not link to a page of its folder"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](a.md#part), [`b`](../../README.md)", "[a](a.md#part), [`b`](../index.md)"),
        ("[here](#part), [there](https://a.b/c.md)", "[here](#part), [there](https://a.b/c.md)"),
        ("[the guide](../guide)", "[the guide](README.md)"),
        ("see [x.py](../../benchmarks/x.py#L1)", "see x.py"),
        (
            "`table[0](a.md)` and\n```python\nf[0](../../x.py)\n```\n",
            "`table[0](a.md)` and\n```python\nf[0](../../x.py)\n```\n",
        ),
    ],
)
def test_links_lead_to_the_same_page_on_the_site(text: str, expected: str) -> None:
    assert site.linked(text, "docs/guide/a.md", PLACES, None) == expected


def test_files_that_are_no_pages_are_links_into_the_repository() -> None:
    text = site.linked("[x](../../benchmarks/x.py#L1)", "docs/guide/a.md", PLACES, "https://a.b/c")
    assert text == "[x](https://a.b/c/blob/main/benchmarks/x.py#L1)"


def test_pictures_of_the_readme_are_found() -> None:
    places = PLACES | {"docs/notebook/x.svg": "notebook/x.svg"}
    text = site.linked('<img src="docs/notebook/x.svg" alt="x">', "README.md", places, None)
    assert text == '<img src="notebook/x.svg" alt="x">'
