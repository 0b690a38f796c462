"""The preference table: which backend comes first for which device, dtype and problem, and why.

The first row of `TABLE` that fits a problem orders the backends that it names; others, of third parties, keep their `priority`.
Names are data: nothing is imported, and a named backend need not be installed. The rows for GPUs from 8.0 on follow the times
of an H200, where there are any, the others the design of the kernels. They hold until `dilkit tune` has measured on the GPU at
hand.
"""

from __future__ import annotations

from dilkit.device import why_float32
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference import COUNTED, NEWEST, OLDEST, ON_H200, Preference, PreferenceRow

_ANY = ((OLDEST, NEWEST),)
_MAXWELL = ((OLDEST, (5, 9)),)
_PASCAL = (((6, 0), (6, 9)),)
_PASCAL_OF_DESKTOPS = (((6, 1), (6, 1)),)
_VOLTA = (((7, 0), (7, 4)),)
_TURING = (((7, 5), (7, 9)),)
_BELOW_AMPERE = ((OLDEST, (7, 9)),)
_FROM_AMPERE = (((8, 0), NEWEST),)
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
        "no kernel runs on GPUs of Apple; the definition is plain torch, and slow; it was never run there",
    ),
    PreferenceRow(*("cuda", _ANY, ("float64",), ()), ("reference",), "the kernels for GPUs compute in float32 or in halves"),
    PreferenceRow(
        *("cuda", _BELOW_AMPERE, _SINGLE, ("training",)),
        _RAW_FIRST,
        "one launch for all branches, shared keys scored once, gradients summed in registers; torch's memory-efficient kernel "
        "runs branch by branch and sums float32 gradients in memory",
    ),
    PreferenceRow(
        *("cuda", _BELOW_AMPERE, _SINGLE, ()),
        _RAW_FIRST,
        "one launch for all branches, shared keys scored once; torch's memory-efficient kernel runs branch by branch, "
        "on the same units, for which that is more work",
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
        "tensor cores, one launch for all branches, gradients summed in registers, though in seven products where five would do; "
        "torch has no flash attention below 8.0",
    ),
    PreferenceRow(
        *("cuda", _TURING, ("float16",), ()),
        _RAW_FIRST,
        "tensor cores, one launch for all branches, shared keys scored once; torch has no flash attention below 8.0, and its "
        "memory-efficient kernel has more work for the same tensor cores",
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
        _GENERATED_BEFORE_OURS,
        "FlexAttention is made for blocks and documents, and in wide use here; our kernels take a launch for each layout",
    ),
    PreferenceRow(
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("launch-bound", "shared keys")),
        _RAW_FIRST,
        "one launch; so little work takes less time than launching a library's kernel for every branch and merging the results, "
        "which takes up to 12 times as long",
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
        *("cuda", _FROM_AMPERE, (*_SINGLE, *_HALVES), ("nothing dilated",)),
        _GENERATED_BEFORE_OURS,
        "torch's kernels are in wide use here, and FlexAttention's, which look at all pairs of what is dilated",
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
        *("cuda", _FROM_AMPERE, _HALVES, ()),
        _RAW_BEFORE_TRITON,
        "torch's cuDNN and flash attention; cupy_raw scores shared keys once, on slower products, and takes 1.0 to 2.0 times as "
        "long, triton 1.6 to 3.4 times",
        basis=ON_H200,
    ),
)
"""The first row that fits is used. `reference` computes everything, but slowly, so it is last."""

ON_GPUS = (
    "An NVIDIA H200 has run dilkit, and no other GPU. There `cupy_raw`, and each of torch's kernels that `sdpa` calls, computed "
    "the problem list, but no steps of decoding; `cupy_raw` and `triton` ran in CUDA graphs, on side streams, in compiled code "
    "and over two ranks. The first run showed two faults of `sdpa`, which are mended; those after it found nothing wrong. Of "
    "`triton` small problems of each dtype ran and what was timed, of `flex` two problems; `numba_cuda` has run on no GPU.",
    "Every kernel is also compiled for all its GPUs, and checked on the CPU, by emulation, against the double-precision oracle. "
    "On a GPU each kernel of dilkit is checked again, against the same oracle, before its first use.",
    "Until `dilkit tune` has measured on the GPU at hand, the automatic choice follows fixed rules. From capability 8.0 on these "
    "follow the H200's times: torch's kernels (`sdpa`, `flex`) for what they compute, but dilkit's for small problems of several "
    "branches, for steps of decoding, for key padding masks and, in float32 without gradients, for heads of up to 64. Below 8.0 "
    "they take dilkit's kernels, but torch's for float16 on Volta.",
)
"""The state of support for GPUs, in three paragraphs, for the pages and `dilkit info`."""


def row_of(problem: Problem) -> PreferenceRow | None:
    """Return the first row of `TABLE` that fits `problem`."""
    return next((row for row in TABLE if row.fits(problem)), None)


def table_preference(problem: Problem) -> Preference:
    """Return the preference of the first row of `TABLE` that fits `problem`; an empty one if no row fits."""
    row = row_of(problem)
    return Preference() if row is None else row.preference
