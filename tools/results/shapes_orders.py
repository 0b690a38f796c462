"""The shapes of what belongs to token orders: the suite's result, and the image demo's. What else a file holds is not read."""

from __future__ import annotations

from typing import Any

from dilkit.tools.results.schema import (
    anything,
    chosen,
    fields,
    listed,
    matching,
    maybe,
    named,
    number,
    text,
    where,
)
from dilkit.tools.results.shapes import AMOUNT, SIZE, TIME, result
from dilkit.tools.results.shapes_suites import FIGURES, RUN

_TOLD = dict(verdict=text, reasons=listed(text), check=listed(anything))
_MEASURED = fields(_TOLD | dict(time=TIME, points=SIZE, ns_per_point=AMOUNT))
_ENTRY = chosen(lambda e: _MEASURED if "time" in e else fields(_TOLD))


def _same_rounds(entries: dict[str, Any]) -> bool:
    return len({len(e["time"]["samples_s"]) for e in entries.values() if "time" in e}) <= 1


_ENTRIES = where(named(_ENTRY), _same_rounds, "as many samples of everyone")
_SHAPE = listed(SIZE, 1, 8)
_POINTS = dict(ndim=SIZE, bits=SIZE, entries=_ENTRIES)
_RATES = listed(SIZE, 1, 20)
_DISTANCE = number(0, 1e9)


def _every_rate(row: dict[str, Any]) -> bool:
    return all({str(rate) for rate in row["dilation_rates"]} <= near.keys() for near in row["nearest_kept"].values())


_NEAR = fields(dict(dilation_rates=_RATES, nearest_kept=named(named(fields(dict(mean=_DISTANCE, max=_DISTANCE))), 1)))
SUITE_ORDERS = result(
    RUN
    | dict(
        suite=matching("orders", '"orders"'),
        figures=FIGURES,
        isa=text,
        packages=listed(fields(dict(name=text, version=maybe(text), summary=text, absent=maybe(text)))),
        permutations=listed(fields(dict(shape=_SHAPE, dtype=text, entries=_ENTRIES))),
        ranks=listed(fields(dict(shape=_SHAPE, entries=_ENTRIES))),
        points=listed(fields(_POINTS | dict(what=text))),
        sorts=listed(fields(_POINTS)),
        cold=listed(fields(dict(grid=text, shape=_SHAPE, times=fields(dict(permutation=TIME, both=TIME))))),
        warm=listed(fields(dict(grid=text, time=TIME))),
        locality=listed(where(_NEAR, _every_rate, "a distance for every rate")),
    )
)
