"""The CUDA backend and its kernels as a whole, run on the CPU."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from helpers.calls import encode_call
from helpers.fakes import registered
from helpers.on_host import FP32, TENSOR_CORES, OnHost, judged
from ptx.cuda_runs import DROPPED, KINDS, LISTED, SCORED, SIZES, Runs, has_runs

from dilkit import BlockSparse, Pattern
from dilkit.backends.tiles import backend as tiles_backend
from dilkit.backends.tiles.relations import relations
from dilkit.device import Capability
from dilkit.op.operators import backward_op, forward_op
from dilkit.testing.problems import Case

CHANGES = ("grid", 2.0), ("alibi", 0.0), ("euclidean", 0.0), ("none", 1.0)
CHANGED = [
    (capability, replace(case, bias=bias, softcap=softcap)) for (capability, case), (bias, softcap) in zip(SIZES, cycle(CHANGES))
]
"""Every size of every kernel with one of the ways in which scores are changed."""
FIRST_RUNS = "blocks by heads causal", "blocks and segments"
FIRST_SCORED = {FP32: "softcap alibi mask", TENSOR_CORES: "coordinates packed"}


def listed(capability: Capability, dtype: str) -> Runs:
    return [(capability, case) for case in LISTED if case.dtype == dtype]


def quick(runs: Runs, kind: int) -> Runs:
    names = list(dict.fromkeys(case.feature for _, case in runs))
    narrow = [run for run in runs if run[1].head_dim in (8, 16)]
    groups = [[run for run in narrow if run[1].feature == name] for name in dict.fromkeys((*names[kind::2], "mix", "packed"))]
    return [run for group in groups for run in group[kind::8] or group[:1]]


def marked(runs: Runs, usual: Runs, at_length: Runs) -> list[Any]:
    """`runs` as parameters: most of the time is for what has to be compiled."""
    marks = [[] if run in usual else pytest.mark.slow if run in at_length else pytest.mark.kernels for run in runs]
    names = ["sm_{}{}-{}".format(*run[0], run[1].name) for run in runs]
    return [pytest.param(*run, marks=mark, id=name) for run, mark, name in zip(runs, marks, names, strict=True)]


def all_runs() -> list[Any]:
    found: list[Any] = []
    for kind, runs in enumerate((listed(FP32, "float32"), listed(TENSOR_CORES, "bfloat16"))):
        found += marked(runs, quick(runs, kind), runs[kind::2])
        first = [run for run in KINDS[kind][kind::4] if not has_runs(run[1])]
        found += marked(KINDS[kind], first + [x for x in KINDS[kind] if x[1].variant == FIRST_RUNS[kind]], KINDS[kind][kind::2])
    others = listed(TENSOR_CORES, "float16") + listed(FP32, "float16") + listed(FP32, "bfloat16")
    packed = [next(run for run in DROPPED if run[0] == FP32), next(run for run in DROPPED[::-1] if run[1].lengths)]
    found += marked(DROPPED, packed, DROPPED)
    found += marked(SCORED, [run for run in SCORED if run[1].variant == FIRST_SCORED[run[0]]], SCORED)
    return found + marked(others, [], others[::20]) + marked(SIZES + CHANGED, [], [])


@pytest.mark.parametrize(("capability", "case"), all_runs())
def test_the_kernels_are_right(capability, case, into_matrix):
    result = judged(case, capability)
    into_matrix(result)
    assert result.verdict == "passed", result


@pytest.mark.parametrize(
    ("capability", "dtype"), [(FP32, torch.float32), pytest.param(TENSOR_CORES, torch.float16, marks=pytest.mark.slow)]
)
def test_weights_are_dropped_by_their_place_in_the_whole(capability, dtype):
    """The rows of a call are some of a longer sequence, as over ranks."""
    draw, pattern = torch.Generator().manual_seed(0), Pattern([16, 40], [1, 2])
    inputs = [torch.randn(2, 40, 2, 8, generator=draw).to(dtype) for _ in range(4)]
    seed, places = torch.tensor(2**62 + 99), torch.tensor([[7, 3, 2**33 + 5, 2**35 + 1, 3], [1, 0, 0, 2, 1]])
    found = []
    with registered(OnHost(capability)) as known:
        for who in (known, "reference"):
            call = encode_call(pattern, False, True, who, 0.4)
            out, lse = forward_op(*inputs[:3], None, 0.3, call, None, None, seed, places)
            saved = [*inputs[:3], out, lse]
            found.append([out, *backward_op(inputs[3], *saved, None, 0.3, call, None, None, seed, places)])
    for got, right in zip(*found, strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype"), [(FP32, "float32"), (TENSOR_CORES, "bfloat16")])
def test_rows_that_see_more_runs_than_a_launch_takes(capability, dtype, monkeypatch):
    monkeypatch.setattr(tiles_backend, "LEAST_ROWS", 0)
    pattern = Pattern.of(BlockSparse(np.add.outer(np.arange(150), np.arange(150)) % 2 == 0, 1))
    sizes = dict(pattern=pattern, seq=149, batch=1, heads=2, kv_heads=1, dtype=dtype)
    assert len([*relations(Case(feature="kinds", variant="", **sizes).problem())]) == 2
    for is_causal in (False, True):
        result = judged(Case(feature="kinds", variant="runs", is_causal=is_causal, **sizes), capability)
        assert result.verdict == "passed", result
