"""Who computes each benchmark case of token orders, on which inputs, and what is checked of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from dilkit.orders.compiled import _curves, _generalised_hilbert
from dilkit.orders.curves import is_power_of_two_cube
from dilkit.tools.bench.orders import checks
from dilkit.tools.bench.orders.checks import same
from dilkit.tools.bench.orders.engine import Dilkit, Interleaved, filling
from dilkit.tools.bench.orders.peers import Array, Peer, Task, row_major
from dilkit.tools.bench.orders.record import OURS, Finding, OrderEntries, OrderEntry
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import time_interleaved

STORE_LOOP, ARGSORT = "store loop", "np.argsort"


@dataclass(frozen=True)
class OrderImplementation:
    """`make(count)` is the task for so many points; `check(count, result)` what is found of its result. `whole`: it gets all."""

    make: Callable[[int], Task]
    check: Callable[[int, Any], Iterable[Finding]]
    whole: bool = True


Implementations = dict[str, OrderImplementation]
TRIAL = 2048
"""Points of the calls that say how many an implementation gets."""


def measured(implementations: Implementations, points: int, repeats: int, budget: float, min_time: float) -> OrderEntries:
    """An entry for each implementation, whatever became of it: checked, and timed in turns where they are right.

    `budget`: seconds of one call, beyond which an implementation gets fewer points; `min_time`: of a sample.
    """
    entries, calls = {}, {}
    for name, one in implementations.items():
        entries[name], task = _admitted(one, points, budget)
        if entries[name].verdict == "measured" and task:
            calls[name] = task.call
    timed = time_interleaved(calls, repeats, min_time=min_time)
    return {name: replace(entry, time=timed.get(name)) for name, entry in entries.items()}


def _admitted(implementation: OrderImplementation, points: int, budget: float) -> tuple[OrderEntry, Task | None]:
    """The beginning of an entry, and the task to be timed: with as many points as the budget allows, going by a few of them."""
    try:
        few = min(TRIAL, points)
        count = points
        if not implementation.whole:
            count = min(points, max(few, int(budget * few / implementation.make(few).seconds())))
        task = implementation.make(count)
        check = tuple(implementation.check(count, task.result()))
    except Exception as error:
        return OrderEntry(verdict="failed", reasons=(error_line(error),)), None
    wrong = tuple(f"not so: {found.what}" for found in check if not found.passed)
    return OrderEntry(verdict="wrong" if wrong else "measured", reasons=wrong, check=check, points=0 if wrong else count), task


def permutation(shape: tuple[int, ...], dtype: str, packages: Sequence[Peer]) -> Implementations:
    """The whole curve through a grid, beside a store loop into the same array; packages in int32 alone."""
    out, ndim, bits = np.zeros(prod(shape), dtype), len(shape), (max(shape) - 1).bit_length()
    packages = packages if dtype == "int32" else []
    loop = OrderImplementation(lambda _: filling(out, _curves.row_major), lambda n, x: [same("out[i] is i", x, np.arange(n))])
    if not is_power_of_two_cube(shape):
        # packages have codes on cubes of a power of two alone: sorted codes are what they offer here, a curve with jumps
        ours = OrderImplementation(
            lambda _: filling(out, _generalised_hilbert.generalised_hilbert, shape, 1),
            lambda _, cells: checks.visits(cells, shape),
        )
        cells = np.stack(np.unravel_index(np.arange(len(out)), shape))
        return {OURS: ours, **_sorters(cells, bits, packages), STORE_LOOP: loop}

    def check(who: Peer, count: int, found: Array) -> list[Finding]:
        decoded = row_major(who.decoder(np.arange(count), ndim, bits).result(), bits, np.zeros(count, dtype))
        return [*checks.visits(found, shape), same("equal to decode of 0, 1, 2, ...", found, decoded)]

    found = _each([Dilkit(), *packages], ndim, bits, lambda who, count: who.permutation(ndim, bits, out[:count]), check)
    return found | {STORE_LOOP: loop}


def rank(shape: Sequence[int], packages: Sequence[Peer]) -> Implementations:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits = len(shape), (shape[0] - 1).bit_length()
    perm = Dilkit().permutation(ndim, bits, np.zeros(prod(shape), np.int32)).result()
    inverse = np.zeros_like(perm)
    invert = Task(partial(_curves.invert, perm, inverse), lambda _: inverse)

    def check(who: Peer, count: int, codes: Array) -> list[Finding]:
        cells = row_major(who.decoder(codes, ndim, bits).result(), bits, np.zeros(count, np.int32))
        return [same("decode gives the cells back", cells, np.arange(count))]

    def inverted(count: int, found: Array) -> list[Finding]:
        return [same("rank[perm] is 0, 1, 2, ...", found[perm], np.arange(count))]

    found = _each([Dilkit(), *packages], ndim, bits, lambda who, count: who.ranks(ndim, bits, count), check)
    return found | {f"{OURS}, inverted": OrderImplementation(lambda _: invert, inverted)}


def encode(axes: Array, bits: int, packages: Sequence[Peer]) -> Implementations:
    """Codes of points."""

    def check(who: Peer, count: int, codes: Array) -> list[Finding]:
        back = np.stack(who.decoder(codes, len(axes), bits).result())
        return [same("decode gives the points back", back, axes[:, :count])]

    everyone = [Dilkit(), Interleaved(), *packages]
    return _each(everyone, len(axes), bits, lambda who, count: who.encoder(axes[:, :count], bits), check)


def decode(codes: Array, ndim: int, bits: int, packages: Sequence[Peer]) -> Implementations:
    """Points of codes."""

    def check(who: Peer, count: int, axes: Any) -> list[Finding]:
        return [same("encode gives the codes back", who.encoder(np.stack(axes), bits).result(), codes[:count])]

    everyone = [Dilkit(), Interleaved(), *packages]
    return _each(everyone, ndim, bits, lambda who, count: who.decoder(codes[:count], ndim, bits), check)


def sort(axes: Array, packages: Sequence[Peer]) -> Implementations:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    axes = axes - axes.min(1, keepdims=True)  # which sort_points does for itself
    bits = max(1, int(axes.max()).bit_length())
    sorters = _sorters(axes, bits, [Dilkit(), *packages])
    argsort = OrderImplementation(lambda count: Peer.sorter(Dilkit(), axes[:, :count], bits), sorters[OURS].check)
    return sorters | {ARGSORT: argsort}


def _sorters(axes: Array, bits: int, everyone: Sequence[Peer]) -> Implementations:
    def check(who: Peer, count: int, permutation: Array) -> list[Finding]:
        return checks.sorting(permutation, who.encoder(axes[:, :count], bits).result())

    return _each(everyone, len(axes), bits, lambda who, count: who.sorter(axes[:, :count], bits), check)


def _each(
    everyone: Sequence[Peer],
    ndim: int,
    bits: int,
    make: Callable[[Peer, int], Task],
    check: Callable[[Peer, int, Any], Iterable[Finding]],
) -> Implementations:
    """Dilkit's, which get all points, and those of packages; of each it is checked first that its curve is one."""

    def checked(who: Peer, count: int, result: Any) -> list[Finding]:
        return [*checks.curve(who, ndim, bits), *check(who, count, result)]

    return {
        who.name: OrderImplementation(partial(make, who), partial(checked, who), who.name.startswith(OURS)) for who in everyone
    }
