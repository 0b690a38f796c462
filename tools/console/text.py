"""Plain text for terminals: aligned tables and wrapped lines, at most 100 columns. And JSON, for programs."""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches

WIDTH = 100
SCHEMA = 1


def print_json(command: str, report: Mapping[str, object]) -> None:
    """Print `report` as one line of strict JSON, with the schema's number and the command's name. Raises ValueError for NaN."""
    print(json.dumps({"schema": SCHEMA, "command": command, **report}, allow_nan=False))


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns; the last column wraps within its own width, so that nothing passes column 100."""
    rows = list(rows)
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        lead = "  " + "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        lines += wrapped(lead, row[-1])
    return lines


def wrapped(lead: str, text: str) -> list[str]:
    """Return `text` after `lead`, its later lines indented to where it began; at least 30 columns are left to it.

    An indented line is quoted, such as one of a traceback: it stays whole, or nobody could open the file that it names.

    >>> wrapped("* ", "raised in" + "\\n  " + 60 * "one, " + "two")[1].count("one")
    60
    """
    room = max(30, WIDTH - len(lead))
    lines = text.split("\n")
    parts = [part for line in lines for part in ([line] if line[:1].isspace() else textwrap.wrap(line, room) or [""])]
    return [f"{lead if i == 0 else ' ' * len(lead)}{part}".rstrip() for i, part in enumerate(parts)]


def error_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text, or two if it ends with a colon: some libraries append pages."""
    first, *more = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    second = f" {more[0]}" if more and first.endswith(":") else ""
    return f"{type(error).__name__}: {first}{second}"


def in_bytes(count: int | None) -> str:
    if count is None:
        return "unknown memory"
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if size < 1000 else f"{size:.0f} {units[0]}"


def in_seconds(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:,.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds / 1e-6:.2g} us" if seconds else "0 s"


def in_thousands(number: float) -> str:
    """Return a count for people, to three or four digits: 12, 4,096, 1.2e+07."""
    return f"{number:,.3g}" if number >= 1e6 or number < 100 else f"{number:,.0f}"


def _tokens(value: float) -> str:
    """Return 16K, 1,000 or 1M: powers of two by 1024, others by a thousand."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}K"
    return in_thousands(value) if value < 1e6 else f"{value / 1e6:,.3g}M"


UNITS: dict[str, Callable[[float], str]] = {
    "bytes": lambda value: in_bytes(round(value)),
    "number": lambda value: f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}",
    "seconds": in_seconds,
    "times": lambda value: f"{value:,.3g}x" if value < 1000 else f"{value:,.0f}x",
    "tokens": _tokens,
}
"""Texts of numbers by unit."""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns, however wide; below the first row, its head, columns of numbers end alike.

    >>> print(*aligned([("tokens", "who", "time"), ("256", "sdpa", "9.5 ms"), ("1,024", "native", "-")]), sep="\\n")
    tokens  who       time
       256  sdpa    9.5 ms
     1,024  native       -
    """
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    sides = [">" if _are_numbers(column[1:]) else "<" for column in columns]
    return ["  ".join(f"{cell:{s}{w}}" for cell, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in rows]


def _are_numbers(cells: Sequence[str]) -> bool:
    """Return True if each is an amount, or a sign that there is none; ranges and limits in words are not."""
    amounts = [cell for cell in cells if cell not in ("", "-", "?")]
    return bool(amounts) and all(re.fullmatch(r"-?[\d,.]+(e[+-]?\d+)?[%x]?( [A-Za-z/]+)?", cell) for cell in amounts)


_UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question after the nearest of these names, to put behind a sentence; nothing where none is near.

    >>> nearest("nativ", ["native", "sdpa"])
    '; did you mean native?'
    >>> nearest("abacus", ["native", "sdpa"])
    ''
    """
    names = list(known)
    meant = next((one for one in names if len(name) > 2 and one.startswith(name)), None)
    near = get_close_matches(name, names, 1)
    return f"; did you mean {meant or near[0]}?" if meant or near else ""


def with_nearest(message: str, options: Iterable[str]) -> str:
    """Return an error of argparse, with the option that was meant."""
    option = _UNKNOWN.search(message)
    return message + nearest(option[1], options) if option else message
