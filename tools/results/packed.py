"""Results of thousands of rows, each a line of text: a word for each of its fields."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, TypeVar

from dilkit.tools.results.record import Result

P = TypeVar("P", bound="PackedRow")


@dataclass(frozen=True)
class PackedRow:
    """A row whose fields are texts without blanks and whole numbers.

    >>> @dataclass(frozen=True)
    ... class Size(PackedRow):
    ...     name: str
    ...     bytes: "int"
    >>> Size("tile", 128).row()
    'tile 128'
    """

    @classmethod
    def read(cls: type[P], row: str) -> P:
        """Return the row of a line. Raises ValueError."""
        names, words = field_names(cls), row.split()
        whole = [field.type == "int" for field in fields(cls)]
        if len(words) != len(names) or not all(word.isdecimal() for word, one in zip(words, whole, strict=True) if one):
            raise ValueError(f"rows: {row[:40]!r} where {', '.join(names)} are needed")
        values: list[Any] = [int(word) if one else word for word, one in zip(words, whole, strict=True)]
        return cls(*values)

    def row(self) -> str:
        """Return the line of a file."""
        return " ".join(map(str, astuple(self)))


def field_names(kind: type[PackedRow]) -> tuple[str, ...]:
    """Names of the words of a row."""
    return tuple(field.name for field in fields(kind))


@dataclass(frozen=True, kw_only=True)
class PackedResult(Result):
    """A result with rows of the kind `ROW`, made with a version of NVRTC; `fields` names the words of a row."""

    ROW: ClassVar[type[PackedRow]]

    nvrtc: str
    fields: tuple[str, ...] = ()
    rows: tuple[str, ...]

    def __post_init__(self) -> None:
        names = field_names(self.ROW)
        if self.fields not in ((), names):
            raise ValueError(f"fields: {', '.join(self.fields)[:80]} where {', '.join(names)} are needed")
        object.__setattr__(self, "fields", names)
        self.unpacked()

    def unpacked(self) -> list[Any]:
        """The rows."""
        return [self.ROW.read(row) for row in self.rows]
