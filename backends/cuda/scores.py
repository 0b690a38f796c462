"""Macros of `cupy_raw` for a softcap and a bias, and the sums for the gradient of the bias weights.

    bias_parts[block, entry, thread]            sums of one thread over a tile; 0 before a launch and after it
    bias_parts[block, entry, threads + head]    sums of a block over all tiles of a query head

Blocks have the same tiles at each call, so that equal inputs give equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from dilkit.backends.cuda.table import CudaKernel
from dilkit.bias.form import METRICS, BiasForm
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

MOST_PART_BYTES = 2**28
"""Limit of `bias_parts`: fewer blocks run where it would be larger."""

BY_DISTANCE, BY_TABLE = 1, 2
"""The macro `BIASED`."""


@lru_cache(maxsize=256)
def macros(role: str, softcap: bool, form: BiasForm | None) -> tuple[tuple[str, int], ...]:
    """Return the macros of `kernels/scores.cuh` that are not 0, for the kernel of `role`."""
    if role == "dots":
        return ()
    asked = {"SOFTCAP": int(softcap)}
    if form is not None:
        asked |= {"BIASED": BY_TABLE if form.sizes else BY_DISTANCE, "PLACED": int(form.placed)}
        asked |= {"DIMS": form.dims if form.dims > 1 else 0, "LEARNED": int(form.learned and role == "dquery")}
        asked |= {"METRIC": 0 if form.sizes or form.dims == 1 else METRICS.index(form.metric)}
    return tuple((name, value) for name, value in asked.items() if value)


def bias_parts(kernel: CudaKernel, problem: Problem, blocks: int, dbias: Tensor | None) -> Tensor | None:
    """Return zeros for at most `blocks` blocks to sum the gradient of the weights in; None without `dbias`."""
    if dbias is None:
        return None
    sizes = dbias.shape[1], kernel.threads + problem.heads
    most = max(1, MOST_PART_BYTES // (dbias.element_size() * sizes[0] * sizes[1]))
    return dbias.new_zeros(min(blocks, most), *sizes)


def add_parts(dbias: Tensor | None, parts: Tensor) -> None:
    """Add the sums of all blocks to `dbias` `(heads, entries)`."""
    assert dbias is not None
    dbias += parts[:, :, -len(dbias) :].sum(0).T
