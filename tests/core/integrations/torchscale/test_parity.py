"""dilkit computes what the classes compute that it is installed into, with their weights, and over ranks (`seq_parallel`)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import launch
from helpers.torchscale_peer import PEERS, PUBLISHED, by_the_oracle, loaded
from torch import Tensor, nn

from dilkit import Alibi, DilatedAttention, MultiheadDilatedAttention, Pattern, order
from dilkit.comm import Comm
from dilkit.integrations.torchscale import install
from dilkit.integrations.torchscale.proving import layer

EVERY_PEER = pytest.mark.parametrize("peer", PEERS, indirect=True)
PATTERNS: dict[str, tuple[list[int], list[int], int, int]] = {
    "whole segments": ([8, 16, 32], [1, 2, 4], 4, 64),
    "short last segments": ([8, 16, 32], [1, 2, 4], 4, 43),
    "a last segment of one row": ([8, 24, 64], [1, 2, 4], 4, 41),
    "shorter than every segment": ([16, 32], [2, 4], 4, 13),
    "one row": ([8, 16], [1, 2], 4, 1),
    "heads no multiple of the ratio": ([9, 18, 36], [1, 3, 6], 5, 50),
    "fewer heads than the ratio": ([16, 32], [4, 8], 3, 37),
    "more lengths than ratios": ([10, 20, 30], [1, 2], 4, 33),
    "not a row of the last branch twice": ([64], [4], 4, 50),
    "ratios that do not divide a long segment": ([8, 50], [2, 3], 4, 41),
}
CASES = pytest.mark.parametrize("case", PATTERNS.values(), ids=PATTERNS)


def both(made: Any, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    own, none = made(*inputs, **options)
    with install():
        found, nothing = made(*inputs, **options)
    assert none is nothing is None
    return own, found


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.detach().double() - b.detach().double()).abs().max())


@EVERY_PEER
@CASES
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_fp64(peer: type[Any], case: tuple[list[int], list[int], int, int], is_causal: bool) -> None:
    lengths, ratios, heads, rows = case
    inputs = torch.randn(3, 2, rows, 8 * heads, dtype=torch.float64).unbind()
    own, found = both(layer(peer, lengths, ratios, heads), *inputs, is_causal=is_causal)
    assert difference(own, found) <= 1e-12


def test_more_ratios_than_lengths(peer: type[Any]) -> None:
    """Cut as `zip` cuts them. Forks of torchscale have such configurations; torchscale's own class fails in an assertion."""
    x = torch.randn(2, 33, 32, dtype=torch.float64)
    assert difference(*both(layer(peer, [10, 20], [1, 2, 3, 4]), x, x, x)) <= 1e-12


@EVERY_PEER
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(peer: type[Any], dtype: torch.dtype) -> None:
    """Against fp64: at most twice the error of the class itself."""
    x = torch.randn(2, 43, 32, dtype=torch.float64)
    made = layer(peer, [8, 16, 32], [1, 2, 4])
    exact = made(x, x, x)[0]
    scale = float(exact.detach().abs().max())
    low = x.to(dtype)
    own, found = both(made.to(dtype), low, low, low)
    assert found.dtype == dtype
    assert difference(found, exact) <= 2 * difference(own, exact) + torch.finfo(dtype).eps * scale


@EVERY_PEER
def test_exact_tails_differ_where_there_is_padding_alone(peer: type[Any]) -> None:
    made = layer(peer, [8, 16, 32], [1, 2, 4])
    for rows, least, most in ((64, 0.0, 1e-12), (43, 1e-2, 10.0)):
        x = torch.randn(1, rows, 32, dtype=torch.float64)
        own = made(x, x, x)[0]
        with install(tail="exact"):
            assert least <= difference(made(x, x, x)[0], own) <= most


def gradients(made: Any, x: Tensor, call: Any) -> dict[str, Tensor]:
    wanted = {"x": x, **{name: p for name, p in made.named_parameters() if name != "k_proj.bias"}}  # whose gradient is 0
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    return dict(zip(wanted, torch.autograd.grad((call(x) * weights).sum(), [*wanted.values()]), strict=True))


def off(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """How far each gradient is from the exact one, in parts of its length."""
    return {name: float((found[name] - e).norm() / e.norm()) for name, e in exact.items()}


@EVERY_PEER
@pytest.mark.parametrize("rows", [64, 43])
def test_gradients_are_those_of_one_softmax(peer: type[Any], rows: int) -> None:
    """The class's own leave out that the weights of its branches depend on queries and keys: wrong by a fifth and more."""
    made = layer(peer, [8, 16, 32], [1, 2, 4])
    x = torch.randn(2, rows, 32, dtype=torch.float64, requires_grad=True)
    exact = gradients(made, x, lambda x: by_the_oracle(made, x))
    own = gradients(made, x, lambda x: made(x, x, x)[0])
    with install():
        found = gradients(made, x, lambda x: made(x, x, x)[0])
    assert {name: wrong for name, wrong in off(found, exact).items() if wrong > 1e-12} == {}
    of_torchscale = off(own, exact)
    assert min(of_torchscale[name] for name in ("q_proj.weight", "k_proj.weight")) > 0.2
    assert of_torchscale["x"] > 0.1
    assert max(of_torchscale[name] for name in ("v_proj.weight", "out_proj.weight")) < 1e-12


@pytest.fixture
def warned() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@EVERY_PEER
def test_where_torchscale_is_wrong_dilkit_is_not_and_says_so_once(peer: type[Any], warned: list[Any], request: Any) -> None:
    """A ratio that does not divide its length, and more rows than that: torchscale puts results into wrong rows."""
    made = layer(peer, [8, 10], [1, 4])
    x = torch.randn(1, 43, 32, dtype=torch.float64)
    own, found = both(made, x, x, x)
    assert difference(found, by_the_oracle(made, x)) <= 1e-12
    is_right = request.node.callspec.params["peer"] == "published"
    assert (difference(own, found) <= 1e-12) is is_right
    with install():
        for _ in range(2):
            made(x[:, :10], x[:, :10], x[:, :10])
        assert len(warned) == 1
        for _ in range(2):
            made(x, x, x)
    assert [str(w.message).partition(":")[0] for w in warned] == ["segment_length=10 is no multiple of dilated_ratio=4"] * 2


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


def test_copies_have_the_norm_and_dtype_but_share_no_memory(peer: type[Any]) -> None:
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
    words = r"module has xpos_rel_pos \(xPos\), attention_dropout .*, q_proj \(a Identity.*multiway"
    with pytest.raises(ValueError, match=words):
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
    ours.out_proj = nn.Sequential(ours.out_proj)
    with pytest.raises(ValueError, match="this module has an adapter or quantized weights in out_proj: torchscale"):
        ours.to_torchscale_state_dict()
    made.out_proj.register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match=r"module has out_proj \(a Linear: .*hooks to be removed"):
        MultiheadDilatedAttention.from_torchscale(made)


def patched(comm: Comm, peer: str) -> None:
    with loaded(peer) as kind:
        if peer == "published":
            utils = sys.modules[PUBLISHED.replace("dilated_attention", "utils")] = ModuleType("utils")
            utils.get_data_parallel_group = lambda: dist.group.WORLD
        torch.manual_seed(0)
        made = layer(kind, [8, 16, 64], [1, 2, 4], seq_parallel=True)
        whole, mask = torch.randn(2, 54, 32, dtype=torch.float64, requires_grad=True), torch.zeros(2, 54, dtype=torch.bool)
        mask[0, 5:9] = True  # of one rank alone
        mine = whole.detach().chunk(comm.size, 1)[comm.rank].requires_grad_()
        ways = ("zeros", False, None), ("exact", False, None), ("zeros", True, None), ("zeros", False, mask)
        for tail, is_causal, hidden in ways:
            options = dict(is_causal=is_causal, key_padding_mask=hidden)
            made.args.seq_parallel = False
            with install(tail=tail):
                expected, _ = made(whole, whole, whole, **options)
            made.args.seq_parallel = True
            part = None if hidden is None else mask.chunk(comm.size, 1)[comm.rank]
            with install(tail=tail):
                found, _ = made(mine, mine, mine, **{**options, "key_padding_mask": part})
            torch.testing.assert_close(found, expected.chunk(comm.size, 1)[comm.rank], rtol=0, atol=1e-12)
            (gradient,) = torch.autograd.grad(expected.square().sum(), whole)
            (part_of_it,) = torch.autograd.grad(found.square().sum(), mine)
            torch.testing.assert_close(part_of_it, gradient.chunk(comm.size, 1)[comm.rank], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_two_ranks_compute_the_whole(peer: str) -> None:
    launch.run("gloo", 2, patched, peer)
