"""A bias as launches of the kernels in Triton take it, and the sums of the gradient of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dilkit.backends.tiles.backend import Tensors
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

HEAD = 3
"""The column of a table of tiles that holds the head of each."""


def bias_constants(problem: Problem) -> dict[str, Any]:
    """Return the kernel's constants that select a kind of bias."""
    form = problem.bias
    if form is None:
        return dict(METRIC="", DIMS=0)
    return dict(METRIC="table" if form.sizes else form.metric, DIMS=form.dims if form.placed else 0)


def bias_view(tensors: Tensors, problem: Problem, sums: Tensor | None) -> Any:
    """Return the bias of a call as kernels take it, or None where the call has none."""
    weights, positions, form = tensors.get("bias_weights"), tensors.get("positions"), problem.bias
    if weights is None or form is None:
        return None
    from dilkit.backends.triton.scores import BiasView

    apart = 0 if positions is None or len(positions) == 1 else positions.stride(0)
    first, second, third = (*form.sizes, 1, 1, 1)[:3]
    at, own = (weights if x is None else x for x in (positions, sums))
    return BiasView(weights, at, own, apart, form.entries, (first, second, third))


def bias_sums(programs: int, dbias: Tensor) -> Tensor:
    """Return zeros, one line per program, for what each adds to the gradient of its head's weights."""
    return dbias.new_zeros(programs, dbias.shape[1])


def add_sums(dbias: Tensor, sums: Tensor, tiles: Tensor) -> None:
    """Add the sums of all programs, those of one tile of `tiles` next to each other, to `dbias` `(heads, entries)`."""
    import torch

    of_head = tiles[:, HEAD, None] == torch.arange(len(dbias), device=tiles.device)
    by_tile = sums.view(len(tiles), -1, sums.shape[1]).sum(1, dtype=torch.float64)
    dbias += of_head.T.double() @ by_tile
