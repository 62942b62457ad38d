"""Settings of the cache from environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from codegen.wording import shown
from runtime.errors import CacheError

DEFAULT_MAX_BYTES = 512 << 20
DEFAULT_LOCK_SECONDS = 600  # a kernel compiles in seconds; after ten minutes a process is stopped or hangs
TRUST_OTHERS = "CODEGEN_CACHE_TRUST_OTHERS"
LOCK_SECONDS = "CODEGEN_CACHE_LOCK_SECONDS"


def default_folder() -> Path:
    """The default folder of the cache.

    Raises:
        CacheError: if it lies in the home folder and that is unknown.
    """
    given = os.environ.get("CODEGEN_CACHE_DIR")
    try:
        folder = Path(given).expanduser() if given else platformdirs.user_cache_path("sparse-kernel-codegen")
    except RuntimeError:
        folder = None
    if folder is None or str(folder).startswith("~"):  # older platformdirs do not expand ~
        where = f"CODEGEN_CACHE_DIR is {shown(given)}" if given else "the cache lies in the user's home folder"
        raise CacheError(
            f"{where}, and there is no such home folder (HOME is not set, or the user is unknown to the system); "
            "set CODEGEN_CACHE_DIR to a writable folder, or HOME"
        )
    return folder.absolute()


def max_bytes() -> int:
    """The limit of the cache, in bytes.

    Raises:
        CacheError: if the value is not a positive number.
    """
    return _positive("CODEGEN_CACHE_MAX_BYTES", DEFAULT_MAX_BYTES, "bytes")


def lock_seconds() -> int:
    """Seconds that a process waits for another process to compile the same kernel.

    Raises:
        CacheError: if the value is not a positive number.
    """
    return _positive(LOCK_SECONDS, DEFAULT_LOCK_SECONDS, "seconds")


def trusts_others() -> bool:
    """Whether the cache accepts a folder that other users can write to.

    Raises:
        CacheError: if the value is neither 0 nor 1.
    """
    given = os.environ.get(TRUST_OTHERS, "")
    if given not in ("", "0", "1"):
        raise CacheError(f"{TRUST_OTHERS} is {shown(given)}; expected 1 (trust other users) or 0")
    return given == "1"


def _positive(name: str, default: int, unit: str) -> int:
    given = os.environ.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 18 or int(given) == 0:  # ² is a digit, but not a number
        raise CacheError(f"{name} is {shown(given)}; expected a positive number of {unit}")
    return int(given)
