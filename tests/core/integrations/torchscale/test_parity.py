"""Classes of torchscale with dilkit installed, against themselves."""

import sys
import warnings
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from helpers import launch
from helpers.torchscale_peer import CHECKOUTS, PEERS, PUBLISHED, by_the_oracle, loaded
from torch import nn

from dilkit import Alibi, DilatedAttention, MultiheadDilatedAttention, Pattern, order
from dilkit.integrations.torchscale import install
from dilkit.integrations.torchscale.install import _hides
from dilkit.integrations.torchscale.proving import layer

EVERY_PEER = pytest.mark.parametrize("peer", PEERS, indirect=True)
PATTERNS = {
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


def both(made, *inputs, **options):
    own, none = made(*inputs, **options)
    with install():
        found, nothing = made(*inputs, **options)
    assert none is nothing is None
    return own, found


def difference(a, b):
    assert a.shape == b.shape
    return float((a.detach().double() - b.detach().double()).abs().max())


@EVERY_PEER
@CASES
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_fp64(peer, case, is_causal):
    lengths, ratios, heads, rows = case
    inputs = torch.randn(3, 2, rows, 8 * heads, dtype=torch.float64).unbind()
    own, found = both(layer(peer, lengths, ratios, heads), *inputs, is_causal=is_causal)
    assert difference(own, found) <= 1e-12


def test_more_ratios_than_lengths(peer):
    """They are cut as by `zip`. Forks have such configurations, which fail an assertion in torchscale."""
    x = torch.randn(2, 33, 32, dtype=torch.float64)
    assert difference(*both(layer(peer, [10, 20], [1, 2, 3, 4]), x, x, x)) <= 1e-12


@EVERY_PEER
def test_exact_tails_differ_where_there_is_padding_alone(peer):
    made = layer(peer, [8, 16, 32], [1, 2, 4])
    for rows, least, most in ((64, 0.0, 1e-12), (43, 1e-2, 10.0)):
        x = torch.randn(1, rows, 32, dtype=torch.float64)
        own = made(x, x, x)[0]
        with install(tail="exact"):
            assert least <= difference(made(x, x, x)[0], own) <= most


def gradients(made, x, call):
    wanted = {"x": x, **{name: p for name, p in made.named_parameters() if name != "k_proj.bias"}}  # whose gradient is 0
    weights = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)
    return dict(zip(wanted, torch.autograd.grad((call(x) * weights).sum(), [*wanted.values()]), strict=True))


def off(found, exact):
    return {name: float((found[name] - e).norm() / e.norm()) for name, e in exact.items()}


@EVERY_PEER
@pytest.mark.parametrize("rows", [64, 43])
def test_gradients_are_those_of_one_softmax(peer, rows):
    """The class ignores that the weights of branches depend on queries and keys: wrong by a fifth and more."""
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
def warned():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@EVERY_PEER
def test_where_torchscale_is_wrong_dilkit_is_not_and_says_so_once(peer, warned, request):
    """With a ratio that does not divide its length, torchscale puts results into wrong rows."""
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
def test_there_and_back(peer, tail):
    made, x = layer(peer, [8, 16, 32], [1, 2, 4]).eval(), torch.randn(2, 43, 32, dtype=torch.float64)
    ours = MultiheadDilatedAttention.from_torchscale(made, tail=tail)
    with install(tail=tail):
        expected, _ = made(x, x, x)
    torch.testing.assert_close(ours(x)[0], expected, rtol=0, atol=1e-12)
    assert not ours.training
    again = layer(peer, [8, 16, 32], [1, 2, 4])
    again.load_state_dict(ours.to_torchscale_state_dict())
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), made.parameters(), strict=True))


def test_copies_have_the_norm_and_dtype_but_share_no_memory(peer):
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


def test_another_module_is_refused():
    with pytest.raises(TypeError, match="module is a Linear without args, q_proj, k_proj, v_proj, out_proj, inner_attn_ln, xpos"):
        MultiheadDilatedAttention.from_torchscale(nn.Linear(2, 2))


def test_what_the_module_cannot_hold_is_refused(peer):
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
def test_what_torchscale_cannot_hold_is_refused(attention, options, text):
    with pytest.raises(ValueError, match=f"this module has {text}.*: torchscale's DilatedAttention cannot hold that"):
        MultiheadDilatedAttention(32, 4, attention, **options).to_torchscale_state_dict()


def test_adapters_and_hooks_are_refused(peer):
    made = layer(peer, [8], [1])
    ours = MultiheadDilatedAttention.from_torchscale(made)
    ours.out_proj = nn.Sequential(ours.out_proj)
    with pytest.raises(ValueError, match="this module has an adapter or quantized weights in out_proj: torchscale"):
        ours.to_torchscale_state_dict()
    made.out_proj.register_forward_hook(lambda *call: None)
    with pytest.raises(ValueError, match=r"module has out_proj \(a Linear: .*hooks to be removed"):
        MultiheadDilatedAttention.from_torchscale(made)


def patched(comm, peer):
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
def test_two_ranks_compute_the_whole(peer):
    launch.run("gloo", 2, patched, peer)


LENGTHS, RATIOS = [8, 16, 32], [1, 2, 4]


class Turn(nn.Module):
    """Stands in for xPos: what it does to a row depends on the row's position alone."""

    def forward(self, x, offset=0, downscale=False):
        assert x.dim() == 3
        angle = torch.arange(offset, offset + x.shape[1], dtype=x.dtype)[:, None] / 3
        first, second = x.chunk(2, -1)
        turned = torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)
        return turned / 2 if downscale else turned


def rows(count, batch=2):
    return torch.randn(batch, count, 32, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_masks_are_applied_or_ignored(peer, dtype):
    made, x, mask = layer(peer, LENGTHS, RATIOS), rows(43), torch.zeros(2, 43, dtype=torch.bool)
    mask[0, 30:] = mask[1, :5] = True
    for way, hidden in (("apply", mask), ("ignore", None)):
        with install(mask=way):
            found, _ = made(x, x, x, key_padding_mask=mask.to(dtype))
        close(found, by_the_oracle(made, x, key_padding_mask=hidden))
    mask[1] = True
    words = "hides every key of a sequence.*True where there is padding, ~mask if yours"
    with install(), pytest.warns(UserWarning, match=words):
        made(x, x, x, key_padding_mask=mask)


class Elsewhere(torch.Tensor):
    """A mask that claims to be on another device. `looks` counts waits for its values."""

    looks = 0
    device = torch.device("xpu")

    def any(self):
        Elsewhere.looks += 1
        return self.as_subclass(torch.Tensor).any()


def test_a_mask_is_looked_at_once_where_that_takes_waiting(monkeypatch):
    monkeypatch.setattr(Elsewhere, "looks", 0)
    mask = torch.zeros(2, 43, dtype=torch.bool).as_subclass(Elsewhere)
    assert [_hides(mask) for _ in range(12)] == [False] * 12
    assert Elsewhere.looks == 1
    mask[1, 3] = True
    assert [_hides(mask) for _ in range(12)] == [True] * 12
    assert Elsewhere.looks == 2
    here = torch.zeros(2, 43, dtype=torch.bool)
    assert _hides(here.as_subclass(Elsewhere)) is False
    assert Elsewhere.looks == 3
    with torch.inference_mode():  # one that cannot be remembered counts
        assert _hides(torch.zeros(2, 43, dtype=torch.bool).as_subclass(Elsewhere)) is True
    assert Elsewhere.looks == 3
    assert _hides(here) is False
    here.numpy()[0, 0] = True  # which torch does not notice
    assert _hides(here) is True


@pytest.mark.parametrize("xpos", [None, Turn()], ids=["", "xpos"])
@pytest.mark.parametrize("tail", ["zeros", "exact"])
def test_decoding_is_the_whole_row_by_row(peer, xpos, tail):
    made, x, state = layer(peer, LENGTHS, RATIOS), rows(43), {}
    made.xpos = xpos
    whole = by_the_oracle(made, x, is_causal=True)
    with install(tail=tail):
        close(made(x, x, x, is_causal=True)[0], whole)
        cuts = [0, 11, 12, *range(14, 44)]
        for start, stop in pairwise(cuts):
            part = x[:, start:stop]
            found, _ = made(part, part, part, state, is_first_step=start == 0, is_causal=True)
            close(found, whole[:, start:stop])
    assert {name: tuple(kept.shape) for name, kept in state.items()} == {"prev_key": (2, 4, 43, 8), "prev_value": (2, 4, 43, 8)}
    assert all(kept.is_contiguous() for kept in state.values()), "torchscale takes views of it"
    close(state["prev_key"].transpose(1, 2).flatten(2), made.k_proj(x))


def test_decoding_with_a_mask_of_all_keys(peer):
    """A mask of the new rows does not say which older keys are padding."""
    made, x, state, mask = layer(peer, LENGTHS, RATIOS), rows(43), {}, torch.zeros(2, 43, dtype=torch.bool)
    mask[1, :9] = True
    whole = by_the_oracle(made, x, is_causal=True, key_padding_mask=mask)
    with install():
        for start, stop in ((0, 30), (30, 43)):
            part = x[:, start:stop]
            found, _ = made(part, part, part, state, key_padding_mask=mask[:, :stop], is_causal=True)
            close(found, whole[:, start:stop])
        with pytest.raises(ValueError, match=r"key_padding_mask has shape \(2, 1\)"):
            made(x[:, :1], x[:, :1], x[:, :1], state, key_padding_mask=mask[:, :1], is_causal=True)


def test_a_state_of_other_sequences_is_refused(peer):
    """A view of it would give rows of four sequences to two."""
    made, x, state = layer(peer, LENGTHS, RATIOS), rows(11, batch=4), {}
    with install():
        made(x, x, x, state, is_first_step=True, is_causal=True)
        words = r"incremental_state\['prev_key'\] has shape \(4, 4, 11, 8\); .* = \(2, 4, rows, 8\)"
        with pytest.raises(ValueError, match=words):
            made(x[:2, :1], x[:2, :1], x[:2, :1], state, is_causal=True)
        with pytest.raises(ValueError, match=r"is_first_step is given with an incremental_state that holds .*\(4, 4, 11, 8\)"):
            made(x, x, x, state, is_first_step=True, is_causal=True)
    assert tuple(state["prev_key"].shape) == (4, 4, 11, 8)


def test_a_subclass_with_a_procedure_of_its_own_is_refused(peer):
    x = rows(16)
    other = type("Other", (peer,), {"gathering": lambda self: None})
    same = type("Same", (peer,), {"note": 3})
    with install():
        assert layer(same, LENGTHS, RATIOS)(x, x, x)[0].shape == x.shape
        with pytest.raises(TypeError, match="Other has its own gathering, which dilkit does not call; give it its own forward"):
            layer(other, LENGTHS, RATIOS)(x, x, x)


@pytest.mark.parametrize("peer", CHECKOUTS, indirect=True)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("option", ["xpos_rel_pos", "multiway"])
def test_what_else_torchscale_can_do(peer, option, is_causal):
    made, x = layer(peer, LENGTHS, RATIOS, **{option: True}), rows(43)
    for part in made.modules():
        if hasattr(part, "split_position"):
            part.split_position = 20
    own, _ = made(x, x, x, is_causal=is_causal)
    with install():
        close(made(x, x, x, is_causal=is_causal)[0], own)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS, [8, 18, 32]], ids=["", "with a warning"])
@pytest.mark.filterwarnings("ignore:segment_length=18")
def test_it_compiles_as_one_graph(peer, lengths):
    made, x, mask = layer(peer, lengths, RATIOS), rows(43), torch.zeros(2, 43, dtype=torch.bool)
    mask[0, 3] = True
    with install():
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        for hidden in (None, mask):
            close(compiled(x, x, x, key_padding_mask=hidden)[0], made(x, x, x, key_padding_mask=hidden)[0])


def test_autocast(peer):
    made, x = layer(peer, LENGTHS, RATIOS).float(), rows(43).float()
    with install(), torch.autocast("cpu", torch.bfloat16):
        found, _ = made(x, x, x)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), by_the_oracle(made.double(), x.double()), rtol=0.05, atol=0.1)


X, SIZES = rows(43), (LENGTHS, RATIOS)
REFUSED = {
    "attn_mask": (SIZES, dict(attn_mask=torch.zeros(43, 43)), "attn_mask is not supported: the segments define"),
    "rel_pos": (SIZES, dict(rel_pos=torch.zeros(8, 43, 43)), r"rel_pos is given, a tensor \(8, 43, 43\).*args.rel_pos_buckets=0"),
    "mask": (SIZES, dict(key_padding_mask=torch.ones(2, 42, dtype=torch.bool)), r"key_padding_mask has shape \(2, 42\)"),
    "keys": (SIZES, dict(key=X[:, :42], value=X[:, :42]), "query has 43 rows, key 42 and value 42"),
    "values": (SIZES, dict(value=X[:, :42]), "query has 43 rows, key 43 and value 42"),
    "more keys": (SIZES, dict(key=rows(44), value=rows(44)), "query has 43 rows, key 44 and value 44"),
    "no lengths": ((None, [1]), {}, "args.segment_length=None of DilatedAttention is no list"),
    "a text": (([8], "[1]"), {}, r"args.dilated_ratio='\[1\]' of DilatedAttention is no list"),
    "an empty list": (([], [1]), {}, r"args.segment_length=\[\]"),
    "a large ratio": (([8], [16]), {}, r"dilation_rates\[0\]=16 exceeds segment_lengths\[0\]=8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(peer, case):
    sizes, options, text = REFUSED[case]
    with install(), pytest.raises(ValueError, match=text):
        layer(peer, *sizes)(**dict(query=X, key=X, value=X) | options)


def test_dropout_is_refused_in_training_alone(peer):
    made = layer(peer, LENGTHS, RATIOS, dropout=0.1)
    with install():
        with pytest.raises(ValueError, match=r"attention dropout is 0.1: torchscale drops weights of each branch"):
            made(X, X, X)
        close(made.eval()(X, X, X)[0], by_the_oracle(made, X))


@pytest.mark.parametrize(
    ("xpos", "state", "text"), [(None, {}, "incremental_state is"), (Turn(), None, "xPos is"), (Turn(), {}, "state and xPos is")]
)
def test_what_ranks_cannot_do_is_refused(peer, monkeypatch, xpos, state, text):
    utils = ModuleType("utils")
    utils.get_data_parallel_group = lambda: "some ranks"
    monkeypatch.setitem(sys.modules, PUBLISHED.replace("dilated_attention", "utils"), utils)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    made, x = layer(peer, LENGTHS, RATIOS, seq_parallel=True), rows(16)
    made.xpos = xpos
    with install(), pytest.raises(ValueError, match=f"{text} given with seq_parallel: run it on one rank"):
        made(x, x, x, state)
