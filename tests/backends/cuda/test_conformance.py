"""The CUDA backend and its kernels as a whole, run on the CPU: the problem list against the oracle, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.on_host import FP32, TENSOR_CORES, OnHost

from dilkit import BlockSparse, Documents, GlobalTokens, Pattern, SlidingWindow, register_backend, unregister_backend
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE
from dilkit.backends.tiles import fill
from dilkit.backends.tiles.relations import relations
from dilkit.device import Capability
from dilkit.op.operators import backward_op, encode_call, forward_op
from dilkit.testing.conformance import Result, check
from dilkit.testing.packings import PACKED
from dilkit.testing.problems import DROPPING, OTHER_KINDS, PROBLEMS, SCORES, Case


@contextmanager
def backend(capability: Capability) -> Iterator[str]:
    """Within the block, a name under which the backend is known."""
    own = OnHost(capability)
    register_backend(own)
    try:
        yield own.name
    finally:
        unregister_backend(own.name)


LISTED = (*PROBLEMS, *PACKED)
Runs = list[tuple[Capability, Case]]


def runs(capability: Capability, dtype: str) -> Runs:
    return [(capability, case) for case in LISTED if case.dtype == dtype]


def spread(listed: Runs, kind: int) -> Runs:
    """Every other run of each feature, but of a feature with one variant that one: what one kind leaves out, the other takes."""
    features = [[run for run in listed if run[1].feature == name] for name in dict.fromkeys(case.feature for _, case in listed)]
    return [run for group in features for run in (group[kind::2] or group)]


NATURAL = [runs(FP32, "float32"), runs(TENSOR_CORES, "bfloat16")]
OTHER = runs(TENSOR_CORES, "float16") + runs(FP32, "float16") + runs(FP32, "bfloat16")
USUAL: Runs = [run for kind, listed in enumerate(NATURAL) for run in spread(listed, kind)] + OTHER[::20]


def quick(listed: Runs, kind: int) -> Runs:
    """Every fourth run of every other feature, but some of each that decides what is compiled; with rows of 16 numbers."""
    names = [name for at, name in enumerate(dict.fromkeys(case.feature for _, case in listed)) if at % 2 == kind]
    narrow = [run for run in listed if run[1].head_dim in (8, 16)]
    groups = [[run for run in narrow if run[1].feature == name] for name in dict.fromkeys((*names, "mix", "packed"))]
    return [run for group in groups for run in group[::4]]


QUICK = [run for kind, listed in enumerate(NATURAL) for run in quick(spread(listed, kind), kind)]
REST = [run for listed in (*NATURAL, OTHER) for run in listed if run not in USUAL]

PATTERNS = {"groups": (Pattern([128, 256, 300], [1, 2, 32]), 300), "tall": (Pattern([256, 512], [1, 2]), 512)}
SIZES: Runs = [
    (capability, Case(feature=shape, variant=str(head_dim), pattern=pattern, seq=seq, head_dim=head_dim, **options, dtype=dtype))
    for capability in (FP32, (7, 5), TENSOR_CORES, (8, 6), (9, 0))
    for dtype in STORAGE
    if (dtype != "float32") == (capability != FP32) and (dtype, capability) != ("bfloat16", (7, 5))
    for head_dim in HEAD_DIMS
    for shape, (pattern, seq) in PATTERNS.items()
    for options in (dict(batch=1, heads=2, kv_heads=1, mask="random", is_causal=shape == "groups"),)
]
"""Every size of every kernel, over several groups, and over tiles that are full."""


DROPPED: Runs = [
    (capability, case)
    for at, case in enumerate(DROPPING)
    for capability in (FP32, TENSOR_CORES)
    for turn in ({0, 1} if case.lengths else {at // 4 % 2})
    if (capability, case.dtype, turn) in {(FP32, "float32", 0), (TENSOR_CORES, "bfloat16", 1)}
] + [
    (capability, Case(feature="dropout", variant=f"groups of {dtype}", pattern=PATTERNS["groups"][0], dtype=dtype, **fields))
    for capability, dtype in ((FP32, "float32"), (TENSOR_CORES, "float16"))
    for fields in (dict(seq=300, batch=1, heads=2, kv_heads=1, mask="random", is_causal=True, dropout_p=0.3, head_dim=24),)
]
"""Each call that drops weights with one kind of kernel, and several groups of branches with both."""


ONCE = Pattern.of(
    SlidingWindow(24, 2), SlidingWindow(7), GlobalTokens([0, 9, 11, 33]), GlobalTokens(3, "read", heads=(1, 3)), overlap="once"
)


PARTS = Pattern.of(BlockSparse.bigbird(18, 32, heads=2), Documents([32, 40, 500]))
"""Of more parts than a warp has lanes."""


def has_runs(case: Case) -> bool:
    return "runs" in case.problem().forms.names


def kinds(capability: Capability, dtype: str) -> Runs:
    """Windows, strides, global tokens and runs, alone and in mixes, packed, with dropout, and such as count once."""
    sizes = dict(seq=61, kv_heads=2, dtype=dtype)
    once = (Case(feature="kinds", variant=f"once {x}", pattern=ONCE, is_causal=x, **sizes) for x in (False, True))
    parts = Case(feature="kinds", variant="parts", pattern=PARTS, seq=570, heads=2, kv_heads=1, head_dim=8, batch=1, dtype=dtype)
    listed = sorted((case for case in (*OTHER_KINDS, *once, parts) if case.dtype == dtype), key=has_runs)
    return [(capability, case) for case in listed if not OnHost(capability).refusals(case.problem())]


KINDS = [kinds(FP32, "float32"), kinds(TENSOR_CORES, "bfloat16")]
FIRST_RUNS = "blocks by heads causal", "blocks and segments"
KINDS_FIRST = [
    [run for run in listed[kind::4] if not has_runs(run[1])] + [run for run in listed if run[1].variant == FIRST_RUNS[kind]]
    for kind, listed in enumerate(KINDS)
]


SCORED: Runs = [
    (capability, case)
    for capability, dtype in ((FP32, "float32"), (TENSOR_CORES, "bfloat16"))
    for case in SCORES
    if case.dtype == dtype and not OnHost(capability).refusals(case.problem())
]
FIRST_SCORED = {FP32: "softcap alibi mask", TENSOR_CORES: "coordinates packed"}
SCORED_FIRST = [run for run in SCORED if run[1].variant == FIRST_SCORED[run[0]]]
"""One of each kind of kernel, for each case is a kernel to compile; `test_scores.py` runs one with a table."""


def name(run: tuple[Capability, Case]) -> str:
    return "sm_{}{}-{}".format(*run[0], run[1].name)


def all_but(listed: Runs, usual: Runs) -> list[Any]:
    """`listed` as parameters: what is not `usual` is slow, most of it for what has to be compiled."""
    return [pytest.param(run, marks=[] if run in usual else pytest.mark.slow, id=name(run)) for run in listed]


@pytest.mark.parametrize("run", all_but(USUAL, QUICK))
def test_the_kernels_are_right(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    "run", [param for kind, listed in enumerate(KINDS) for param in all_but(listed[kind::2], KINDS_FIRST[kind])]
)
def test_the_kernels_are_right_with_every_kind(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


DROPPED_FIRST = [next(run for run in DROPPED if run[0] == FP32), next(run for run in DROPPED[::-1] if run[1].lengths)]
"""One with each kind of kernel, one of them of packed sequences."""


@pytest.mark.parametrize("run", all_but(DROPPED, DROPPED_FIRST))
def test_the_kernels_drop_the_right_weights(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize("run", all_but(SCORED, SCORED_FIRST))
def test_the_kernels_change_scores_rightly(run: tuple[Capability, Case], into_matrix: Callable[[Result], None]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    ("capability", "dtype"), [(FP32, torch.float32), pytest.param(TENSOR_CORES, torch.float16, marks=pytest.mark.slow)]
)
def test_weights_are_dropped_by_their_place_in_the_whole(capability: Capability, dtype: torch.dtype) -> None:
    """As over ranks: the rows of a call are some of a longer sequence."""
    draw, pattern = torch.Generator().manual_seed(0), Pattern([16, 40], [1, 2])
    inputs = [torch.randn(2, 40, 2, 8, generator=draw).to(dtype) for _ in range(4)]
    seed, places = torch.tensor(2**62 + 99), torch.tensor([[7, 3, 2**33 + 5, 2**35 + 1, 3], [1, 0, 0, 2, 1]])
    found = []
    with backend(capability) as known:
        for who in (known, "reference"):
            call = encode_call(pattern, False, True, who, 0.4)
            out, lse = forward_op(*inputs[:3], None, 0.3, call, None, None, None, seed, places)
            saved = [*inputs[:3], out, lse]
            found.append([out, *backward_op(inputs[3], *saved, None, 0.3, call, None, None, seed, places)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.02)


CHANGED: Runs = [
    (capability, replace(case, bias=bias, softcap=softcap))
    for (capability, case), (bias, softcap) in zip(
        SIZES, cycle([("grid", 2.0), ("alibi", 0.0), ("euclidean", 0.0), ("none", 1.0)])
    )
]
"""Every size of every kernel with one of the ways in which scores are changed."""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(FP32, "float32"), (TENSOR_CORES, "bfloat16")])
def test_rows_that_see_more_runs_than_a_launch_takes(capability: Capability, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "LEAST_ROWS", 0)
    pattern = Pattern.of(BlockSparse(np.add.outer(np.arange(150), np.arange(150)) % 2 == 0, 1))
    sizes: dict[str, Any] = dict(pattern=pattern, seq=149, batch=1, heads=2, kv_heads=1, dtype=dtype)
    assert len([*relations(Case(feature="kinds", variant="", **sizes).problem())]) == 2
    with backend(capability) as known:
        for is_causal in (False, True):
            result = check(known, Case(feature="kinds", variant="runs", is_causal=is_causal, **sizes))
            assert result.verdict == "passed", result


@pytest.mark.kernels
@pytest.mark.parametrize(
    "run", REST + SIZES + CHANGED + [run for kind, listed in enumerate(KINDS) for run in listed[1 - kind :: 2]], ids=name
)
def test_the_kernels_are_right_at_other_sizes(run: tuple[Capability, Case]) -> None:
    with backend(run[0]) as known:
        result = check(known, run[1])
    assert result.verdict == "passed", result


def test_every_problem_is_run_with_each_kind_of_kernel() -> None:
    ran = [(capability, case.name) for capability, case in USUAL + REST]
    for case in LISTED:
        kinds = {"float64": [], "float32": [FP32]}.get(case.dtype, [FP32, TENSOR_CORES])
        assert [capability for capability, known in ran if known == case.name].count(FP32) == kinds.count(FP32)
        assert [capability for capability, known in ran if known == case.name].count(TENSOR_CORES) == kinds.count(TENSOR_CORES)
