"""A call that means nothing: what is called, which error it raises, and what the message must hold."""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from dilkit import Pattern
from dilkit.tools.cli import main

P = Pattern([4, 8], [1, 2])
Q = torch.zeros(2, 6, 4, 8)
ROWS = torch.zeros(2, 6, 32)
MASK = torch.zeros(2, 6, dtype=torch.bool)


class Case(NamedTuple):
    """`call()` must raise `error` with every one of `fragments` in its text."""

    call: Callable[[], Any]
    error: type[Exception] | tuple[type[Exception], ...]
    fragments: tuple[str, ...]
    environment: Mapping[str, str] = {}


class CommandError(Exception):
    """What a command wrote to stderr before it ended with exit code 2."""


def command(*argv: str) -> Callable[[], None]:
    """The command line `argv`, which must end with exit code 2 and one line."""

    def run() -> None:
        with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
            code = main(argv)
        said = stderr.getvalue()
        if code == 2 and len(said.splitlines()) == 1:
            raise CommandError(said)

    return run


def refused(*line: str, **environment: str) -> Case:
    """`refused("info --seq 0", "--seq", "'0'")`: a command line, and what its one line on stderr must hold."""
    text, *fragments = line
    return Case(command(*shlex.split(text)), CommandError, (f"dilkit {text.split()[0]}: ", *fragments), environment)
