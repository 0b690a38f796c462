"""The CUDA kernels with every access to memory checked: no races, and each array of shared memory within its bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.on_host import FP32, TENSOR_CORES, OnHost

from dilkit import Pattern, register_backend, unregister_backend
from dilkit.backends.cuda.table import HEAD_DIMS
from dilkit.device import Capability
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case

TURING: Capability = (7, 5)
KINDS = [(FP32, "float32"), (FP32, "float16"), (FP32, "bfloat16"), (TURING, "float16"), (TENSOR_CORES, "bfloat16")]
PATTERNS = {
    "groups causal": (Pattern([64, 192], [1, 32]), dict(seq=202, is_causal=True, mask="random", kv_heads=1)),
    "tall": (Pattern([256, 512], [1, 2]), dict(seq=290, heads=1)),
}


def judge(capability: Capability, case: Case) -> None:
    backend = OnHost(capability)
    backend.launcher.checked = True  # type: ignore[attr-defined]
    register_backend(backend)
    try:
        result = check(backend.name, case)
    finally:
        unregister_backend(backend.name)
    assert result.verdict == "passed", result


def case_of(shape: str, dtype: str, head_dim: int) -> Case:
    pattern, options = PATTERNS[shape]
    sizes = {"batch": 1, "heads": 2, **options}
    return Case(feature="races", variant=shape, pattern=pattern, head_dim=head_dim, dtype=dtype, **sizes)


@pytest.mark.parametrize(("capability", "dtype"), [KINDS[0], pytest.param(*KINDS[-1], marks=pytest.mark.slow)])
def test_no_races(capability: Capability, dtype: str) -> None:
    judge(capability, case_of("groups causal", dtype, 32))


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "dtype", "bias"), [(*KINDS[0], "clipped"), (*KINDS[-1], "l1")])
def test_no_races_where_scores_are_changed(capability: Capability, dtype: str, bias: str) -> None:
    judge(capability, replace(case_of("groups causal", dtype, 32), bias=bias, softcap=2.0, dropout_p=0.2))


@pytest.mark.kernels
@pytest.mark.parametrize("head_dim", [7, *HEAD_DIMS])
@pytest.mark.parametrize("shape", PATTERNS)
@pytest.mark.parametrize(("capability", "dtype"), [*KINDS, ((9, 0), "float32"), ((9, 0), "float16")])
def test_no_races_at_any_size(capability: Capability, dtype: str, shape: str, head_dim: int) -> None:
    judge(capability, case_of(shape, dtype, head_dim))


@pytest.mark.kernels
@pytest.mark.parametrize(("capability", "dtype"), [KINDS[0], KINDS[-1]])
def test_no_races_of_packed_sequences(capability: Capability, dtype: str) -> None:
    lengths = (3, 150, 0, 1, 70)
    sizes: dict[str, Any] = dict(seq=sum(lengths), lengths=lengths, batch=1, heads=2, kv_heads=1, head_dim=32, is_causal=True)
    judge(capability, Case(feature="races", variant="packed", pattern=Pattern([64, 192], [1, 32]), dtype=dtype, **sizes))
