"""The arguments of one rank's call of `ring_dilated_attention`: what all ranks must agree on, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, not_distributed, one_of, probability, real
from dilkit.comm.passes.rank_bias import bias_fingerprint, check_rank_bias
from dilkit.comm.plan.exchange_plan import KEEPS, SCHEDULES
from dilkit.comm.reorder import fingerprint
from dilkit.inputs import Inputs
from dilkit.op import boundary
from dilkit.op.arguments import check_inputs
from dilkit.op.autocast import AUTOCAST_KEYS
from dilkit.op.call_options import CallOptions
from dilkit.op.dropout import draw_seed
from dilkit.op.scores import check_softcap
from dilkit.orders.heads import Orders, as_orders
from dilkit.orders.token_order import TokenOrder
from dilkit.pattern import Pattern
from dilkit.selector import requested_backends

STEP = "arguments of ring_dilated_attention"
MAY_DIFFER = ("rows", "seed", "gradients")


@dataclass(frozen=True)
class Arguments:
    """The arguments of one rank's call."""

    inputs: Inputs
    """The tensors of this rank's rows, as they were given, and the sink; the bias is apart, as it is not lowered yet."""
    pattern: Pattern
    is_causal: bool
    scale: float | None
    dropout_p: float
    backend: str | Sequence[str] | None
    schedule: str
    fuse_branches: bool
    order: TokenOrder | Sequence[TokenOrder] | None
    return_lse: bool
    recorded: bool | None = None
    """True if a backward pass may follow; None: ask the tensors. Within an operator they require no gradients."""
    seed: Tensor | None = None
    """The seed that was drawn for dropout, int64 `()`; None: `facts` draws one."""
    bias: Bias | None = None
    softcap: float | None = None
    keep: str = "rows"
    wanted: str | None = None
    """Inputs that need gradients, in the form of `gradients`; None: those whose tensors require them."""

    @property
    def orders(self) -> Orders:
        return () if self.order is None else as_orders("order", self.order)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in: under autocast its dtype, as in `dilated_attention`, but fp64 is left alone."""
        query, device = self.inputs.query, self.inputs.query.device.type
        if device not in AUTOCAST_KEYS or not torch.is_autocast_enabled(device):
            return query.dtype
        double = any(x.dtype == torch.float64 for x in self.inputs[:3])
        return torch.float64 if double else torch.get_autocast_dtype(device)

    @cached_property
    def options(self) -> CallOptions:
        """The options of the call but for its bias, with the backends asked for. Raises TypeError or ValueError."""
        scale = self.inputs.query.shape[-1] ** -0.5 if self.scale is None else real("scale", self.scale)
        backends, dropout_p = requested_backends(self.backend), probability("dropout_p", self.dropout_p)
        softcap = 0.0 if self.softcap is None else check_softcap(self.softcap)
        return CallOptions(self.pattern, self.is_causal, self.requires_grad, backends, dropout_p, softcap, None, float(scale))

    @property
    def requires_grad(self) -> bool:
        """True if a backward pass may follow."""
        if self.recorded is not None:
            return self.recorded
        sink, bias = self.inputs.sink, self.bias
        others = (sink is not None and sink.requires_grad) or (bias is not None and bias.weights.requires_grad)
        return self.rows_require_grad or (torch.is_grad_enabled() and others)

    @property
    def rows_require_grad(self) -> bool:
        """True if gradients of rows may be asked for, and not of the sink or a bias alone."""
        query, key, value, *_ = self.inputs
        return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)

    @property
    def gradients(self) -> str:
        """The inputs of which gradients are asked for: "qkv" or a part of it."""
        if self.wanted is not None:
            return self.wanted
        rows = zip("qkv", self.inputs[:3], strict=True)
        return "".join([role for role, x in rows if x.requires_grad]) if torch.is_grad_enabled() else ""

    def check(self) -> None:
        query, key, value, mask, *_ = self.inputs
        tensors = dict(query=query, key=key, value=value, key_padding_mask=mask, sink=self.inputs.sink)
        for name, x in tensors.items():
            not_distributed(name, x)
        check_inputs(self.inputs, self.pattern)
        boundary.check_memory((*boundary.INPUTS, boundary.MASK), (query, key, value, *(() if mask is None else (mask,))))
        boolean("is_causal", self.is_causal)
        if self.bias is not None:
            check_rank_bias(self.bias, query, self.pattern, key.shape[2])
        boolean("fuse_branches", self.fuse_branches)
        boolean("return_lse", self.return_lse)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("keep", self.keep, KEEPS)
        if query.shape[1] == 0:
            raise ValueError("query has no rows on this rank; every rank holds at least one (use fewer ranks, or other cuts)")

    def facts(self) -> dict[str, Any]:
        """Return what the ranks must agree on, and what may differ (`MAY_DIFFER`). Raises what `check` raises."""
        self.check()
        query, options = self.inputs.query, self.options
        batch, rows, heads, head_dim = query.shape
        return dict(
            rows=rows,
            gradients=self.gradients,
            seed=int(draw_seed() if self.seed is None else self.seed) if self.dropout_p else 0,
            batch=batch,
            heads=heads,
            kv_heads=self.inputs.key.shape[2],
            head_dim=head_dim,
            dtype=str(self.dtype),
            device=query.device.type,
            pattern=self.pattern.to_json(),
            is_causal=self.is_causal,
            key_padding_mask=self.inputs.key_padding_mask is not None,
            sink=self.inputs.sink is not None,
            requires_grad=self.requires_grad,
            rows_require_grad=self.rows_require_grad and bool(self.orders),  # they then travel back to where they came from
            scale=options.scale,
            dropout_p=options.dropout_p,
            bias="" if self.bias is None else bias_fingerprint(self.bias),
            softcap=options.softcap,
            schedule=self.schedule,
            fuse_branches=self.fuse_branches,
            keep=self.keep,
            order="; ".join(map(fingerprint, self.orders)),
            return_lse=self.return_lse,
        )


def asked_on_any_rank(every_rank: Sequence[dict[str, Any]]) -> str:
    """Return the inputs for which any rank asks for gradients, given the facts of all."""
    roles = "".join([facts["gradients"] for facts in every_rank])
    return "".join([role for role in "qkv" if role in roles])
