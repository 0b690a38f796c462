"""Faults for the PTX of kernels: where `mutations.py` puts them, the trials that show them, and the ones that are harmless."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from helpers.steps import gpu_case
from ptx.trials import HOPPER_SMALL, PAIRS, SINGLE, STEP, TENSOR, Trial

from dilkit import Pattern
from dilkit.testing.problems import Case

Faults = dict[str, tuple[str, str]]
"""Pattern and replacement, by kind of fault."""


@dataclass(frozen=True)
class Subject:
    """Kernel that is broken.

    Attributes:
        entry: Pattern of its name in PTX.
        faults: Kinds of faults.
        trials: Trials that show them.
        loops: Turns of loops, over all threads, after which a launch is taken to run for ever.
        places: Places of each kind that are tried by default.
    """

    entry: str
    faults: Faults
    trials: tuple[Trial, ...]
    loops: int = 20_000_000
    places: int = 2

    @property
    def backend(self) -> str:
        return self.trials[0].backend

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
HOPPER: Faults = {
    "barrier": (r"\tbar\.sync[^;]*;", ""),
    "barrier of a warp": CUDA["barrier of a warp"],
    "wait for a phase": (r"mbarrier\.try_wait\S+ (\w+), [^;]*;", r"setp.eq.u32 \1, 0, 0;"),
    "arrival": (r"mbarrier\.arrive[^;]*;", ""),
    "fence of proxies": (r"fence\.proxy[^;]*;", ""),
    "wait for copies": (r"cp\.async\.wait_group [02];", "cp.async.wait_group 4;"),
    "commit": CUDA["commit"],
    "copy of nothing": CUDA["copy of nothing"],
    "wait for products": (r"(wgmma\.wait_group\S+) [01];", r"\1 2;"),
    "commit of products": (r"wgmma\.commit_group[^;]*;", ""),
    "fence of registers": (r"wgmma\.fence[^;]*;", ""),
    "first sum": (r"(setp\.ne\.b32 add, )%r\d+, 0;", r"\g<1>1, 0;"),
    "order of A": (r"(wgmma\.mma_async\S+ \{[^}]*\}, \{)(%r\d+), (%r\d+)", r"\1\3, \2"),
    "transposed": (r"(wgmma\.mma_async[^;]*), 1;", r"\1, 0;"),
    "order of halves": CUDA["order of halves"],
    "predicate": CUDA["predicate"],
    "lane of a shuffle": CUDA["lane of a shuffle"],
    "counter": CUDA["counter"],
}
TRITON: Faults = {
    "barrier": (r"\tbar\.sync\s+0;", ""),
    "wait for no group": (r"cp\.async\.wait_group\s+([1-9]);", r"cp.async.wait_group \g<1>0;"),
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
WARPGROUPS: Faults = {
    "parity": (r"mbarrier\.try_wait\.parity[^;]*, (%r\d+);", r"xor.b32 \1, \1, 1;\n\g<0>\nxor.b32 \1, \1, 1;"),
    "wait for one product less": (r"(wgmma\.wait_group\S+)\s+0;", r"\1 1;"),
    "wait for no product": (r"(wgmma\.wait_group\S+)\s+\d;", r"\1 7;"),
    "commit of products": (r"wgmma\.commit_group[^;]*;", ""),
    "fence of registers": (r"wgmma\.fence[^;]*;", ""),
    "fence of a proxy": (r"fence\.proxy\.async[^;]*;", ""),
    **{
        f"{what} in a descriptor": (
            r"wgmma\.mma_async[^;]*, (%rd\d+),[^;{}]*;",
            rf"xor.b64 \1, \1, {1 << bit};\n\g<0>\nxor.b64 \1, \1, {1 << bit};",
        )
        for what, bit in (("start", 1), ("leading offset", 19), ("stride", 36), ("swizzling", 62))
    },
}
"""Faults of products by warpgroups, and the mbarriers that they wait at."""
SMALL: dict[str, Any] = dict(feature="PTX", variant="small", pattern=Pattern([128, 256], [1, 1]), seq=200, heads=2, kv_heads=1)
CASE = Case(**SMALL, batch=1, head_dim=16, dtype="float16", is_causal=True, mask="random", values="ignored NaN")
"""Rows that see some tiles of columns as a whole, and others cut."""

LOOPS = 300_000
"""Most turns; the longest case takes a few thousand."""


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
"""Trials that show the faults of each kernel in CUDA."""

SUBJECTS = {
    **{kernel: Subject(kernel, CUDA, trials) for kernel, trials in OF_CUDA.items()},
    "hopper_forward": Subject("hopper_forward", HOPPER, HOPPER_SMALL, LOOPS),
    **{f"triton {role}": Subject(role, TRITON, _of("triton"), LOOPS, 1) for role in ("forward", "dquery", "dkeyvalue")},
    "triton forward on Hopper": Subject("forward", WARPGROUPS, (Trial("broken", (9, 0), CASE, backend="triton"),), LOOPS, 1),
    "triton attend_stored": Subject("attend_stored", TRITON_STEP, SMALL_STEP, places=1),
    **{
        f"numba_cuda {role}": Subject(rf"\S*?{len(role)}{role}\d\S*", NUMBA, _of("numba_cuda"), LOOPS, 1)
        for role in ("forward", "dquery", "dkeyvalue")
    },
}
"""The kernels in CUDA, in Triton and in numba.cuda."""

OWN_ROWS = (
    "Of rows that the tile lacks, where the first row of the head comes in the place of zeros: a row of a product depends on no "
    "other row of the left factor, and those that are not below tile.rows are not written, be they NaN."
)
OWN_COLUMNS = (
    "Of columns of own rows beyond head_dim, of which the trials have none. Where there are, those of the other rows are 0, so "
    "that zeros here matter for an infinite number alone."
)
ONE_WAIT = (
    "Of the first of two tensors whose copies follow each other: the commit of the second takes them in, and wherever the kernel "
    "waits, it waits for both."
)
FOR_REGISTERS = (
    "It orders no memory: what lanes leave for each other there lies between barriers of the block. Across it the compiler moves "
    "no loads, for which there would be no registers, as the source says."
)

FOR_LANES = (
    "It lets lane 0 arrive for its warp. All lanes have waited for products just before. Of what they have read besides, the "
    "notes of keys, the emulator knows the first and the last reader alone, and nobody writes these before two more arrivals."
)
SHIFTED = "It divides by a step: powers of two are shifted, and others divided, which gives the same of a power of two."
TWO_FENCES = "Weights and sums are ready at the fence of the product before, that of the scores, which writes to neither."
NOTHING_BEFORE = "Of the copy of queries, the first of a tile: the block has waited for all before."

NO_STRIP = "Of the record of a strip, where the loop has none: its turns, none, do not use it."
NO_ROW = "Of rows that the tile lacks: the first row comes in their place, and nothing is stored of them."
NOT_IN_STRIP = "Of the biases of columns that a strip lacks: -inf comes in the place of what is copied."
FLOOR = "It makes a quotient that of Python: remainder and divisor, of which this is the exclusive union, are never equal."
LOGARITHM = "Of a logarithm: the operand that is lost is 0 but for subnormal numbers, and this is of a count."
ALL_GROUPS = "The kernel waits for all groups wherever it waits, so that two are as good as one."

SURVIVORS: dict[str, str] = {
    "mma_forward: copy of nothing 0/2": OWN_ROWS,
    "mma_dkeyvalue: copy of nothing 0/2": OWN_ROWS,
    "mma_dkeyvalue: commit 0/2": ONE_WAIT,
    "mma_dkeyvalue: barrier of a warp 1/2": FOR_REGISTERS,
    "mma_dquery: copy of nothing 0/2": OWN_ROWS,
    "mma_dquery: commit 0/2": ONE_WAIT,
    "mma_dquery_pairs: copy of nothing 0/2": OWN_ROWS,
    "mma_dquery_pairs: commit 0/2": ONE_WAIT,
    "mma_dquery_pairs: barrier of a warp 1/2": FOR_REGISTERS,
    "fp32_dquery: copy of nothing 0/2": OWN_COLUMNS,
    "fp32_dkeyvalue: copy of nothing 0/2": OWN_COLUMNS,
    "fp32_dkeyvalue: copy of nothing 1/2": OWN_COLUMNS,
    "row_dots: predicate 0/2": (
        "The compiler divides numbers below 2^32 as such, others as numbers of 64 bits: with the branch the other way round the "
        "former are divided as the latter, which gives the same. No trial has 2^32 rows, which would be divided wrongly."
    ),
    "hopper_forward: barrier of a warp 1/2": FOR_LANES,
    "hopper_forward: wait for copies 0/2": NOTHING_BEFORE,
    "hopper_forward: copy of nothing 0/2": OWN_ROWS,
    "hopper_forward: fence of registers 1/2": TWO_FENCES,
    "hopper_forward: predicate 1/2": SHIFTED,
    "triton forward: commit 0/1": ALL_GROUPS,
    "triton forward: copy of nothing 0/1": NO_STRIP,
    "triton forward: condition of a load 0/1": NO_ROW,
    "triton forward: default of a load 0/1": NO_STRIP,
    "triton dquery: commit 0/1": ALL_GROUPS,
    "triton dquery: copy of nothing 0/1": NOT_IN_STRIP,
    "triton dquery: condition of a load 0/1": NO_ROW,
    "triton dquery: default of a load 0/1": NO_STRIP,
    "triton dkeyvalue: barrier 0/1": (
        "It ends the pass of a query head. What the last turn reads lies before a barrier of that turn, what the next head reads "
        "behind one of its own."
    ),
    "triton dkeyvalue: commit 0/1": ALL_GROUPS,
    "triton dkeyvalue: copy of nothing 0/1": NOT_IN_STRIP,
    "triton dkeyvalue: condition of a load 0/1": NO_ROW,
    "triton dkeyvalue: default of a load 0/1": NO_STRIP,
    "triton forward on Hopper: leading offset in a descriptor 0/1": (
        "Of a matrix no wider than its swizzling, which has one column of atoms: nothing lies at that offset."
    ),
    "numba_cuda forward: comparison 0/1": FLOOR,
    "numba_cuda forward: product 0/1": LOGARITHM,
    "numba_cuda dquery: comparison 0/1": FLOOR,
    "numba_cuda dquery: product 0/1": LOGARITHM,
    "numba_cuda dkeyvalue: comparison 0/1": FLOOR,
    "numba_cuda dkeyvalue: product 0/1": LOGARITHM,
}
"""Reasons why nothing notices these mutations: they are no faults, or no fault of their kind can be seen."""
