"""JSON from anywhere, read strictly: what passes is of a sane size and depth, finite and printable; what does not, says why."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from dilkit.tools.console.text import visible

MOST_BYTES = 16 * 2**20
MOST_DEPTH = 32
MOST_CHARACTERS = 20_000
"""Of one text or name."""
MOST_DIGITS = 20
"""Of one whole number: those of 64 bits."""


class NotStrict(ValueError):
    """Why a file is not read. The text does not name the file."""


def read(path: Path) -> Any:
    """What the JSON file holds, its texts and names with what cannot be printed made `visible`. Raises `NotStrict`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except IsADirectoryError:
        raise NotStrict("a folder; name the files in it") from None
    except OSError as error:
        raise NotStrict(f"cannot be read: {error.strerror or error}") from None
    if len(raw) > MOST_BYTES:
        raise NotStrict(f"larger than {MOST_BYTES // 2**20} MiB, which no result is")
    return parse(raw)


def parse(raw: bytes) -> Any:
    """As `read`, of a file's bytes."""
    if not raw.strip():
        raise NotStrict("an empty file: not a whole JSON file; truncated? run the command again")
    try:
        text = raw.decode("utf-8")
        found = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_object)
    except NotStrict:
        raise
    except UnicodeDecodeError as error:
        raise NotStrict(f"not a text in UTF-8 (byte {error.start}): no JSON file") from None
    except RecursionError:
        raise NotStrict(_TOO_DEEP) from None
    except ValueError as error:
        raise NotStrict(f"not a whole JSON file ({error}); truncated? run the command again") from None
    return _printable(found, 0)


_TOO_DEEP = f"nested more than {MOST_DEPTH} deep, which no result is"


def _whole(digits: str) -> int:
    return int(digits) if len(digits) <= MOST_DIGITS else _refuse(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _refuse(digits: str) -> NoReturn:
    shown = digits if len(digits) <= MOST_DIGITS else f"{digits[:MOST_DIGITS]}... ({len(digits):,} characters)"
    raise NotStrict(f"the number {shown}, which no measurement is: results hold finite numbers of 64 bits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise NotStrict(f"the name {visible(twice, 40)} stands twice in one object")
    return found


def _printable(value: Any, depth: int) -> Any:
    if depth > MOST_DEPTH:
        raise NotStrict(_TOO_DEEP)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_printable(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {_text(name): _printable(item, depth + 1) for name, item in value.items()}
    return value


def _text(value: str) -> str:
    if len(value) > MOST_CHARACTERS:
        raise NotStrict(
            f"a text of {len(value):,} characters ({visible(value, 20)}), where a result has {MOST_CHARACTERS:,} at most"
        )
    return visible(value)
