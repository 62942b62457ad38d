"""Commands that install missing dependencies. The package is on no registry, so its location decides."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from codegen.wording import in_shell

DISTRIBUTION = "sparse-kernel-codegen"
_TREE = Path(__file__).resolve().parents[1]


def install_command(extra: str) -> str:
    """The pip command that installs an extra.

    In a checkout it installs the extra of that checkout, editable; the path is ``.`` if the current folder is the
    checkout. Elsewhere it names the packages of the extra.

    Args:
        extra: a key of ``[project.optional-dependencies]``, such as ``torch``.
    """
    if (_TREE / "pyproject.toml").is_file():
        return f"pip install -e {in_shell(f'{_place()}[{extra}]')}"
    packages = _packages(extra) or (f"{DISTRIBUTION}[{extra}]",)
    return f"pip install {' '.join(map(in_shell, packages))}"


def reinstall_command() -> str:
    """The pip command that restores the files of an installed wheel; WHEEL stands for a wheel of unknown place."""
    import importlib.metadata  # noqa: PLC0415 - commands start without

    url = None
    try:
        text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        url = json.loads(text)["url"] if text else None
    except (importlib.metadata.PackageNotFoundError, ValueError, KeyError, TypeError):
        pass
    return f"pip install --force-reinstall --no-deps {in_shell(url) if isinstance(url, str) else 'WHEEL'}"


def _place() -> str:
    try:
        return "." if Path.cwd() == _TREE else str(_TREE)
    except OSError:  # the current folder was removed
        return str(_TREE)


@cache
def _packages(extra: str) -> tuple[str, ...]:
    """Requirements of an extra, from the metadata of the installed wheel; empty if there is no metadata."""
    import importlib.metadata  # noqa: PLC0415 - commands start without

    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    parts = [each.partition(";") for each in requirements]
    return tuple(name.strip() for name, _, marker in parts if marker.replace('"', "'").strip() == f"extra == '{extra}'")
