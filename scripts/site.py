"""Builds the documentation site, with search: the pages of docs/, and the README as the home page.

    python scripts/site.py                                # to build/site/html
    python scripts/site.py --repository https://HOST/OWNER/NAME    # with links to source files

The pages are copied to a folder with mkdocs.yml, where zensical builds them. A link to a file that is not on the site
becomes a link to the repository, or plain text if no repository is given.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("guide", "reference", "notebook")
PROJECT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
HOME = "index.md"
CODE = r"^ *```.*?^ *```|`[^`\n]+(?:\n(?![-*|\n]|\d+\.)[^`\n]+)?`"  # fences, and spans of one or two lines
LINK = re.compile(
    rf"(?P<code>{CODE})|(?P<label>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
SOURCE = re.compile(r'(?P<before>\b(?:src|srcset)=")(?P<target>[^":]+)(?P<after>")')


def pages() -> dict[str, str]:
    """Paths of pages and pictures on the site, by their paths in the project."""
    found = {path: posixpath.relpath(path, "docs") for path in _files("docs") if path != "docs/README.md"}
    found |= {name: f"project/{name}" for name in PROJECT_PAGES}
    return found | {"README.md": HOME, "docs/README.md": HOME}


def staged(folder: Path, repository: str | None = None) -> Path:
    """Copy pages and pictures to a folder, with adapted links; return its mkdocs.yml."""
    places = pages()
    for path, place in places.items():
        target = folder / "docs" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if not path.endswith(".md"):
            shutil.copyfile(ROOT / path, target)
        elif path != "docs/README.md":
            target.write_text(linked(_read(path), path, places, repository), encoding="utf-8")
    settings: dict[str, Any] = yaml.safe_load(_read("mkdocs.yml"))
    settings |= {"docs_dir": "docs", "site_dir": "html", "nav": navigation()}
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    return folder / "mkdocs.yml"


def linked(text: str, path: str, places: dict[str, str], repository: str | None) -> str:
    """Page with links adapted to the site.

    Args:
        text: the page.
        path: its path in the project.
        places: paths of pages and pictures on the site.
        repository: address of the repository, for links to files that are not on the site.
    """
    here = posixpath.dirname(places[path])

    def moved(target: str) -> str | None:
        """Target of a link on the site; None for a file that is not on the site."""
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
        place = places.get(file) or places.get(f"{file}/README.md")
        return None if place is None else posixpath.relpath(place, here or ".")

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match["label"], match["target"], match["anchor"] or ""
        if match["code"] or not target or re.match(r"[a-z]+:", target):
            return match[0]
        if (place := moved(target)) is not None:
            return f"{label}({place}{anchor})"
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        return f"{label}({repository}/blob/main/{file}{anchor})" if repository else label[1:-1]

    text = LINK.sub(link, text)
    return SOURCE.sub(lambda match: f"{match['before']}{moved(match['target'])}{match['after']}", text)


def navigation() -> list[dict[str, Any]]:
    """Menu of the site: per part, the index page followed by the pages in the order of the index."""
    menu: list[dict[str, Any]] = [{"Home": HOME}]
    for part in PARTS:
        index = f"docs/{part}/README.md"
        listed = [
            {label: path[len("docs/") :]} for path, label in linked_pages(index) if path.startswith(f"docs/{part}/")
        ]
        menu.append({title(index): [f"{part}/README.md", *listed]})
    return [*menu, {"Project": [{title(name): f"project/{name}"} for name in PROJECT_PAGES]}]


def linked_pages(path: str) -> Iterator[tuple[str, str]]:
    """Yield the pages that a page links to and their labels, in order, each page once.

    An index page in its own folder is followed by the pages of that folder.
    """
    seen = {path}
    for match in LINK.finditer(_read(path)):
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["target"] or ""))
        if file.endswith(".md") and file not in seen and (ROOT / file).is_file():
            seen.add(file)
            yield file, match["label"][1:-1]
            folder = posixpath.dirname(file)
            if file.endswith("/README.md") and folder.startswith(posixpath.dirname(path)):
                inner = [each for each in _files(folder) if each.endswith(".md") and each not in seen]
                seen |= set(inner)
                yield from ((each, title(each)) for each in inner)


def title(path: str) -> str:
    """Heading of a page."""
    (found,) = re.findall(r"\A# (.+)$", _read(path), re.MULTILINE)
    return str(found)


def build(folder: Path, repository: str | None = None) -> Path:
    """Build the site in a folder and return the folder of its pages.

    Raises:
        subprocess.CalledProcessError: if a link is broken.
    """
    staged(folder, repository)
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=folder, check=True)
    return folder / "html"


def _files(folder: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*") if path.is_file())


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Build the site; return 1 if a link is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="default: build/site")
    parser.add_argument("--repository", metavar="URL", help="address of the repository, for links to its files")
    options = parser.parse_args(arguments)
    try:
        print(build(options.out, options.repository))
    except subprocess.CalledProcessError:
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
