"""Malformed forms, and malformed `sees`, of kinds that are not dilkit's."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from core.malformed.case import Case, Q, attend, made

import dilkit
from dilkit import DilatedCache, Pattern, PatternError
from dilkit.comm import exchange_plan
from dilkit.pattern.lowering import Band, CutGrid, Form, GivenBlocks, Global, Grid, Runs, RunTable, Segments, lower

EVERY = (0, 4)


@dilkit.register_kind
@dataclass(frozen=True)
class Shown(dilkit.Branch):
    kind: ClassVar[str] = "shown"

    name: str
    heads: tuple[int, int] | None = None

    def sees(self, rows: torch.Tensor, keys: torch.Tensor, heads) -> torch.Tensor:
        return (rows[:, None] == keys)[None]

    def forms(self, heads, seq: int) -> Iterable[Form]:
        return MALFORMED[self.name][0]()


@dilkit.register_kind
@dataclass(frozen=True)
class Looked(dilkit.Branch):
    kind: ClassVar[str] = "looked"

    name: str
    heads: tuple[int, int] | None = None

    def sees(self, rows: torch.Tensor, keys: torch.Tensor, heads):
        return SEEN[self.name][0](len(rows), len(keys))


def form(cls: type[Form], *fragments: str, **fields) -> tuple[Callable[[], Any], tuple[str, ...]]:
    name = f"Shown.forms: {cls.__name__}."
    return lambda: [cls(**{"heads": EVERY, **fields})], (name + fragments[0], *fragments[1:], "mend forms, or leave it out: sees")


def array(*numbers):
    return np.array(numbers, np.int64)


def table(stop, runs, *columns) -> RunTable:
    return RunTable(array(*stop), array(*runs), array(*columns).reshape(-1, 2))


def runs(*fragments: str, **fields) -> tuple[Callable[[], Any], tuple[str, ...]]:
    return form(Runs, *fragments, **{"queries": WHOLE, "keys": WHOLE, **fields})


def segments(*fragments: str, **fields) -> tuple[Callable[[], Any], tuple[str, ...]]:
    return form(Segments, *fragments, **{"length": 4, "rate": 2, "offsets": (0, 1, 0, 1), **fields})


def grid(*fragments: str, cls: type[Grid] = Grid, **fields) -> tuple[Callable[[], Any], tuple[str, ...]]:
    return form(cls, *fragments, **{"shape": (2, 3), "kernel": (1, 3), "dilation": (1, 1), **fields})


WHOLE, RUN, TWO = table((2, 6), (1, 1), (0, 2), (2, 6)), array((1, 3)), array((4, 6), (1, 3))
NONE = array().reshape(0, 2)
REACH = dict(back=3, ahead=3)

MALFORMED = {
    "segments of nothing": segments("length=0", "from 1 to 2**62", length=0),
    "segments of a fraction": segments("length=4.0", "float", "integer", length=4.0),
    "segments of a rate beyond them": segments("rate=5", "at most length=4", rate=5),
    "segments of an offset of the rate": segments("offsets[1]=2", "from 0 to 1", offsets=(0, 2, 0, 1)),
    "segments of too few offsets": segments("offsets=(0, 1)", "4 numbers", offsets=(0, 1)),
    "heads that are not there": form(Band, "heads=(0, 5)", "(0, 4)", heads=(0, 5), **REACH),
    "no heads": form(Band, "heads=(2, 2)", "start < stop", heads=(2, 2), **REACH),
    "a band of rate 0": form(Band, "rate=0", "from 1", rate=0, **REACH),
    "a band back to the future": form(Band, "back=-1", "from 0", back=-1, ahead=3),
    "a band that begins after its end": form(Band, "begin=4", "back=3", "ahead=3", begin=4, **REACH),
    "a band beyond 2**62": form(Band, "back=9223372036854775807", "to 2**62", back=2**63 - 1),
    "a band that others cut": form(Band, "beyond=2", "begin", beyond=2, **REACH),
    "a band without other forms": form(Band, "without=(0,)", 'overlap="once"', without=(0,), **REACH),
    "queries alone left out": form(Band, "without_rows and", "both or neither", "(0, 2)", without_rows=RUN, **REACH),
    "left out as int32": form(Band, "without_rows", "int64", without_rows=RUN.astype(np.int32), without_columns=NONE, **REACH),
    "global tokens that are no runs": form(Global, "rows=array([4, 6])", "(n, 2)", rows=TWO[0], columns=RUN),
    "global tokens in no order": form(Global, "columns=array([[4, 6], [1, 3]])", "ascending", rows=RUN, columns=TWO),
    "global tokens before the first": form(Global, "rows=array([[-1, 3]])", "from 0", rows=array((-1, 3)), columns=RUN),
    "runs that are no table": runs("queries=(1, 2, 3)", "RunTable", queries=(1, 2, 3)),
    "runs that end before they begin": runs("queries.stop", "ascending", queries=table((6, 2), (1, 1), (0, 2), (2, 6))),
    "a negative count": runs("queries.runs", "3 counts", queries=table((2, 4, 6), (1, -1, 2), (0, 2), (2, 6))),
    "columns twice": runs("keys.columns", "ascending and apart", keys=table((2, 6), (1, 2), (0, 2), (2, 5), (4, 6))),
    "keys that are seen by others": runs("keys=RunTable", "the pairs of queries", keys=table((2, 6), (1, 1), (0, 2), (1, 6))),
    "a block of other runs": runs("block=2", "queries.stop in multiples", block=2),
    "a grid of four dimensions": grid("shape=(1, 1, 1, 1)", "1 to 3", shape=(1,) * 4),
    "a kernel of one dimension": grid("kernel=(3,)", "as many as shape", kernel=(3,)),
    "a stride beyond the kernel": grid("stride=4", "from 1 to 3", cls=CutGrid, stride=(1, 4)),
    "causality of one dimension": grid("causal=(True,)", "a bool for each dimension", causal=(True,)),
    "a kernel beyond the grid": grid("kernel=(3, 3)", "at most shape=(2, 3)", "CutGrid", kernel=(3, 3)),
    "a dilation of 0": grid("dilation=0", "from 1", dilation=(0, 1)),
    "a grid for any sequence": grid("shape=(2, 3)", "check_seq", "6 tokens"),
    "what no call gives": (lambda: [GivenBlocks(heads=EVERY, block=4)], ("1 GivenBlocks", "is_given_by_call=False")),
    "a form of no kind": (lambda: [Form(heads=EVERY)], ("Shown.forms gives Form(", "Segments, Band")),
    "no form at all": (lambda: [], ("gives no form", "at least one")),
    "forms that are none": (lambda: 3, ("Shown.forms raised TypeError", "not iterable")),
}
SEEN: dict[str, tuple[Callable[[int, int], Any], str]] = {
    "sees without heads": (lambda rows, keys: torch.ones(rows, keys).bool(), "torch.bool (6, 6); torch.bool (1 or 4 heads"),
    "sees of numbers": (lambda rows, keys: torch.ones(1, rows, keys), "torch.float32 (1, 6, 6)"),
    "sees of other heads": (lambda rows, keys: torch.ones(3, rows, keys).bool(), "torch.bool (3, 6, 6)"),
    "sees of nothing": (lambda rows, keys: None, "NoneType ()"),
}


def lowered(name: str) -> Callable[[], Any]:
    return lambda: lower(Pattern.of(Shown(name)), 6, 4)


def looked(call: Callable[[], Any], returned: str) -> Case:
    return Case(call, PatternError, f"Looked.sees returned {returned}", "1 or 4 heads", "seen[None]")


RATE_0, WITHOUT_HEADS = Pattern.of(Shown("a band of rate 0")), Pattern.of(Looked("sees without heads"))
FORMS = {
    **{name: Case(lowered(name), PatternError, *fragments) for name, (_, fragments) in MALFORMED.items()},
    "ranks": Case(lambda: exchange_plan(RATE_0, (0, 4, 8), 4), PatternError, "Shown.forms: Band.rate=0"),
    **{name: looked(made(Pattern.of(Looked(name)).count, 6, 4), returned) for name, (_, returned) in SEEN.items()},
    "sees, of a call": looked(attend(pattern=WITHOUT_HEADS), "torch.bool (6, 6)"),
    "sees, of a cache": looked(lambda: DilatedCache(WITHOUT_HEADS, 4).attend(Q, Q, Q), "torch.bool (6, 6)"),
}
