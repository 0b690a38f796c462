"""Weights of torchscale's class in `MultiheadDilatedAttention`, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.torchscale_peer import PEERS
from torch import nn

from dilkit import Alibi, DilatedAttention, MultiheadDilatedAttention, Pattern, order
from dilkit.integrations.torchscale import install
from dilkit.integrations.torchscale.proving import layer

EVERY_PEER = pytest.mark.parametrize("peer", PEERS, indirect=True)
BLOCK = DilatedAttention(Pattern([8, 16], [1, 2], offset="block"))


@EVERY_PEER
@pytest.mark.parametrize("tail", ["zeros", "exact"])
def test_there_and_back(peer: type[Any], tail: str) -> None:
    made, x = layer(peer, [8, 16, 32], [1, 2, 4]).eval(), torch.randn(2, 43, 32, dtype=torch.float64)
    ours = MultiheadDilatedAttention.from_torchscale(made, tail=tail)
    with install(tail=tail):
        expected, _ = made(x, x, x)
    torch.testing.assert_close(ours(x)[0], expected, rtol=0, atol=1e-12)
    assert not ours.training
    again = layer(peer, [8, 16, 32], [1, 2, 4])
    again.load_state_dict(ours.to_torchscale_state_dict())
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), made.parameters(), strict=True))


def test_copies_share_no_memory_and_have_the_norm_and_dtype_of_the_module(peer: type[Any]) -> None:
    made = layer(peer, [8], [1], layernorm_eps=0.5)
    ours = MultiheadDilatedAttention.from_torchscale(made)
    assert ours.inner_norm.eps == 0.5
    state = ours.to_torchscale_state_dict()
    before = {name: value.clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in (*ours.parameters(), *made.parameters()):
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    made = made.bfloat16()
    made.inner_attn_ln = None
    ours = MultiheadDilatedAttention.from_torchscale(made)
    assert ours.inner_norm is None
    assert ours.out_proj.weight.dtype is torch.bfloat16
    made.load_state_dict(ours.to_torchscale_state_dict())


def test_another_module_is_refused() -> None:
    with pytest.raises(TypeError, match="module is a Linear without args, q_proj, k_proj, v_proj, out_proj, inner_attn_ln, xpos"):
        MultiheadDilatedAttention.from_torchscale(nn.Linear(2, 2))


def test_what_the_module_cannot_hold_is_refused(peer: type[Any]) -> None:
    made = layer(peer, [8], [1], dropout=0.5)
    made.xpos, made.q_proj = nn.Identity(), nn.Identity()
    with pytest.raises(
        ValueError, match=r"module has xpos_rel_pos \(xPos\), attention_dropout .*, q_proj \(a Identity.*multiway"
    ):
        MultiheadDilatedAttention.from_torchscale(made)
    with pytest.raises(ValueError, match=r"attention_dropout .*module\.dropout = 0"):  # train() would have none
        MultiheadDilatedAttention.from_torchscale(layer(peer, [8], [1], dropout=0.5).eval())
    with pytest.raises(ValueError, match=r"seq_parallel \(rows over ranks"):
        MultiheadDilatedAttention.from_torchscale(layer(peer, [8], [1], seq_parallel=True))


@pytest.mark.parametrize(
    ("attention", "options", "text"),
    [
        (BLOCK, dict(num_kv_heads=2), "num_kv_heads=2, and num_heads=4"),
        (BLOCK, dict(kdim=8), "kdim=8 and vdim=32"),
        (BLOCK, dict(bias=False), "no biases"),
        (BLOCK, dict(rotary=True), "rotary positions"),
        (DilatedAttention(Pattern([8, 16], [1, 2])), {}, r"the pattern Pattern\(\[8, 16\], \[1, 2\]\), while"),
        (nn.Identity(), {}, "the pattern None"),
        (DilatedAttention(Pattern([8], [1], "block", "once")), {}, "overlap='once'"),
        (BLOCK, dict(sink=True), "sinks"),
        (DilatedAttention(BLOCK.pattern, order=order((4, 4))), {}, "token orders"),
        (DilatedAttention(BLOCK.pattern, scale=0.5), {}, "the scale 0.5"),
        (DilatedAttention(BLOCK.pattern, softcap=3.0), {}, "the softcap 3.0"),
        (DilatedAttention(BLOCK.pattern, bias=Alibi(torch.ones(4))), {}, "a bias of the scores"),
    ],
)
def test_what_torchscale_cannot_hold_is_refused(attention: nn.Module, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"this module has {text}.*: torchscale's DilatedAttention cannot hold that"):
        MultiheadDilatedAttention(32, 4, attention, **options).to_torchscale_state_dict()


def test_adapters_and_hooks_are_refused(peer: type[Any]) -> None:
    made = layer(peer, [8], [1])
    ours = MultiheadDilatedAttention.from_torchscale(made)
    ours.out_proj = nn.Sequential(ours.out_proj)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="this module has an adapter or quantized weights in out_proj: torchscale"):
        ours.to_torchscale_state_dict()
    made.out_proj.register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match=r"module has out_proj \(a Linear: .*hooks to be removed"):
        MultiheadDilatedAttention.from_torchscale(made)
