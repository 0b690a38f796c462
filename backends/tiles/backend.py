"""What the GPU backends share: which kernels a forward and a backward launch, on which tensors, in which order.

    forward     the kernel "forward"                            query, key, value           -> out, lse
    backward    the kernel "dots"                               dout, out                   -> delta = rowsum(dout * out)
                the kernel "dquery", over query tiles           query, key, value, dout     -> dquery
                the kernel "dkeyvalue", over key tiles          query, key, value, dout     -> dkey, dvalue

No gradient is summed by atomics, so equal inputs give equal bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dilkit.backend import Backend, Refusal
from dilkit.backends.tiles.schedule import schedule_refusals
from dilkit.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

ROLES = ("forward", "dots", "dquery", "dkeyvalue")
"""Attention itself; `rowsum(dout * out)`; the gradient of queries; the gradients of keys and values."""

Tensors = Mapping[str, "Tensor | None"]
"""The tensors of one launch by name: query, key, value, out, dout, dquery, dkey, dvalue, lse, delta, mask."""


class TiledBackend(Backend):
    """A backend whose kernels compute one tile of a schedule in each thread block."""

    reproducible = True

    @abstractmethod
    def launch_role(self, role: str, tensors: Tensors, problem: Problem) -> None:
        """Launch the kernel of `role`, one of `ROLES`, over all tiles of `problem`."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        return (*super().refusals(problem), *schedule_refusals(problem))

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, problem: Problem, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        import torch

        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty((problem.batch, problem.heads, problem.seq), dtype=torch.float32, device=query.device)
        tensors = dict(query=query, key=key, value=value, out=out, lse=lse, mask=key_padding_mask)
        self.launch_role("forward", tensors, problem)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        lse = lse.contiguous()
        delta = torch.empty_like(lse)
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value))
        tensors = dict(query=query, key=key, value=value, out=out, dout=dout, lse=lse, delta=delta, mask=key_padding_mask)
        self.launch_role("dots", tensors, problem)
        self.launch_role("dquery", {**tensors, "dquery": dq}, problem)
        self.launch_role("dkeyvalue", {**tensors, "dkey": dk, "dvalue": dv}, problem)
        return dq, dk, dv
