"""Contenders of the suite of token orders: who computes each case, on which inputs, and the checks of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from dilkit.orders.compiled import _curves, _generalised_hilbert
from dilkit.orders.curves import is_power_of_two_cube
from dilkit.tools.bench.workloads.hilbert_curves import Array, Dilkit, HilbertCurve, Interleaved, Task, filling, row_major
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.timing import time_interleaved
from dilkit.tools.results.record import Samples
from dilkit.tools.results.rows import Row

STORE_LOOP = "store loop"
OURS = Dilkit.name, Interleaved.name
SMALL_BITS = {2: 4, 3: 3}
"""Bits of the grid that is visited as a whole, by its number of axes: 16 and 8 cells a side."""
TRIAL = 2048
"""Points of the calls that decide how many a package gets."""
STRETCH = 256
"""Cells that are visited in the middle of a larger curve."""
Findings = dict[str, bool]
"""Statements about a result, and whether each is true."""


class Contender(NamedTuple):
    """An implementation of a case: `make(count)` is its task for so many points, `check(count, result)` checks the result.

    `package`: another's, which gets fewer points where all of them would take longer than the budget.
    """

    make: Callable[[int], Task]
    check: Callable[[int, Any], Findings]
    package: bool = False


Contenders = dict[str, Contender]


def compare(
    table: str, case: dict[str, Any], points: int, contenders: Contenders, repeats: int, budget: float, min_time: float
) -> list[Row]:
    """Check all contenders, and time those that are right in turns. `budget`: seconds of a call; `min_time`: of a sample."""
    rows, calls = [], {}
    for who, contender in contenders.items():
        try:
            few = count = min(TRIAL, points) if contender.package else points
            if few < points:
                count = min(points, max(few, int(budget * few / contender.make(few).seconds())))
            task = contender.make(count)
            rows.append(row(table, case, who, contender.check(count, task.result()), points=count))
            calls[who] = task.call
        except Exception as error:
            rows.append(Row(table=table, case=case, who=who, verdict="failed", reasons=(error_line(error),)))
    right = {one.who: calls[one.who] for one in rows if one.verdict == "measured"}
    return timed(rows, time_interleaved(right, repeats, min_time=min_time))


def row(table: str, case: dict[str, Any], who: str, findings: Findings, **values: Any) -> Row:
    """The row of an implementation before it is timed."""
    wrong = tuple(f"not so: {what}" for what, passed in findings.items() if not passed)
    values |= dict(checked=list(findings)) if findings else {}
    return Row(table=table, case=case, who=who, verdict="wrong" if wrong else "measured", reasons=wrong, values=values)


def timed(rows: list[Row], times: Mapping[str, Samples]) -> list[Row]:
    """`rows` with their samples, those with `points` as seconds for a million points."""
    complete = []
    for one in rows:
        if one.verdict == "measured":
            scale, samples = 1e6 / one.values.get("points", 1e6), times[one.who]
            one = replace(one, samples=tuple(scale * sample for sample in samples.samples_s), calls=samples.calls_per_sample)
        complete.append(one)
    return complete


def permutation(shape: tuple[int, ...], dtype: str, packages: Sequence[HilbertCurve]) -> Contenders:
    """The whole curve through a grid, beside a store loop into the same array."""
    out, ndim, bits = np.zeros(prod(shape), dtype), len(shape), (max(shape) - 1).bit_length()

    def check(who: HilbertCurve, count: int, cells: Array) -> Findings:
        decoded = row_major(who.decoder(np.arange(count), ndim, bits).result(), bits, np.zeros(count, dtype))
        return visits(cells, shape) | same("equal to decode of 0, 1, 2, ...", cells, decoded)

    if is_power_of_two_cube(shape):
        curves = [Dilkit(), *packages]
        contenders = _contenders(curves, ndim, bits, lambda who, count: who.permutation(ndim, bits, out[:count]), check)
    else:  # packages have codes on cubes of a power of two alone: sorted codes are a curve with jumps
        task = filling(out, _generalised_hilbert.generalised_hilbert, shape, 1)
        cells = np.stack(np.unravel_index(np.arange(len(out)), shape))
        ours = Contender(lambda _: task, lambda _, cells: visits(cells, shape))
        contenders = {Dilkit.name: ours, **_sorters(cells, bits, packages)}
    loop = Contender(lambda _: filling(out, _curves.row_major), lambda n, x: same("out[i] is i", x, np.arange(n)))
    return contenders | {STORE_LOOP: loop}


def rank(shape: Sequence[int], packages: Sequence[HilbertCurve]) -> Contenders:
    """The position on the curve of each cell of a cube, the cells in row-major order; and the inverse of the permutation."""
    ndim, bits = len(shape), (shape[0] - 1).bit_length()
    perm = Dilkit().permutation(ndim, bits, np.zeros(prod(shape), np.int32)).result()
    invert = filling(np.zeros_like(perm), lambda out: _curves.invert(perm, out))

    def check(who: HilbertCurve, count: int, codes: Array) -> Findings:
        cells = row_major(who.decoder(codes, ndim, bits).result(), bits, np.zeros(count, np.int32))
        return same("decode gives the cells back", cells, np.arange(count))

    ranks = _contenders([Dilkit(), *packages], ndim, bits, lambda who, count: who.ranks(ndim, bits, count), check)
    inverted = Contender(lambda _: invert, lambda n, inverse: same("rank[perm] is 0, 1, 2, ...", inverse[perm], np.arange(n)))
    return ranks | {f"{Dilkit.name}, inverted": inverted}


def encode(axes: Array, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Codes of points."""

    def check(who: HilbertCurve, count: int, codes: Array) -> Findings:
        return same("decode gives the points back", np.stack(who.decoder(codes, len(axes), bits).result()), axes[:, :count])

    curves = [Dilkit(), Interleaved(), *packages]
    return _contenders(curves, len(axes), bits, lambda who, count: who.encoder(axes[:, :count], bits), check)


def decode(codes: Array, ndim: int, bits: int, packages: Sequence[HilbertCurve]) -> Contenders:
    """Points of codes."""

    def check(who: HilbertCurve, count: int, axes: Any) -> Findings:
        return same("encode gives the codes back", who.encoder(np.stack(axes), bits).result(), codes[:count])

    curves = [Dilkit(), Interleaved(), *packages]
    return _contenders(curves, ndim, bits, lambda who, count: who.decoder(codes[:count], ndim, bits), check)


def sort(axes: Array, packages: Sequence[HilbertCurve]) -> Contenders:
    """The order of points along the curve; beside it, NumPy's stable sort of dilkit's codes."""
    axes = axes - axes.min(1, keepdims=True)  # sort_points does so too
    bits = max(1, int(axes.max()).bit_length())
    sorters = _sorters(axes, bits, [Dilkit(), *packages])
    argsort = Contender(lambda n: HilbertCurve.sorter(Dilkit(), axes[:, :n], bits), sorters[Dilkit.name].check)
    return sorters | {"np.argsort": argsort}


def _sorters(axes: Array, bits: int, curves: Sequence[HilbertCurve]) -> Contenders:
    def check(who: HilbertCurve, count: int, permutation: Array) -> Findings:
        return sorts(permutation, who.encoder(axes[:, :count], bits).result())

    return _contenders(curves, len(axes), bits, lambda who, count: who.sorter(axes[:, :count], bits), check)


def _contenders(
    curves: Sequence[HilbertCurve],
    ndim: int,
    bits: int,
    make: Callable[[HilbertCurve, int], Task],
    check: Callable[[HilbertCurve, int, Any], Findings],
) -> Contenders:
    """Contenders by name; of each it is checked first that its codes are positions on a Hilbert curve."""

    def checked(who: HilbertCurve, count: int, result: Any) -> Findings:
        return is_hilbert_curve(who, ndim, bits) | check(who, count, result)

    return {who.name: Contender(partial(make, who), partial(checked, who), who.name not in OURS) for who in curves}


def is_hilbert_curve(who: HilbertCurve, ndim: int, bits: int) -> Findings:
    """Check a small grid as a whole, and a stretch in the middle of the curve of `bits`."""
    small = SMALL_BITS[ndim]
    codes = np.arange(1 << ndim * small)
    cells = np.stack(who.decoder(codes, ndim, small).result())
    once = np.unique(cells, axis=1).shape == cells.shape and bool(cells.max() < 1 << small)
    middle, half = 1 << ndim * bits - 1, min(STRETCH, 1 << ndim * bits) // 2
    stretch = who.decoder(np.arange(middle - half, middle + half), ndim, bits).result()
    return {
        f"the cells of 0, 1, 2, ... are each cell of a small {ndim}-D grid once": once,
        "they are a step of one cell apart": _jumps(cells) == 0,
        **same("their codes are 0, 1, 2, ...", who.encoder(cells, small).result(), codes),
        f"cells in the middle of the curve of {bits} bits are a step of one cell apart": _jumps(stretch) == 0,
    }


def visits(indices: Array, shape: Sequence[int]) -> Findings:
    """Check that row-major `indices` are distinct cells of the grid, all of them if there are as many, by steps of one cell.

    A curve may have to jump where a side is odd: then the number of jumps is only reported.
    """
    seen = np.zeros(prod(shape), bool)
    seen[indices] = True
    jumps = _jumps(np.unravel_index(indices, tuple(shape)))
    return {
        f"{len(indices):,} of {len(seen):,} cells are visited, each once": int(seen.sum()) == len(indices),
        f"steps that are not of one cell: {jumps}": jumps == 0 or any(side % 2 for side in shape),
    }


def sorts(permutation: Array, codes: Array) -> Findings:
    """Check that `permutation` puts `codes` into ascending order."""
    once = np.array_equal(np.sort(permutation), np.arange(len(codes)))
    ascending = once and bool((np.diff(codes[permutation].astype(np.int64)) >= 0).all())
    return {"each point occurs once": once, "its codes ascend": ascending}


def same(what: str, left: Array, right: Array) -> Findings:
    """Check that two results are the same."""
    return {what: np.array_equal(left, right)}


def _jumps(axes: Iterable[Array]) -> int:
    """Count the cells that do not follow the one before by a step of one cell."""
    lengths = sum(np.abs(np.diff(axis.astype(np.int32))) for axis in axes)
    return int(np.count_nonzero(lengths != 1))
