"""`python -m dilkit.integrations.torchscale.proving MODULE:CLASS`: compare a class of torchscale's with dilkit, on the CPU.

Prints the JSON of `check_class`; fails where the class does.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dilkit import environment
from dilkit.integrations.torchscale.install import install


def main(name: str) -> int:
    module, _, kind_name = name.partition(":")
    kind = getattr(importlib.import_module(module), kind_name)
    spare_flash_attention(module)
    torch.manual_seed(1)
    attention, x, wrong = layer(kind, [8, 16], [1, 2]), torch.randn(2, 43, 32, dtype=torch.float64), []
    with environment.without_proofs(), torch.no_grad(), install():
        for call, is_causal in (("a forward pass", False), ("a causal one", True)):
            expected, out = (
                forward(attention, x, x, x, is_causal=is_causal)[0] for forward in (inspect.unwrap(kind.forward), kind.forward)
            )
            if not torch.allclose(out, expected, rtol=0, atol=1e-10):
                wrong.append(f"{call} is off by {float((out - expected).abs().max()):.2g}")
    print(json.dumps(dict(wrong="; ".join(wrong), doubt="", right=[] if wrong else [name])))
    return 0


def spare_flash_attention(module: str) -> None:
    """Let torchscale's own code, of which `module` is a part, compute where there is no flash-attn."""
    ordinary: Any = sys.modules.get(f"{module.rpartition('.')[0]}.multihead_attention")
    if ordinary is not None:
        ordinary.flash_attn_func = lambda q, k, v, dropout, bias, scale, is_causal: plain_attention(q, k, v, is_causal)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """Compute out and lse, fp32 or fp64, of `(batch, rows, heads, head_dim)`; under causality row i sees keys up to the i-th."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if is_causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), -math.inf)
    lse = scores.to(torch.promote_types(q.dtype, torch.float32)).logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v), lse


def layer(kind: type[Any], lengths: list[int], ratios: list[int], heads: int = 4, dropout: float = 0.0, **others: Any) -> Any:
    module = kind(arguments(lengths, ratios, **others), 8 * heads, heads, dropout, self_attention=True, subln=True).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def arguments(lengths: list[int], ratios: list[int], **others: Any) -> SimpleNamespace:
    defaults = dict(flash_attention=True, multiway=False, xpos_rel_pos=False, xpos_scale_base=512, layernorm_eps=1e-5)
    return SimpleNamespace(segment_length=lengths, dilated_ratio=ratios, **{**defaults, "seq_parallel": False, **others})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
