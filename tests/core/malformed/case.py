"""A malformed call, its error, and parts of the message."""

import contextlib
import io
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dilkit
from dilkit import Pattern
from dilkit.tools.cli import main

P = Pattern([4, 8], [1, 2])
Q = torch.zeros(2, 6, 4, 8)
ROWS = torch.zeros(2, 6, 32)
MASK = torch.zeros(2, 6, dtype=torch.bool)


class Case:
    """`call()` must raise `error` with every one of `fragments` in its text."""

    def __init__(self, call: Callable[[], Any], error: type[Exception] | tuple[type[Exception], ...], *fragments: str):
        self.call, self.error, self.fragments = call, error, fragments


class CommandError(Exception):
    """The output of a command on stderr before it ended with exit code 2."""


def made(kind: Callable[..., Any], *args, **options) -> Callable[[], Any]:
    return lambda: kind(*args, **options)


def attend(query=Q, key=Q, value=Q, pattern=P, **options) -> Callable[[], Any]:
    return lambda: dilkit.dilated_attention(query, key, value, pattern, **options)


def under(call: Callable[[], Any], **environment: str) -> Callable[[], Any]:
    def run():
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            return call()

    return run


def command(line: str):
    """Raise the one line that a command writes to stderr with exit code 2."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        code = main(shlex.split(line))
    said = stderr.getvalue()
    if code == 2 and len(said.splitlines()) == 1:
        raise CommandError(said)


def refused(line: str, *fragments: str, **environment: str) -> Case:
    return Case(under(made(command, line), **environment), CommandError, f"dilkit {line.split()[0]}: ", *fragments)
