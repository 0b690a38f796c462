"""The preference table: which backend comes first for which device, dtype and problem, and why.

The first row of `TABLE` that fits a problem orders the backends that it names; others, of third parties, keep their `priority`.
A named backend need not be installed. Each row names its basis: times of an H200, a model, counts, or the design of the kernels.
It holds until `dilkit tune` has measured on the GPU at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dilkit.device import Capability, why_float32
from dilkit.pattern.lowering import Band, Runs, Segments
from dilkit.problem import DTYPES, Problem
from dilkit.selection.shared_keys import repetition

BY_DESIGN = "by design, until `dilkit tune` has measured"
COUNTED = "as counted in docs/gpu-costs.md, which are bounds, until `dilkit tune` has measured"
ON_H200 = "as measured on an NVIDIA H200 (docs/results/gpu.md), until `dilkit tune` has measured"
MODELLED = "as modelled from published rates and the efficiency on an H200, until `dilkit tune` has measured"
MEASURED = "measured by `dilkit tune`"

LAUNCH_BOUND = {"float32": 2**36, "bfloat16": 2**37, "float16": 2**37}
"""The most nominal FLOPs of a launch-bound forward pass, by dtype. On an H200 in bf16, with three quarters of them, `cupy_raw`
took 0.3 to 0.4 ms, and torch's kernels 0.8 to 2.2 ms. In float32, with half as many again, both took as long.
"""

REPEATED_KEYS = 1.2
"""The repetition of keys from which scoring each key once outweighs a faster library kernel of the same generation."""

Range = tuple[Capability, Capability]
OLDEST: Capability = (0, 0)
NEWEST: Capability = (99, 9)


Preference = dict[str, str]
"""Backends, best first, each with the reason for its place. Backends that are not named are ordered by their `priority`."""


@dataclass(frozen=True)
class PreferenceRow:
    """An order of backends, for problems of these dtypes on these devices that have all of `features` (see `FEATURES`).

    `capabilities`: ranges of compute capability, both ends included. `basis`: the evidence for `why`.
    """

    device: str
    capabilities: tuple[Range, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    order: tuple[str, ...]
    why: str
    basis: str = BY_DESIGN

    def fits(self, problem: Problem) -> bool:
        device = problem.device
        if device.platform != self.device or problem.dtype not in self.dtypes:
            return False
        if device.capability is not None and not any(low <= device.capability <= high for low, high in self.capabilities):
            return False
        return all(FEATURES[feature](problem) for feature in self.features)

    @property
    def where(self) -> str:
        """The problems that the row applies to, for people: "cuda 8.0-8.9, bfloat16 float16, shared keys"."""
        device = " ".join([self.device, " and ".join(filter(None, (_shown(*both) for both in self.capabilities)))]).strip()
        return ", ".join((device, "any dtype" if self.dtypes == DTYPES else " ".join(self.dtypes), *self.features))

    @property
    def preference(self) -> Preference:
        """The order with its reasons: why the first backend is first, and for the others which backend comes before them."""
        first, *others = self.order
        after = f"after {first}, which comes first {self.basis}: {self.why}"
        return {first: f"first {self.basis}: {self.why}", **dict.fromkeys(others, after)}

    def to_dict(self) -> dict[str, Any]:
        lists = dict(dtypes=list(self.dtypes), features=list(self.features), order=list(self.order))
        return dict(device=self.device, where=self.where, **lists, why=self.why, basis=self.basis)


def measured_first(seconds: Sequence[tuple[str, float]], otherwise: Preference) -> Preference:
    """Order the measured backends by their seconds a call, followed by those of `otherwise`."""
    if not seconds:
        return otherwise
    shown = ", ".join(f"{name} {1e3 * taken:.3g} ms" for name, taken in seconds)
    measured = {name: f"{MEASURED}: {shown}" for name, _ in seconds}
    return measured | {name: f"not among those {MEASURED}: {shown}" for name in otherwise if name not in measured}


def _shares_keys(problem: Problem) -> bool:
    """True if several branches serve a head: their keys overlap, and a library computes the branches one by one."""
    branches = problem.pattern.branches
    if problem.pattern.heads is None:
        return len(branches) > 1
    return any(sum(branch.serves(head) for branch in branches) > 1 for head in range(problem.heads))


FEATURES: dict[str, Callable[[Problem], bool]] = {
    "shared keys": _shares_keys,
    f"keys repeated {REPEATED_KEYS} times": lambda problem: (
        _shares_keys(problem) and round(repetition(problem), 2) >= REPEATED_KEYS
    ),
    "key padding mask": lambda problem: problem.key_padding_mask,
    "training": lambda problem: problem.requires_grad,
    "one segment": lambda problem: [type(form) for form in problem.forms] == [Segments],
    "nothing dilated": lambda problem: all(form.rate == 1 for form in problem.forms if isinstance(form, (Segments, Band))),
    "runs": lambda problem: Runs.name in problem.forms.names,
    "stored rows": lambda problem: bool(problem.stored),
    "launch-bound": lambda problem: problem.flops() <= LAUNCH_BOUND.get(problem.dtype, 0),
    "no gradients": lambda problem: not problem.requires_grad,
    "head_dim up to 64": lambda problem: problem.head_dim <= 64,
}
"""The features of a problem that a row may require beside its device and dtype."""


def _shown(low: Capability, high: Capability) -> str:
    first, last = (f"{major}.{minor}" for major, minor in (low, high))
    if low == high:
        return first
    if low == OLDEST:
        return "" if high == NEWEST else f"up to {last}"
    return f"{first} and newer" if high == NEWEST else f"{first}-{last}"


_ANY = ((OLDEST, NEWEST),)
_MAXWELL = ((OLDEST, (5, 9)),)
_PASCAL = (((6, 0), (6, 9)),)
_PASCAL_OF_DESKTOPS = (((6, 1), (6, 1)),)
_VOLTA = (((7, 0), (7, 4)),)
_TURING = (((7, 5), (7, 9)),)
_BELOW_AMPERE = ((OLDEST, (7, 9)),)
_FROM_AMPERE = (((8, 0), NEWEST),)
_SLOW_TF32 = (((8, 6), (8, 9)), ((12, 0), (12, 9)))
"""Products of TF32 run at the rate of float32 arithmetic, or at twice it; on A100, H100 and B200 at seven times it or more."""
_CUDNN = (((9, 0), (10, 9)),)
_FLASH2 = (((8, 0), (8, 9)), ((11, 0), NEWEST))
"""torch's fastest kernel for halves is FlashAttention 2: cuDNN's is for `_CUDNN`."""
_SINGLE = ("float32",)
_HALVES = ("bfloat16", "float16")

_RAW_FIRST = ("cupy_raw", "sdpa", "numba_cuda", "triton", "flex", "reference")
_TORCH_FIRST = ("sdpa", "cupy_raw", "numba_cuda", "triton", "flex", "reference")
_RAW_BEFORE_TRITON = ("sdpa", "cupy_raw", "triton", "numba_cuda", "flex", "reference")
_GENERATED_BEFORE_OURS = ("sdpa", "flex", "cupy_raw", "triton", "numba_cuda", "reference")

TABLE = (
    PreferenceRow(
        *("cpu", _ANY, DTYPES, ()),
        ("native", "sdpa", "reference"),
        "one pass over the rows for all branches, each key that they share scored once",
        basis="as measured in docs/results",
    ),
    PreferenceRow(
        *("mps", _ANY, DTYPES, ()),
        ("reference",),
        "no kernel runs on GPUs of Apple; the definition is plain torch, and slow",
    ),
    PreferenceRow(
        *("hip", _ANY, DTYPES, ()),
        ("sdpa", "triton", "reference"),
        "torch's kernels and those in Triton, each proven on the GPU before its first use; all others are for NVIDIA's GPUs",
    ),
    PreferenceRow(*("cuda", _ANY, ("float64",), ()), ("reference",), "the kernels for GPUs compute in float32 or in halves"),
    PreferenceRow(
        *("cuda", _BELOW_AMPERE, _SINGLE, ("training",)),
        _RAW_FIRST,
        "a launch for each group of branches, shared keys scored once, gradients summed in registers; torch's memory-efficient "
        "kernel runs branch by branch, sums float32 gradients in memory, and some forty operators merge each result",
    ),
    PreferenceRow(
        *("cuda", _BELOW_AMPERE, _SINGLE, ()),
        _RAW_FIRST,
        "a launch for each group of branches, shared keys scored once, which is less work for the same units than torch's "
        "memory-efficient kernel has branch by branch; some forty operators merge each of its results",
        basis=COUNTED,
    ),
    PreferenceRow(
        *("cuda", _BELOW_AMPERE, ("bfloat16",), ()),
        _RAW_FIRST,
        f"bfloat16 in memory, float32 arithmetic: {why_float32('bfloat16', OLDEST)}, and no kernel of torch takes it there",
    ),
    *(
        PreferenceRow(
            *("cuda", capabilities, ("float16",), ()),
            _RAW_FIRST,
            f"float16 in memory, float32 arithmetic: {why_float32('float16', capability)}",
        )
        for capabilities, capability in ((_MAXWELL, OLDEST), (_PASCAL_OF_DESKTOPS, (6, 1)), (_PASCAL, (6, 0)))
    ),
    PreferenceRow(
        *("cuda", _VOLTA, ("float16",), ()),
        _TORCH_FIRST,
        "torch's memory-efficient kernel uses the tensor cores of 7.0; cupy_raw knows those of 7.5 and newer, "
        "and would compute in float32 without any",
    ),
    PreferenceRow(
        *("cuda", _TURING, ("float16",), ("training",)),
        _RAW_FIRST,
        "tensor cores, a launch for each group of branches, gradients summed in registers, though in seven products where five "
        "would do; torch has no flash attention below 8.0",
    ),
    PreferenceRow(
        *("cuda", _TURING, ("float16",), ()),
        _RAW_FIRST,
        "tensor cores, a launch for each group of branches, shared keys scored once; torch has no flash attention below 8.0, and "
        "its memory-efficient kernel has more work for the same tensor cores",
        basis=COUNTED,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("stored rows",)),
        ("cupy_raw", "triton", "reference"),
        "one launch that reads rows where they are kept; that of triton is the same, with more registers a thread and fewer rows "
        "on their way",
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("runs",)),
        ("flex", "sdpa", "cupy_raw", "triton", "numba_cuda", "reference"),
        "FlexAttention is made for blocks and documents, and in wide use here; sdpa takes a call for each run that does not "
        "repeat at equal distances, and our kernels a launch for each layout",
    ),
    PreferenceRow(
        *("cuda", _SLOW_TF32, _SINGLE, ()),
        _RAW_FIRST,
        "one product in float32; torch's memory-efficient kernel takes three in TF32, each at most twice as fast here",
        basis=MODELLED,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("launch-bound", "shared keys")),
        _RAW_FIRST,
        "one launch for each group of branches; so little work takes less time than launching a library's kernel for every "
        "branch and merging the results, which takes up to 12 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, _HALVES, ("key padding mask",)),
        ("cupy_raw", "triton", "sdpa", "numba_cuda", "flex", "reference"),
        "takes the mask; torch's flash and cuDNN attention do not, which leaves its memory-efficient one: 3 to 4 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, _SINGLE, ("key padding mask",)),
        _RAW_FIRST,
        "takes the mask as it is; torch's memory-efficient kernel takes a bias that is made of it: 1.1 to 1.7 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FLASH2, _HALVES, (f"keys repeated {REPEATED_KEYS} times",)),
        _RAW_FIRST,
        "scores each key once; torch's fastest kernel here, FlashAttention 2, scores it in each branch: 0.94 to 1.5 times as "
        "long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("one segment", "nothing dilated")),
        _GENERATED_BEFORE_OURS,
        "the call that torch's kernels are made for, with nothing to merge; cupy_raw takes 1.0 to 2.1 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("nothing dilated",)),
        _GENERATED_BEFORE_OURS,
        "calls of torch's kernels on whole segments or blocks, and those kernels multiply faster than ours; FlexAttention's skip "
        "blocks of keys that no query sees, which dilation does not leave",
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, _SINGLE, ("no gradients", "head_dim up to 64", "shared keys")),
        _RAW_FIRST,
        "scores shared keys once, on CUDA cores; torch's memory-efficient kernel scores them in each branch, on tensor cores in "
        "three products of TF32: 1.0 to 1.3 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, _SINGLE, ()),
        _TORCH_FIRST,
        "torch's memory-efficient kernel multiplies float32 on tensor cores here, in three products of TF32; cupy_raw does not, "
        "and takes 1.0 to 1.3 times as long",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _CUDNN, _HALVES, ()),
        _RAW_BEFORE_TRITON,
        "torch's cuDNN and flash attention; cupy_raw scores shared keys once, on slower products, and takes 1.0 to 2.0 times as "
        "long, triton 1.6 to 3.4 times",
        basis=ON_H200,
    ),
    PreferenceRow(
        *("cuda", _FLASH2, _HALVES, ()),
        _RAW_BEFORE_TRITON,
        "FlashAttention 2 of torch; where branches repeat few keys, cupy_raw takes 1.0 to 1.3 times as long",
        basis=ON_H200,
    ),
)
"""The first row that fits is used. `reference` computes everything, but slowly, so it is last."""


def row_of(problem: Problem) -> PreferenceRow | None:
    return next((row for row in TABLE if row.fits(problem)), None)


def table_preference(problem: Problem) -> Preference:
    """Return the preference of the first row of `TABLE` that fits `problem`; an empty one if no row fits."""
    row = row_of(problem)
    return {} if row is None else row.preference
