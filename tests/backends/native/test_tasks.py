"""The tasks of the CPU kernel, as whoever looks at how work falls to threads is given them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers.calls import starts_of

from dilkit import Neighborhood, Pattern, SlidingWindow, Strided, dilated_attention
from dilkit.backends.native import _native
from dilkit.backends.native.backend import encode_problem, instruction_set
from dilkit.problem import Problem

HEADS, SEQ, LENGTHS = 3, 414, (70, 0, 414)
PATTERNS = {
    "one pass": Pattern([64, 128], [1, 2]),
    "classes": Pattern.of(SlidingWindow(9, 2), Strided(4)),
    "grid": Pattern.of(Neighborhood((18, 23), 3)),
}


CASES = [case for case in product(PATTERNS, [False, True], [False, True]) if case[0] != "grid" or not case[2]]


@pytest.mark.parametrize(("pattern", "is_causal", "packed"), CASES)
def test_tasks_compute_each_pair_once_and_wait_where_they_add_to_the_same_rows(pattern, is_causal, packed) -> None:
    sizes = dict(seq=SEQ, heads=HEADS, head_dim=16, batch=1 if packed else 2)
    problem = Problem(pattern=PATTERNS[pattern], is_causal=is_causal, varlen=packed, **sizes)
    starts = starts_of(LENGTHS) if packed else None
    encoded = _native.EncodedProblem(*encode_problem(problem))
    for backward in (False, True):
        computed = torch.zeros(3, HEADS, SEQ, SEQ, dtype=torch.int8)
        before: list[set[int]] = []
        tasks = _native.tasks(encoded, backward, starts)
        for sequence, head, rows, columns, after in tasks:
            computed[sequence, head, torch.tensor(rows)[:, None], torch.tensor(columns)] += 1
            before.append(set(after).union(*(before[task] for task in after)))
            for other, (*place, keys, queries, _) in enumerate(tasks[: len(before) - 1] if backward else ()):
                if place == [sequence, head] and (set(keys) & set(rows) or set(queries) & set(columns)):
                    assert other in before[-1]
        residues = torch.arange(SEQ) % (2 if pattern == "classes" else 1)
        pairs = residues[:, None] == residues
        for sequence, length in enumerate(LENGTHS if packed else (SEQ, SEQ, 0)):
            assert torch.equal(computed[sequence, 0, :length, :length], pairs[:length, :length].to(torch.int8))
            assert computed[sequence].sum() == HEADS * pairs[:length, :length].sum()


def test_each_task_is_timed_wherever_it_ran() -> None:
    query = torch.randn(1, SEQ, HEADS, 16, requires_grad=True)
    out = dilated_attention(query, query, query, PATTERNS["one pass"], backend="native")
    encoded = _native.EncodedProblem(*encode_problem(Problem.of(query, query, PATTERNS["one pass"])))
    times = _native.timed_tasks(instruction_set(), out.sum().backward)
    assert sum(phase == 2 for phase, _, _ in times) == len(_native.tasks(encoded, backward=True))
    assert all(start < end for _, start, end in times)
    assert not _native.timed_tasks(instruction_set(), lambda: None)
