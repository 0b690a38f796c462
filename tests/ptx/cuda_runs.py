"""Cases for the CUDA kernels without a GPU."""

from __future__ import annotations

from helpers.on_host import FP32, TENSOR_CORES, OnHost

from dilkit import BlockSparse, Documents, GlobalTokens, Pattern, SlidingWindow
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE
from dilkit.device import Capability
from dilkit.testing.packings import PACKED
from dilkit.testing.problems import DROPPING, OTHER_KINDS, PROBLEMS, SCORES, Case

LISTED = (*PROBLEMS, *PACKED)
Runs = list[tuple[Capability, Case]]

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
"""A pattern of more parts than a warp has lanes."""


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
SCORED: Runs = [
    (capability, case)
    for capability, dtype in ((FP32, "float32"), (TENSOR_CORES, "bfloat16"))
    for case in SCORES
    if case.dtype == dtype and not OnHost(capability).refusals(case.problem())
]
