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

    from dilkit.op.dropout import Dropout

ROLES = ("forward", "dots", "dquery", "dkeyvalue")
"""Attention itself; `rowsum(dout * out)`; the gradient of queries; the gradients of keys and values."""

Tensors = Mapping[str, "Tensor | None"]
"""The tensors of one launch by name: query, key, value, out, dout, dquery, dkey, dvalue, lse, delta, mask, and where packed
sequences begin: starts."""


class TiledBackend(Backend):
    """A backend whose kernels compute one tile of a schedule in each thread block."""

    reproducible = True

    @abstractmethod
    def launch_role(self, role: str, tensors: Tensors, problem: Problem, dropout: Dropout | None = None) -> None:
        """Launch the kernel of `role`, one of `ROLES`, over all tiles of `problem`. `dropout` is given if `limits.dropout`."""

    def refusals(self, problem: Problem) -> tuple[Refusal, ...]:
        return (*super().refusals(problem), *schedule_refusals(problem))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        key_padding_mask: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._forward(dict(query=query, key=key, value=value, mask=key_padding_mask), problem, dropout)

    def forward_varlen(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        problem: Problem,
        cu_seqlens: Tensor,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self._forward(dict(query=query, key=key, value=value, starts=cu_seqlens), problem, dropout)

    def _forward(self, tensors: Tensors, problem: Problem, dropout: Dropout | None) -> tuple[Tensor, Tensor]:
        import torch

        query = tensors["query"]
        assert query is not None
        batch, seq, heads, _ = query.shape
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty((batch, heads, seq), dtype=torch.float32, device=query.device)
        self.launch_role("forward", {**tensors, "out": out, "lse": lse}, problem, dropout)
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
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(dout=dout, query=query, key=key, value=value, out=out, mask=key_padding_mask)
        return self._backward(given, lse, problem, dropout)

    def backward_varlen(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        problem: Problem,
        cu_seqlens: Tensor,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(dout=dout, query=query, key=key, value=value, out=out, starts=cu_seqlens)
        return self._backward(given, lse, problem, dropout)

    def _backward(self, given: Tensors, lse: Tensor, problem: Problem, dropout: Dropout | None) -> tuple[Tensor, Tensor, Tensor]:
        import torch

        lse = lse.contiguous()
        tensors = {**given, "lse": lse, "delta": torch.empty_like(lse)}
        own = [x for x in (given["query"], given["key"], given["value"]) if x is not None]
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in own)
        self.launch_role("dots", tensors, problem)
        self.launch_role("dquery", {**tensors, "dquery": dq}, problem, dropout)
        self.launch_role("dkeyvalue", {**tensors, "dkey": dk, "dvalue": dv}, problem, dropout)
        return dq, dk, dv
