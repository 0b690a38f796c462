"""The torch modules, against the same modules around the oracle."""

from typing import Any

import torch
from fuzz.calls import Call, tensors_of
from fuzz.checks import require
from torch import Tensor, nn

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern
from dilkit.oracle import oracle_attention


class _Oracle(nn.Module):
    def __init__(self, pattern: Pattern):
        super().__init__()
        self.pattern = pattern

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, key_padding_mask: Tensor | None) -> Tensor:
        return oracle_attention(q, k, v, self.pattern, is_causal=is_causal, key_padding_mask=key_padding_mask)[0]


def module(world, call: dict[str, Any], rotary: bool, layer_norm: bool, cross: bool):
    one = Call.from_data(call)
    case, tensors = one.case, tensors_of(one)
    width = case.heads * case.head_dim
    options = dict(num_kv_heads=case.kv_heads, rotary=rotary and case.head_dim % 2 == 0, layer_norm=layer_norm)
    inner = DilatedAttention(case.pattern, backend=one.backend), _Oracle(case.pattern)
    layers = [MultiheadDilatedAttention(width, case.heads, x, dtype=torch.float64, **options) for x in inner]
    layers[1].load_state_dict(layers[0].state_dict())
    rows = tensors.query.detach().double().flatten(2)
    found = []
    for layer in layers:
        x = rows.clone().requires_grad_()
        keys = x.flip(1) if cross else x
        out, _ = layer(x, keys, keys, is_causal=case.is_causal, key_padding_mask=tensors.mask)
        grads = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], allow_unused=True, materialize_grads=True)
        found.append([out, *grads])
    same = all(torch.allclose(x, y, rtol=1e-7, atol=1e-9 * (1 + y.abs().max().item())) for x, y in zip(*found, strict=True))
    require(same, "the module differs from one around the oracle")
