"""Backends written for dilkit 0.2, whose methods take tensors one by one, go on working, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.fakes import registered

from dilkit import Backend, Inputs, Limits
from dilkit.backends.reference import Reference
from dilkit.op import older_backends
from dilkit.testing.conformance import check
from dilkit.testing.packings import SEQUENCES
from dilkit.testing.problems import DROPPING, PROBLEMS

OURS = Reference()
CASES = [
    next(case for case in cases if case.dtype == "float32" and wanted(case))
    for cases, wanted in (
        (PROBLEMS, lambda case: case.mask == "random"),
        (SEQUENCES, lambda case: case.lengths and not case.rows),
        (SEQUENCES, lambda case: case.rows),
        (DROPPING, lambda case: not case.lengths),
        (DROPPING, lambda case: case.lengths),
    )
]


class Older(Backend):
    name = "older"
    limits = Limits(varlen=True, kv_cache=True, dropout=True)

    def forward(self, query: Any, key: Any, value: Any, problem: Any, mask: Any = None, dropout: Any = None) -> Any:  # type: ignore[override]
        return OURS.forward(Inputs(query, key, value, mask, dropout=dropout), problem)

    def backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, problem: Any, mask: Any = None, dropout: Any = None
    ) -> Any:  # type: ignore[override]
        return OURS.backward(dout, Inputs(q, k, v, mask, dropout=dropout), out, lse, problem)

    def forward_varlen(self, query: Any, key: Any, value: Any, problem: Any, starts: Any, dropout: Any = None) -> Any:
        return OURS.forward(Inputs(query, key, value, cu_seqlens=starts, dropout=dropout), problem)

    def backward_varlen(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, problem: Any, starts: Any, dropout: Any = None
    ) -> Any:
        return OURS.backward(dout, Inputs(q, k, v, cu_seqlens=starts, dropout=dropout), out, lse, problem)

    def forward_last(self, query: Any, key: Any, value: Any, problem: Any, lengths: Any) -> Any:
        return OURS.forward(Inputs(query, key, value, cache_seqlens=lengths), problem)


def test_they_are_called_as_before_with_a_warning() -> None:
    older_backends._is_older.cache_clear()
    with registered(Older()) as name:
        with pytest.warns(DeprecationWarning, match=r"Older.forward takes query, key and value one by one"):
            assert check(name, CASES[0]).verdict == "passed"
        assert [check(name, case).reasons for case in CASES[1:]] == [()] * (len(CASES) - 1)
