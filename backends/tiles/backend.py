"""Launches of the GPU backends: the kernels of a forward and a backward pass, their tensors and their order.

    forward     the kernel "forward"                            query, key, value           -> out, lse
    backward    the kernel "dots"                               dout, out                   -> delta = rowsum(dout * out)
                the kernel "dquery", over query tiles           query, key, value, dout     -> dquery, dbias if that is learned
                the kernel "dkeyvalue", over key tiles          query, key, value, dout     -> dkey, dvalue

No two blocks add to the same number, so equal inputs give equal bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dilkit.backend import Backend, Refusal
from dilkit.backends.tiles.kept import keep
from dilkit.backends.tiles.schedule import LOW_ROWS, schedule_refusals
from dilkit.device import capturing
from dilkit.inputs import Inputs
from dilkit.pattern.lowering import Runs, RunTable
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.decoding.protocol import PlacedStep, Step
    from dilkit.op.dropout import Dropout

ROLES = ("forward", "dots", "dquery", "dkeyvalue")
"""Attention itself; `rowsum(dout * out)`; the gradient of queries; the gradients of keys and values."""

Tensors = Mapping[str, "Tensor | None"]
"""The tensors of one launch by name: query, key, value, out, dout, dquery, dkey, dvalue, lse, delta, mask, and where packed
sequences begin: starts. Of a bias bias_weights and positions, as in `LoweredBias`, and dbias, to which "dquery" adds."""


class TiledBackend(Backend):
    """A backend whose kernels compute one tile of a schedule in each thread block."""

    reproducible = True

    @abstractmethod
    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        """Launch the kernel of `role`, one of `ROLES`, over all tiles of `problem`. `dropout` is given if `limits.dropout`."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        return (*super().refusals(problem), *schedule_refusals(problem), *fill_refusals(problem))

    def forward(self, inputs: Inputs, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.op.boundary import empty_outputs

        out, lse = empty_outputs(inputs.query)
        self.launch_role("forward", {**_named(inputs), "out": out, "lse": lse}, problem, inputs.dropout)
        return out, lse

    def backward(self, dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, problem: Problem) -> tuple[Tensor, ...]:
        import torch

        lse = lse.contiguous()
        tensors = {**_named(inputs), "dout": dout, "out": out, "lse": lse, "delta": torch.empty_like(lse)}
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
        self.launch_role("dots", tensors, problem)
        bias = inputs.bias
        dbias = None if bias is None or not bias.form.learned else torch.zeros_like(bias.weights)
        self.launch_role("dquery", {**tensors, "dquery": dq, "dbias": dbias}, problem, inputs.dropout)
        self.launch_role("dkeyvalue", {**tensors, "dkey": dk, "dvalue": dv}, problem, inputs.dropout)
        return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias)


class StepBackend(TiledBackend):
    """A tile backend with a kernel for decoding steps, which reads their tables on the device."""

    @abstractmethod
    def launch_step(self, placed: PlacedStep) -> tuple[Tensor, Tensor]:
        """Compute `(out, lse)` of a step in one launch."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        return Backend.refusals(self, problem) if problem.stored else super().refusals(problem)

    def attend_stored(self, step: Step, problem: Problem) -> tuple[Tensor, Tensor]:
        from dilkit.decoding.protocol import place

        if capturing(step.query.device):
            raise RuntimeError(
                "the tables of a step cannot be copied to the device while a CUDA graph is captured: "
                "`dilkit.decoding.protocol.place` it before, and capture `attend_placed`"
            )
        return self.attend_placed(place(step, problem))

    def attend_placed(self, placed: PlacedStep) -> tuple[Tensor, Tensor]:
        """Attend with tables that are on the device: one launch, which a CUDA graph may capture and replay."""
        device = placed.step.query.device
        if capturing(device):
            keep(placed, device)
        return self.launch_step(placed)


def computed_as(dim: int, size: int) -> str:
    """Return the cost of padding `head_dim`, for `Backend.detail`; empty where it is not padded."""
    return f"; head_dim {dim} computed as {size}: {size / dim:.2f} times the multiplications" if size > dim else ""


def _named(inputs: Inputs) -> Tensors:
    query, key, value, mask, starts, *_ = inputs
    bias = inputs.bias
    named = {"query": query, "key": key, "value": value, "mask": mask, "starts": starts}
    return named if bias is None else {**named, "bias_weights": bias.weights, "positions": bias.positions}


# A tile takes as long as a full one, so many short runs of rows are refused.
LEAST_ROWS, FEW_TILES = LOW_ROWS // 2, 16
"""Rows of a tile on average, at least; so many tiles of a head may be emptier."""


def fill_refusals(problem: Problem) -> list[Refusal]:
    """Refuse runs whose tiles would be mostly empty."""
    if (rows := least_rows(problem)) >= LEAST_ROWS:
        return []
    limit = f"at least {LEAST_ROWS} of {LOW_ROWS} on average, or at most {FEW_TILES} tiles of a head"
    return [Refusal("rows of a tile", f"{rows:.3g}", limit, 'longer runs of rows that see the same columns, or backend="flex"')]


@lru_cache(maxsize=1024)
def least_rows(problem: Problem) -> float:
    """Return the mean rows of a tile, the least of all run forms and of query and key tiles."""
    forms = (form for form in problem.forms if isinstance(form, Runs))
    return min((_mean_rows(table.below(problem.seq)) for form in forms for table in (form.queries, form.keys)), default=LOW_ROWS)


def _mean_rows(table: RunTable) -> float:
    """Return the mean rows of a tile, without the shortest one, which the end of the sequence may have cut."""
    seeing = table.joined()
    rows = np.diff(seeing.stop, prepend=0)[seeing.runs > 0]
    tiles = int((-(-rows // LOW_ROWS)).sum())
    if tiles <= FEW_TILES:
        return LOW_ROWS
    shortest = ((rows - 1) % LOW_ROWS + 1).min()
    return float((rows.sum() - shortest) / (tiles - 1))
