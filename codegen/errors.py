"""The exceptions of the code generator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from codegen.wording import one_line

MOST_OF_PLACE = 500
"""Most characters of a path in a message; short paths are not cut."""
MOST_OF_MESSAGE = 2000
"""Most characters of a message that may list several files or values."""


class CodegenError(Exception):
    """Base class of every error that a user's input can cause."""


class FileError(CodegenError):
    """A file that cannot be read or written.

    Attributes:
        path: the file.
        reason: why, in words.
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = one_line(reason)
        super().__init__(f"{one_line(str(path), MOST_OF_PLACE)}: {self.reason}")

    def __reduce__(self) -> tuple[type[FileError], tuple[Path, str]]:
        """Constructor and arguments, for pickling."""
        return type(self), (self.path, self.reason)


class MissingFileError(FileError):
    """A file to read does not exist."""


class SpecError(CodegenError):
    """A spec that is not valid. The message is one line of bounded length, whatever the spec contains.

    Attributes:
        field: dotted name of the offending field (``"tile.n"``), or ``""`` if the error concerns the whole file.
        reason: the value and the allowed values.
        location: ``"file.yaml:12"`` once the file is known, else ``""``.
        others: further mistakes of the same spec.
    """

    def __init__(self, field: str, reason: str, location: str = "", others: tuple[SpecError, ...] = ()) -> None:
        self.field = one_line(field)
        self.reason = one_line(reason, MOST_OF_MESSAGE)
        self.location = one_line(location, MOST_OF_PLACE)
        self.others = others
        super().__init__(": ".join(part for part in (self.location, self.field, self.reason) if part))

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str, tuple[SpecError, ...]]]:
        """Constructor and arguments, for pickling."""
        return type(self), (self.field, self.reason, self.location, self.others)

    def at(self, location: str) -> SpecError:
        """Same error with its file and line, such as ``"file.yaml:12"``."""
        return SpecError(self.field, self.reason, location, self.others)

    def located(self, locate: Callable[[str], str]) -> SpecError:
        """Same error and its others, each with the file and line that a function gives for its field."""
        others = tuple(each.located(locate) for each in self.others)
        return SpecError(self.field, self.reason, locate(self.field), others)


class ExportError(FileError):
    """A folder is not an exported kernel, was changed since the export, or has another version of the package."""
