"""What the GPU suite's figures should be, and what they are: pure functions of a result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dilkit.tools.bench.untyped_target import MIB, Result, Target, Values, measured, median

H100_TFLOPS = 67.0
"""fp32 on the CUDA cores of an H100 SXM, nominal."""
EFFICIENT = "sdpa:memory-efficient"
OURS = "cupy_raw"

Case = dict[str, Any]


def judge(result: Result) -> list[dict[str, Any]]:
    """All figures of `result`."""
    return [target.judge(result) for target in TARGETS]


def _cases(result: Result, **fields: Any) -> Iterator[Case]:
    return (case for case in result["cases"] if all(case[name] == value for name, value in fields.items()))


def _worst(values: Iterator[tuple[str, float]]) -> Values:
    """The least value of each head_dim."""
    found: Values = {}
    for dim, value in values:
        found[dim] = min(value, found.get(dim, value))
    return found


def _best(values: Iterable[float | None]) -> Values:
    """The largest value, as that of head_dim 64; nothing where there is none."""
    found = [value for value in values if value is not None]
    return {"64": max(found)} if found else {}


def _nominal_rate(result: Result) -> Values:
    cases = _cases(result, config="A", dtype="float32", backward=False, is_causal=False)
    return {str(c["head_dim"]): c["entries"][OURS]["gflops"] / 1000 / H100_TFLOPS for c in cases if measured(c, OURS)}


def _against_efficient(backward: bool) -> Callable[[Result], Values]:
    def read(result: Result) -> Values:
        cases = _cases(result, dtype="float32", backward=backward)
        return _worst((str(c["head_dim"]), _ratio(c, EFFICIENT, OURS)) for c in cases if measured(c, EFFICIENT, OURS))

    return read


def _ratio(step: Case, slow: str, fast: str) -> float:
    return median(step["entries"][slow]) / median(step["entries"][fast])


def _best_of_torch(step: Case) -> float | None:
    """The time of the fastest of torch's kernels over ours; None where either was not measured."""
    torchs = [name for name in step["entries"] if name.startswith("sdpa:") and measured(step, name)]
    return min(_ratio(step, name, OURS) for name in torchs) if torchs and measured(step, OURS) else None


def _half_forward(result: Result) -> Values:
    cases = _cases(result, config="A", dtype="bfloat16", head_dim=64, backward=False, is_causal=False)
    return _best(_best_of_torch(case) for case in cases)


def _launches(result: Result) -> Values:
    return _best(map(_best_of_torch, result["launch_bound"]))


def _numba(result: Result) -> Values:
    cases = _cases(result, dtype="float32", backward=False, is_causal=False)
    found = ((str(c["head_dim"]), _ratio(c, OURS, "numba_cuda")) for c in cases if measured(c, "numba_cuda", OURS))
    return _worst(found)


def _scratch(result: Result) -> Values:
    return _best(size / MIB for step in result["memory"] if (size := step["scratch_bytes"].get(OURS)) is not None)


def _long(result: Result) -> Values:
    return _best(float(step["seq"]) for step in result["long"] if step["verdict"] == "measured")


def _no_hopper(result: Result) -> str | None:
    return None if result["environment"].get("capability") == "9.0" else "stated for an H100"


TARGETS = (
    Target("A: fp32 forward, nominal rate over an H100's 67 TFLOP/s", 0.5, 0.7, _nominal_rate, "", missing=_no_hopper),
    Target(
        "fp32 forward: sdpa memory-efficient's time over cupy_raw's, worst of A-C, causal and not",
        1.3,
        2.0,
        _against_efficient(False),
    ),
    Target("fp32 backward: the same", 1.5, 2.5, _against_efficient(True)),
    Target("A: bf16 forward, the fastest sdpa kernel's time over cupy_raw's", 0.9, 1.3, _half_forward),
    Target("B at 8,192 tokens, launches and all: the fastest sdpa kernel's time over cupy_raw's", 2, 4, _launches),
    Target("fp32 forward: cupy_raw's time over numba_cuda's, worst of A-C", 0.3, 0.5, _numba, ""),
    Target("A: forward's memory beyond out and lse", 1, 0, _scratch, " MiB", lower=True),
    Target("the longest sequence, bf16 forward on one GPU", 2**24, 2**24, _long, " tokens"),
)
