"""How threads are said to idle: the simulation, by cases that a hand computes, and the work that it is given."""

from __future__ import annotations

import pytest

from dilkit import DilatedSegment, GlobalTokens, Pattern, Problem, SlidingWindow
from dilkit.backends.native import _native
from dilkit.backends.native.backend import encode_problem
from dilkit.tools.bench.cpu.idle import Load, counted
from dilkit.tools.bench.cpu.schedule import Task, idle_share

EQUAL = [Task(2.0)] * 12
LONG_LAST = [*[Task(1.0)] * 4, Task(4.0)]
ROUNDS = [Task(1.0), Task(3.0), Task(1.0, after=(0, 1)), Task(3.0, after=(0,))]


@pytest.mark.parametrize(
    ("tasks", "threads", "share"),
    [(EQUAL, 4, 0), (EQUAL, 5, 0.2), (LONG_LAST, 2, 1 / 3), (LONG_LAST[::-1], 2, 0), (ROUNDS, 2, 1 / 3), (ROUNDS, 3, 1 / 3)],
)
def test_idle_shares_are_those_of_a_hand(tasks: list[Task], threads: int, share: float) -> None:
    assert idle_share(tasks, threads) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("is_causal", "lengths"), [(False, ()), (True, ()), (False, (70, 230)), (True, (300, 0, 41))])
def test_tasks_have_the_work_of_what_they_see(is_causal: bool, lengths: tuple[int, ...], backward: bool) -> None:
    pattern = Pattern.of(SlidingWindow(9), GlobalTokens(3), DilatedSegment(64, 4))
    load = Load("", Problem(pattern=pattern, seq=300, heads=3, head_dim=1, is_causal=is_causal, varlen=bool(lengths)), lengths)
    counts = [pattern.count(seq, 3, is_causal=is_causal) for seq in lengths or (300,)]
    listed = _native.tasks(_native.EncodedProblem(*encode_problem(load.problem)), backward, load.starts)
    seen = [counts[n][head].mT if backward else counts[n][head] for n, head, *_ in listed]
    work = [int(one[r.start : r.stop, c.start : c.stop].sum()) for one, (_, _, r, c, _) in zip(seen, listed, strict=True)]
    assert [task.work for task in counted(load, backward)] == work
