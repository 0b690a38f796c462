"""Runs recorded launches (`tests/ptx/launches/`) on the CPU: what Triton and numba.cuda would have had a GPU do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from helpers.host_launcher import Span
from ptx.counts import Counts
from ptx.launcher import Options, PTXError, Sizes, execute
from ptx.launches.launch import Argument, Launch, parameter_bytes, target
from ptx.library import Library, library_of

BEYOND = re.compile(r"\b(wgmma|mbarrier|cp\.async\.bulk|tcgen05)\.")
"""What the machine has no model of: instructions of several warps together, and copies by a unit of their own."""


class NotModelled(PTXError):
    """A kernel that the machine does not run."""


class RecordedMachine:
    """Computes what launches ask for, as many blocks of each at once as `options` say.

    `counts`: by the entry of a kernel, what all launches have issued so far, if counted. `skipped`: why a launch was not run.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.skipped = options, ""
        self.counts: dict[str, Counts] = {}
        self.launches = Counter[str]()
        self._libraries: dict[str, Library] = {}
        self._reached: list[Span] = []

    @contextmanager
    def reaching(self, spans: list[Span]) -> Iterator[None]:
        """With memory that launches find by addresses in tables."""
        self._reached = spans
        try:
            yield
        finally:
            self._reached = []

    def __call__(self, launch: Launch) -> None:
        """Raises PTXError for whatever is caught, with the place in the PTX, and NotModelled."""
        across, down, deep = launch.block
        assert (deep, *launch.grid[1:]) == (1, 1, 1), launch
        spans = [*_spans(launch.arguments), *self._reached]
        sizes = Sizes(launch.grid[0], across * down, across, self.options.resident, launch.shared_bytes)
        library, number, name = self._library(launch), self.launches.total(), launch.entry
        self.launches[name] += 1
        try:
            counts = execute(library, packed(launch), sizes, spans, self.options, number)
        except PTXError as error:
            raise PTXError(f"{name[-60:]} {target(launch.ptx)}: {error}") from None
        self.counts[name] = self.counts.get(name, Counts()) + counts

    def _library(self, launch: Launch) -> Library:
        if launch.ptx not in self._libraries:
            if found := BEYOND.search(launch.ptx):
                self.skipped = f"{launch.entry} for {target(launch.ptx)} has {found[1]}, which the machine does not model"
                raise NotModelled(self.skipped)
            self._libraries[launch.ptx] = library_of(self.options.change(launch.ptx), self.options.counted)
        return self._libraries[launch.ptx]


def packed(launch: Launch) -> bytes:
    """The parameters one after the other, each aligned to its size."""
    assert parameter_bytes(launch.ptx, launch.entry) == tuple(len(argument.data) for argument in launch.arguments)
    given = bytearray()
    for argument in launch.arguments:
        given += bytes(-len(given) % len(argument.data)) + argument.data
    return bytes(given)


def _spans(arguments: tuple[Argument, ...]) -> Iterator[Span]:
    """The tensors; which of them are only read, a launch does not say."""
    for number, argument in enumerate(arguments):
        if argument.reach:
            yield int.from_bytes(argument.data, "little"), argument.reach, f"argument {number}", False
