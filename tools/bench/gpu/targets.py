"""The targets of the suite of CUDA kernels: what each figure is read out of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dilkit.tools.bench.gpu.record import OURS, GpuCase, GpuResult
from dilkit.tools.bench.target import MIB, Target, Values, least
from dilkit.tools.results.record import Case

H100_TFLOPS = 67.0
"""fp32 on the CUDA cores of an H100 SXM, nominal."""
EFFICIENT, CUDNN, AUTOMATIC = "sdpa:memory-efficient", "sdpa:cudnn", "automatic"


def _cases(result: GpuResult, **facts: Any) -> list[GpuCase]:
    return [case for case in result.cases if all(getattr(case, name) == value for name, value in facts.items())]


def _best(values: Iterable[float | None]) -> Values:
    """The largest value, as that of head_dim 64; nothing where there is none."""
    measured = [value for value in values if value is not None]
    return {"64": max(measured)} if measured else {}


def _nominal_rate(result: GpuResult) -> Values:
    cases = [c for c in _cases(result, config="A", dtype="float32", backward=False, is_causal=False) if c.timed(OURS[0])]
    return {str(c.head_dim): (c.entries[OURS[0]].gflops or 0.0) / 1000 / H100_TFLOPS for c in cases}


def _against(slow: str, fast: str, result: GpuResult, **facts: Any) -> Values:
    cases = _cases(result, dtype="float32", **facts)
    return least((str(case.head_dim), case.ratio(slow, fast)) for case in cases if case.timed(slow, fast))


def _efficient(backward: bool) -> Callable[[GpuResult], Values]:
    return lambda result: _against(EFFICIENT, OURS[0], result, backward=backward)


def _numba(result: GpuResult) -> Values:
    return _against(OURS[0], OURS[1], result, backward=False, is_causal=False)


def _best_of_torch(case: Case) -> float | None:
    """The time of the fastest of torch's kernels over ours; None where either was not measured."""
    names = [name for name in case.entries if name.startswith("sdpa:") and case.timed(name, OURS[0])]
    return min((case.ratio(name, OURS[0]) for name in names), default=None)


def _half_forward(result: GpuResult) -> Values:
    cases = _cases(result, config="A", dtype="bfloat16", head_dim=64, backward=False, is_causal=False)
    return _best(map(_best_of_torch, cases))


def _launches(result: GpuResult) -> Values:
    return _best(map(_best_of_torch, result.launch_bound))


def _chosen_forward(slow: str, result: GpuResult, **facts: Any) -> Values:
    """The time of `slow` over that of the automatic choice, forward, in A."""
    cases = _cases(result, config="A", backward=False, is_causal=False, **facts)
    return least((str(case.head_dim), case.ratio(slow, AUTOMATIC)) for case in cases if case.timed(slow, AUTOMATIC))


def _chosen_training(result: GpuResult) -> Values:
    """The time of cuDNN's forward and backward pass over those of the automatic choice, in A at head_dim 64."""
    cases = _cases(result, config="A", dtype="bfloat16", head_dim=64, is_causal=False)
    cases = [case for case in cases if case.timed(CUDNN, AUTOMATIC)]
    if {case.backward for case in cases} != {False, True}:
        return {}
    slow, fast = (sum(case.seconds(name) for case in cases) for name in (CUDNN, AUTOMATIC))
    return {"64": slow / fast}


def _scratch(result: GpuResult) -> Values:
    return _best(size / MIB for step in result.memory if (size := step.scratch_bytes.get(OURS[0])) is not None)


def _longest(result: GpuResult) -> Values:
    return _best(float(step.seq) for step in result.long if step.verdict == "measured")


def _no_hopper(result: GpuResult) -> str | None:
    return None if result.environment.capability == "9.0" else "stated for an H100"


TARGETS: tuple[Target[GpuResult], ...] = (
    Target(
        *("A: bf16 forward, sdpa:cudnn's time over the automatic choice's", 1.15, 1.4),
        lambda result: _chosen_forward(CUDNN, result, dtype="bfloat16", head_dim=128),
    ),
    Target("A: bf16 forward and backward, the same", 1.1, 1.3, _chosen_training),
    Target(
        *("A: fp32 forward, sdpa:memory-efficient's time over the automatic choice's", 1.0, 1.3),
        lambda result: _chosen_forward(EFFICIENT, result, dtype="float32"),
    ),
    Target("A: fp32 forward, nominal rate over an H100's 67 TFLOP/s", 0.5, 0.7, _nominal_rate, "", missing=_no_hopper),
    Target(
        "fp32 forward: sdpa memory-efficient's time over cupy_raw's, worst of A-C, causal and not", 1.3, 2.0, _efficient(False)
    ),
    Target("fp32 backward: the same", 1.5, 2.5, _efficient(True)),
    Target("A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's", 0.9, 1.3, _half_forward),
    Target("B at 8,192 tokens, launches and all: the fastest sdpa kernel's time over cupy_raw's", 2, 4, _launches),
    Target("fp32 forward: cupy_raw's time over numba_cuda's, worst of A-C", 0.3, 0.5, _numba, ""),
    Target("A: forward's memory beyond out and lse", 1, 0, _scratch, " MiB", lower=True),
    Target("the longest sequence, bf16 forward on one GPU", 2**23, 2**24, _longest, " tokens"),
)
