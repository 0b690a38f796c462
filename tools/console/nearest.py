"""Names that are not known, with the one that was meant. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_CHOICE = re.compile(r"invalid choice: '?(.+?)'? \(choose from (.+)\)$")
_UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)")


def nearest(name: str, known: Iterable[str]) -> str:
    """The question whether one of these names was meant, to put behind a sentence; nothing where none is near.

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
    """An error of argparse, with the choice or the option that was meant."""
    if found := _CHOICE.search(message):
        return message + nearest(found[1], re.findall(r"[\w-]+", found[2]))
    if found := _UNKNOWN.search(message):
        return message + nearest(found[1], options)
    return message
