"""What `mutations.py` breaks: kernels, the faults that their PTX is given, and what shows these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from helpers.steps import gpu_case
from ptx.trials import PAIRS, SINGLE, STEP, TENSOR, Trial

from dilkit import Pattern
from dilkit.testing.problems import Case

Faults = dict[str, tuple[str, str]]
"""By kind a pattern and what comes in its place."""


@dataclass(frozen=True)
class Subject:
    """A kernel, whose name in PTX matches `entry`, its faults, and the trials that show them. After so many turns of `loops`, of
    all threads, a launch is taken to run for ever. Of each fault so many `places` are tried, unless others are asked for."""

    entry: str
    faults: Faults
    trials: tuple[Trial, ...]
    loops: int = 20_000_000
    places: int = 2

    def is_in(self, text: str) -> bool:
        return re.search(rf"\.entry {self.entry}\(", text) is not None


CUDA: Faults = {
    "barrier": (r"\tbar\.sync\s+0;", ""),
    "barrier of a warp": (r"\tbar\.warp\.sync\s+-?\w+;", ""),
    "fence": (r"\tmembar\.gl;", ""),
    "wait for one group less": (r"cp\.async\.wait_group 0;", "cp.async.wait_group 1;"),
    "wait for two groups less": (r"cp\.async\.wait_group 1;", "cp.async.wait_group 3;"),
    "commit": (r"cp\.async\.commit_group;", ""),
    "copy of nothing": (r"(cp\.async\.cg\.shared\.global \[.*?\], \[.*?\], 16), %r\d+;", r"\1;"),
    "order of A": (r"(mma\.sync\S+ \{.*?\}, \{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "order of B": (r"(mma\.sync\S+k16\S+ \{.*?\}, \{.*?\}, \{)(%r\d+), (%r\d+)\}", r"\1\3, \2}"),
    "transposed": (r"(ldmatrix\S+)\.trans\.", r"\1."),
    "not transposed": (r"(ldmatrix\S+x\d)\.shared", r"\1.trans.shared"),
    "order of matrices": (r"(ldmatrix\S+ \{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "order of halves": (r"(cvt\.rn\.b?f16x2\.f32 %r\d+, )(%f\d+), (%f\d+);", r"\1\3, \2;"),
    "predicate": (r"@%(p\d+) bra", r"@!%\1 bra"),
    "lane of a shuffle": (r"(shfl\.sync\.\w+\.b32\s+\S+, \S+, )(?:1|2|4|8|16),", r"\g<1>3,"),
    "counter": (r"\tst\.global\.u32\s+\[%rd\d+\], %r\d+;", ""),
}
TRITON: Faults = {
    "barrier": (r"\tbar\.sync\s+0;", ""),
    "wait for a group less": (r"cp\.async\.wait_group\s+0;", "cp.async.wait_group 1;"),
    "commit": (r"\tcp\.async\.commit_group;", ""),
    "copy of nothing": (r"(cp\.async\S+ \[.*?\], \[.*?\], 0x\w+), %r\d+;", r"\1;"),
    "condition of a load": (r"@%p\d+ (ld\.global)", r"\1"),
    "condition of a store": (r"@%p\d+ (st\.global)", r"\1"),
    "default of a load": (r"mov\.u32 (%r\d+), 0x0;(?=\s*@)", r"mov.u32 \1, 0x3f800000;"),
    "predicate": (r"@%(p\d+) bra", r"@!%\1 bra"),
    "lane of a shuffle": (r"(shfl\.sync\.bfly\.b32\s+\S+, \S+, )(?:1|2|4|8|16),", r"\g<1>0,"),
    "mask of a shuffle": (r"(shfl\.sync\.bfly\.b32\s[^;]*), -1;", r"\1, 0xffff;"),
    "transposed": (r"(ldmatrix\S+)\.trans\.", r"\1."),
    "order of matrices": (r"(ldmatrix\S+ \{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "order of A": (r"(mma\.sync\S+\s+\{.*?\}, \{)\s*(%r\d+), (%r\d+)", r"\1\3, \2"),
    "order of halves": (r"(cvt\.rn\.f16x2\.f32\s+%r\d+, )(%r\d+), (%r\d+);", r"\1\3, \2;"),
}
TRITON_STEP: Faults = {
    name: TRITON[name] for name in ("barrier", "condition of a load", "condition of a store", "lane of a shuffle")
} | {
    "order of an atomic operation": (r"\.(?:acq_rel|acquire)\.(?=add|b32)", ".relaxed."),
}
NUMBA: Faults = {
    "barrier": (r"\tbar\.sync\s+0;", ""),
    "predicate": (r"@%(p\d+) bra", r"@!%\1 bra"),
    "comparison": (r"(setp\.)lt(\.[su]\d+)", r"\1le\2"),
    "product": (r"(fma\.rn\.f32\s+%f\d+, %f\d+, %f\d+, )%f\d+;", r"\g<1>0f00000000;"),
    "store": (r"\tst\.shared\.\S+\s[^;]*;", ""),
}
SMALL: dict[str, Any] = dict(feature="PTX", variant="small", pattern=Pattern([128, 256], [1, 1]), seq=200, heads=2, kv_heads=1)
CASE = Case(**SMALL, batch=1, head_dim=16, dtype="float16", is_causal=True, mask="random", values="ignored NaN")
"""Of rows that see some tiles of columns as a whole, and others cut."""

LOOPS = 300_000
"""A few thousand are turned in that case."""


def _of(backend: str) -> tuple[Trial, ...]:
    return (Trial("broken", (8, 0), CASE, backend=backend),)


SMALL_STEP = (Trial("steps", (8, 0), gpu_case(("float32", ""), "small", "alibi"), backend="triton"),)
OF_CUDA = {
    "mma_forward": TENSOR,
    "mma_dquery": TENSOR,
    "mma_dkeyvalue": TENSOR,
    "mma_dquery_pairs": PAIRS,
    "row_dots": SINGLE,
    "fp32_forward": SINGLE,
    "fp32_dquery": SINGLE,
    "fp32_dkeyvalue": SINGLE,
    "attend_stored": STEP,
}
"""By kernel, what shows its faults."""

SUBJECTS = {
    **{kernel: Subject(kernel, CUDA, trials) for kernel, trials in OF_CUDA.items()},
    **{f"triton {role}": Subject(role, TRITON, _of("triton"), LOOPS, 1) for role in ("forward", "dquery", "dkeyvalue")},
    "triton attend_stored": Subject("attend_stored", TRITON_STEP, SMALL_STEP, places=1),
    **{
        f"numba_cuda {role}": Subject(rf"\S*?{len(role)}{role}\d\S*", NUMBA, _of("numba_cuda"), LOOPS, 1)
        for role in ("forward", "dquery", "dkeyvalue")
    },
}
"""The kernels in CUDA, in Triton and in numba.cuda."""
