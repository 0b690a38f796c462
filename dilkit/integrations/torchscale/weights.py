"""Weights of torchscale's `DilatedAttention` in `dilkit.MultiheadDilatedAttention`, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dilkit.integrations.torchscale.install import pattern_of
from dilkit.nn.attention import DilatedAttention
from dilkit.nn.checks import is_plain

if TYPE_CHECKING:
    from dilkit.nn import MultiheadDilatedAttention

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def module_of(module: Any, tail: str, kind: type[MultiheadDilatedAttention]) -> MultiheadDilatedAttention:
    _check_module(module)
    norm, weight = module.inner_attn_ln, module.out_proj.weight
    ours = kind(
        module.embed_dim,
        module.num_heads,
        DilatedAttention(pattern_of(module, tail)),
        layer_norm=norm is not None,
        layer_norm_eps=1e-5 if norm is None else norm.eps,
        device=weight.device,
        dtype=weight.dtype,
    )
    ours.load_state_dict(_renamed(module.state_dict()))
    return ours.train(module.training)


def _check_module(module: Any) -> None:
    missing = [name for name in ("args", *PROJECTIONS, "out_proj", "inner_attn_ln", "xpos") if not hasattr(module, name)]
    if missing:
        raise TypeError(
            f"module is a {type(module).__name__} without {', '.join(missing)}; torchscale's DilatedAttention is needed"
        )
    reasons = {
        "xpos_rel_pos": ("xPos", module.xpos is not None),
        "attention_dropout": ("dropout of each branch by itself; module.dropout = 0 for none", module.dropout > 0),
        "seq_parallel": (
            "rows over ranks; module.args.seq_parallel = False for one",
            getattr(module.args, "seq_parallel", False),
        ),
    }
    layers: dict[str, tuple[Any, Any]] = {name: (getattr(module, name), nn.Linear) for name in (*PROJECTIONS, "out_proj")}
    if (norm := module.inner_attn_ln) is not None:  # apex has another class of it
        layers["inner_attn_ln"] = norm, type(norm) if hasattr(norm, "eps") else nn.LayerNorm
    for name, (layer, kind) in layers.items():
        what = f"a {type(layer).__name__}: two sets of weights (multiway), an adapter to be merged, or hooks to be removed"
        reasons[name] = what, not is_plain(layer, kind)
    if wrong := [f"{name} ({what})" for name, (what, given) in reasons.items() if given]:
        raise ValueError(
            f"module has {', '.join(wrong)}, which MultiheadDilatedAttention cannot hold; "
            "dilkit.integrations.torchscale.install() runs modules as they are, without dropout"
        )


def _renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {f"in_proj_{part}": torch.cat([state[f"{name}.{part}"] for name in PROJECTIONS]) for part in ("weight", "bias")}
    for name, value in state.items():
        if name.startswith(("out_proj.", "inner_attn_ln.")):
            renamed[name.replace("inner_attn_ln", "inner_norm")] = value
    return renamed


def torchscale_state_dict(module: MultiheadDilatedAttention) -> dict[str, Tensor]:
    state = module.state_dict()
    _check_attention(module, state)
    renamed = {}
    for part in ("weight", "bias"):
        for name, value in zip(PROJECTIONS, state[f"in_proj_{part}"].chunk(3), strict=True):
            renamed[f"{name}.{part}"] = value.clone()
    for name, value in state.items():
        if name.startswith(("out_proj.", "inner_norm.")):
            renamed[name.replace("inner_norm", "inner_attn_ln")] = value.clone()
    return renamed


def _check_attention(module: MultiheadDilatedAttention, state: dict[str, Tensor]) -> None:
    inner: DilatedAttention | Any = module.attention
    pattern = getattr(inner, "pattern", None)
    layers = {name: layer for name in ("out_proj", "inner_norm") if (layer := getattr(module, name)) is not None}
    changed = [name for name in layers if f"{name}.weight" not in state]
    reasons = {
        f"num_kv_heads={module.num_kv_heads}, and num_heads={module.num_heads}": module.num_kv_heads != module.num_heads,
        "its heads over ranks": module._rank_heads is not None,
        f"kdim={module.kdim} and vdim={module.vdim}": (module.kdim, module.vdim) != (module.embed_dim,) * 2,
        "no biases": module.in_proj_bias is None,
        f"an adapter or quantized weights in {' and '.join(changed)}": len(changed) > 0,
        "rotary positions": module.rotary is not None,
        f"the pattern {pattern}, while torchscale's offsets are 'block', of whole models, and its branches serve all heads": (
            pattern is None or pattern.offset != "block" or pattern.heads is not None or pattern.head_shard is not None
        ),
        "overlap='once'": getattr(pattern, "overlap", None) == "once",
        "sinks": module.sinks is not None,
        "token orders": getattr(inner, "orders", None) is not None,
        "a bias of the scores": getattr(inner, "bias", None) is not None,
        f"the softcap {getattr(inner, 'softcap', None)}": getattr(inner, "softcap", None) is not None,
        f"the scale {getattr(inner, 'scale', None)}": getattr(inner, "scale", None) is not None,
    }
    if wrong := [what for what, given in reasons.items() if given]:
        raise ValueError(f"this module has {'; '.join(wrong)}: torchscale's DilatedAttention cannot hold that")
