"""The exceptions of the code generator."""

from __future__ import annotations


class CodegenError(Exception):
    """Base class of every error that a user's input can cause."""


class SpecError(CodegenError):
    """A spec that cannot become a kernel.

    Attributes:
        field: dotted name of the offending field (``"tile.n"``), or ``""`` when the file as a whole is at fault.
        reason: what the value was and what is allowed.
        location: ``"file.yaml:12"`` once the file is known, else ``""``.
    """

    def __init__(self, field: str, reason: str, location: str = "") -> None:
        self.field = field
        self.reason = reason
        self.location = location
        super().__init__(": ".join(part for part in (location, field, reason) if part))

    def __reduce__(self) -> tuple[type[SpecError], tuple[str, str, str]]:
        """Return how to make it anew, in another process."""
        return type(self), (self.field, self.reason, self.location)

    def at(self, location: str) -> SpecError:
        """Return the same error with the file and line it belongs to."""
        return SpecError(self.field, self.reason, location)
