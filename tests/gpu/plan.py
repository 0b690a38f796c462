"""The plan of a GPU day: steps in the order of their worth."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from helpers.gpu_calls import TORCHS

CALL = 530
"""Seconds of a call's steps; loading torch and writing the page take a few more."""
OURS, FAST = ("cupy_raw", "triton"), ("sdpa:cudnn", "sdpa:flash")
PARTS = {"bfloat16": OURS, "launches": OURS[:1], "float32": OURS[:1]}
"""Our backends in each part of the GPU suite; a key is a word in the names of its rows. In fp32 Triton is much slower."""


@dataclass(frozen=True)
class Step:
    """Tests or a suite, with seconds of a call's time; a step also has what earlier ones leave, with 0 that alone.

    `tests`: an expression of pytest's -k; `workers`: processes at most, 1 where times are measured. `suite`: a name of `dilkit
    bench`; `words`: those of --rows.
    """

    name: str
    seconds: int
    what: str
    tests: str = ""
    workers: int = 1
    suite: str = ""
    words: str = ""
    backends: tuple[str, ...] = ()


def of_gpu(name: str, seconds: int, what: str, words: str, *backends: str) -> Step:
    return Step(name, seconds, what, suite="gpu", words=words, backends=backends)


PLAN = (
    Step("load", 40, "versions; all kernels compiled and loaded", "machine_has or takes_every or is_loaded"),
    Step("proofs", 60, "every kernel launched", "is_launched", workers=16),
    of_gpu("times", 40, "A, B, C in bf16, forward and backward: cupy_raw, cuDNN, flash", "bfloat16", "cupy_raw", *FAST),
    Step("counters", 40, "the profiler's counters of five kernels", "counters"),
    Step("sanitizers", 70, "memcheck, racecheck; Triton compiles", "sanitizer and cupy_raw or sizes_are_compiled", workers=16),
    Step("longest", 25, "16.7 million tokens; gradients of 4", "sixteen"),
    of_gpu("fp32 backward", 25, "B, A, C in fp32", "float32,backward", "cupy_raw", *TORCHS),
    Step("triton sizes", 60, "times of other sizes of Triton's kernels", "sizes_are_right"),
    Step("tiles", 15, "tall tiles beside low ones", "tall_tiles"),
    of_gpu("C backward", 20, "C in bf16, all backends", "C,bfloat16,backward", *OURS, *FAST),
    Step("verify", 45, "Triton's problem list; wide heads", "problem_list and triton or wide", workers=16),
    Step("compilers", 60, "numba_cuda, FlexAttention", "compilers", workers=16),
    Step("preferences", 30, "the automatic choice beside the fastest", suite="preferences", backends=(*OURS, "sdpa")),
    Step("all tests", 0, "all other tests but those of times", "not times and not sizes and not sixteen", workers=16),
    *(of_gpu(f"gpu-{word}", 0, f"the GPU suite: {word}", word, "automatic", *ours, *TORCHS) for word, ours in PARTS.items()),
)


def lines(took: Mapping[str, str]) -> Iterator[str]:
    for step in (*PLAN, Step("all", sum(step.seconds for step in PLAN), f"{CALL} s a call")):
        yield f"{step.name:<14} {step.seconds or 'what is left':>12}  {took.get(step.name, ''):<20} {step.what}"
