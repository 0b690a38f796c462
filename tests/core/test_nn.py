"""The torch modules."""

import copy
import warnings

import pytest
import torch
from torch import nn

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, dilated_attention
from dilkit.oracle import oracle_attention
from dilkit.rotary import rotary_embedding

EMBED, HEADS, SEQ = 16, 4, 11
PATTERN = Pattern([4, 8], [1, 2])


def multihead(pattern=PATTERN, seed=0, **options):
    torch.manual_seed(seed)
    return MultiheadDilatedAttention(EMBED, HEADS, DilatedAttention(pattern), **options)


def theirs_and_ours(**options):
    """nn.MultiheadAttention and ours with a dense pattern and the same weights, fp64, biases not zero."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dtype=torch.float64, **options)
    for name, parameter in theirs.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    ours = multihead(Pattern.dense(), dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def rows(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def causal_mask(seq):
    return torch.ones(seq, seq, dtype=torch.bool).triu(1)


def test_dilated_attention_is_the_function():
    q, k, v = rows(3, 2, SEQ, HEADS, 8)
    mask = torch.zeros(2, SEQ, dtype=torch.bool)
    mask[1, 7:] = True
    options = dict(is_causal=True, key_padding_mask=mask, return_lse=True)
    found, expected = (
        DilatedAttention(PATTERN, scale=0.3)(q, k, v, **options),
        dilated_attention(q, k, v, PATTERN, scale=0.3, **options),
    )
    assert all(map(torch.equal, found, expected))


def test_the_repr_tells_pattern_options_and_sizes():
    assert repr(DilatedAttention(PATTERN)) == "DilatedAttention(Pattern([4, 8], [1, 2]))"
    named = DilatedAttention(PATTERN, scale=1, backend="a")
    assert repr(named) == "DilatedAttention(Pattern([4, 8], [1, 2]), scale=1.0, backend='a')"
    text = repr(multihead(num_kv_heads=2, kdim=6, rotary=500, is_causal=True, layer_norm=True))
    sizes = "embed_dim=16, num_heads=4, num_kv_heads=2, kdim=6, rotary=500.0, is_causal=True"
    assert all(part in text for part in (sizes, "Pattern([4, 8]", "LayerNorm((16,)"))
    assert "embed_dim=16, num_heads=4\n" in repr(multihead())


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6}, {"vdim": 5, "kdim": 7, "bias": False}], ids=str)
def test_the_same_seed_gives_the_same_parameters(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options).state_dict()
    ours = multihead(seed=3, **options).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_load_packed_or_apart():
    """A layer packs them if queries, keys and values have one width, and loads both layouts."""
    layer, apart = multihead(num_kv_heads=2, seed=5), multihead(num_kv_heads=2, kdim=6)
    state = layer.state_dict()
    names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
    split = {**state, **dict(zip(names, state["in_proj_weight"].split([16, 8, 8]), strict=True))}
    del split["in_proj_weight"]
    fresh = multihead(num_kv_heads=2)
    nn.Sequential(fresh).load_state_dict({f"0.{name}": x for name, x in split.items()})
    assert all(torch.equal(x, state[name]) for name, x in fresh.state_dict().items())
    assert "in_proj_weight" not in split, "the caller's dict is changed"
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj_weight: .*\[8, 16\].*\[8, 6\]"):
        apart.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "in_proj_weight"'):
        apart.load_state_dict({**apart.state_dict(), "in_proj_weight": state["in_proj_weight"]})
    with pytest.raises(RuntimeError, match=r'Missing key.* "in_proj_weight"'):
        fresh.load_state_dict({name: x for name, x in split.items() if name != "k_proj_weight"})


WIDTHS = [((), {}), ((), {"bias": False}), ((EMBED, EMBED), {}), ((6, EMBED), {"kdim": 6})]
WIDTHS += [((6, 5), {"kdim": 6, "vdim": 5, "bias": False})]
MASK = torch.zeros(2, SEQ, dtype=torch.bool)
MASK[0, 4:6] = MASK[1, 8:] = True


@pytest.mark.smoke
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize(("widths", "options"), WIDTHS, ids=str)
def test_dense_it_is_multihead_attention_forward_and_gradients(is_causal, mask, widths, options):
    theirs, ours = theirs_and_ours(**options)
    inputs = [rows(2, SEQ, width, seed=i) for i, width in enumerate((EMBED, *widths))]
    results = []
    for module, causality in ((theirs, {"attn_mask": causal_mask(SEQ)} if is_causal else {}), (ours, {"is_causal": is_causal})):
        leaves = [x.clone().requires_grad_() for x in inputs]
        query, key, value = leaves if widths else leaves * 3
        out, weights = module(query, key, value, key_padding_mask=mask, need_weights=False, **causality)
        assert weights is None
        (out * rows(*out.shape, seed=9)).sum().backward()
        results.append([out, *(x.grad for x in leaves), *(p.grad for p in module.parameters())])
    for expected, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-12, rtol=1e-10)


def test_rows_that_see_nothing_are_the_bias_and_the_others_theirs():
    theirs, ours = theirs_and_ours()
    x, mask = rows(2, SEQ, EMBED).requires_grad_(), torch.zeros(2, SEQ, dtype=torch.bool)
    mask[0, :3] = True
    out, _ = ours(x, key_padding_mask=mask, is_causal=True)
    expected, _ = theirs(x, x, x, key_padding_mask=mask, need_weights=False, attn_mask=causal_mask(SEQ))
    torch.testing.assert_close(out[~mask], expected[~mask])
    torch.testing.assert_close(out[mask], ours.out_proj.bias.expand(3, EMBED))
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_without_a_batch():
    theirs, ours = theirs_and_ours()
    x = rows(SEQ, EMBED)
    out, _ = ours(x, x, x, key_padding_mask=MASK[1])
    torch.testing.assert_close(out, theirs(x, x, x, key_padding_mask=MASK[1], need_weights=False)[0])
    rotary = multihead(rotary=True, dtype=torch.float64)
    assert torch.equal(rotary(x, positions=torch.arange(SEQ))[0], rotary(x.unsqueeze(0))[0].squeeze(0))


def test_key_defaults_to_query_and_value_to_key():
    module, x, y = multihead(dtype=torch.float64), rows(2, SEQ, EMBED), rows(2, SEQ, EMBED, seed=2)
    torch.testing.assert_close(module(x)[0], module(x, x.clone(), x.clone())[0])
    assert torch.equal(module(x, y)[0], module(x, y, y)[0])


@pytest.mark.parametrize("shape", [(0, SEQ, EMBED), (2, 0, EMBED), (2, 1, EMBED)])
def test_nothing_and_single_tokens(shape):
    assert multihead(rotary=True)(torch.zeros(shape))[0].shape == shape


def by_hand(module, x, positions=None, is_causal=False):
    dim, kv_dim = module.head_dim, module.num_kv_heads * module.head_dim
    q, k, v = (x @ module.in_proj_weight.T + module.in_proj_bias).split([module.embed_dim, kv_dim, kv_dim], dim=-1)
    q, k, v = (y.unflatten(-1, (-1, dim)) for y in (q, k, v))
    if module.rotary is not None:
        q, k = rotary_embedding(q, positions, module.rotary), rotary_embedding(k, positions, module.rotary)
    out = oracle_attention(q, k, v, module.attention.pattern, is_causal=is_causal)[0].flatten(-2)
    if module.inner_norm is not None:
        out = nn.functional.layer_norm(out, (module.embed_dim,), eps=module.inner_norm.eps)
    return out @ module.out_proj.weight.T + module.out_proj.bias


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "rotary": True}, {"rotary": 50}, {"layer_norm": True, "layer_norm_eps": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_option_against_the_oracle(options, is_causal):
    module, x = multihead(dtype=torch.float64, is_causal=is_causal, **options), rows(2, SEQ, EMBED)
    torch.testing.assert_close(module(x)[0], by_hand(module, x, is_causal=is_causal), atol=1e-12, rtol=1e-10)


def test_is_causal_of_a_call_wins_over_the_constructor():
    module, x = multihead(is_causal=True), rows(2, SEQ, EMBED, dtype=torch.float32)
    assert torch.equal(module(x, is_causal=False)[0], multihead()(x)[0])
    assert not torch.equal(module(x)[0], multihead()(x)[0])


def test_positions_reach_the_rotary_embedding():
    module, x = multihead(dtype=torch.float64, rotary=True), rows(2, SEQ, EMBED)
    positions = torch.stack((torch.arange(SEQ) * 3, torch.arange(SEQ).flip(0)))
    torch.testing.assert_close(module(x, positions=positions)[0], by_hand(module, x, positions))
    torch.testing.assert_close(module(x, positions=torch.arange(SEQ) + 7)[0], module(x)[0])


def test_segments_and_rates_make_the_pattern():
    module = MultiheadDilatedAttention(EMBED, HEADS, segment_lengths=[4, 8], dilation_rates=[1, 2])
    assert module.attention.pattern == PATTERN


class Recorder(nn.Module):
    """An inner attention that returns its values for all heads and records its calls."""

    def forward(self, q, k, v, *, is_causal, key_padding_mask):
        self.seen = dict(q=q, k=k, v=v, is_causal=is_causal, key_padding_mask=key_padding_mask)
        return v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)


def test_any_module_can_be_the_inner_attention_and_gets_views_of_one_product():
    inner = Recorder()
    module = MultiheadDilatedAttention(EMBED, HEADS, inner, num_kv_heads=2)
    module(torch.randn(2, SEQ, EMBED), key_padding_mask=MASK, is_causal=True)
    seen = inner.seen
    assert seen["is_causal"] is True
    assert seen["key_padding_mask"] is MASK
    assert [tuple(seen[name].shape) for name in "qkv"] == [(2, SEQ, HEADS, 4), (2, SEQ, 2, 4), (2, SEQ, 2, 4)]
    assert len({seen[name].untyped_storage().data_ptr() for name in "qkv"}) == 1


def test_autocast():
    module, x = multihead(rotary=True, layer_norm=True), rows(2, SEQ, EMBED, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x)[0], atol=0.05, rtol=0.05)
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


def test_the_constructor_takes_device_and_dtype():
    module = multihead(device="meta", dtype=torch.bfloat16, layer_norm=True)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module(torch.empty(2, SEQ, EMBED, device="meta", dtype=torch.bfloat16))[0].shape == (2, SEQ, EMBED)


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.slow), True], ids=["static", "dynamic"])
def test_it_compiles_as_one_graph(dynamic):
    module = multihead(rotary=True, layer_norm=True, num_kv_heads=2, is_causal=True)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq in (SEQ, 14) if dynamic else (SEQ,):
        x, mask = rows(2, seq, EMBED, dtype=torch.float32), torch.zeros(2, seq, dtype=torch.bool)
        gradients = []
        for run in (module, compiled):
            module.zero_grad()
            out, _ = run(x, key_padding_mask=mask)
            out.square().sum().backward()
            gradients.append([out, *(p.grad for p in module.parameters())])
        for mine, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("floating", [False, True], ids=["bool", "-inf"])
def test_dense_with_a_causal_mask_it_is_multihead_attention(floating):
    theirs, ours = theirs_and_ours()
    x, mask = rows(2, SEQ, EMBED), causal_mask(SEQ)
    mask = torch.zeros(SEQ, SEQ).double().masked_fill(mask, -torch.inf) if floating else mask
    for is_causal in (False, True):  # a hint that the mask is the causal one; the mask holds with or without it
        for padding in (None, MASK.flip(1)):
            options = dict(attn_mask=mask, is_causal=is_causal, key_padding_mask=padding, need_weights=False)
            if floating and padding is not None:
                options["key_padding_mask"] = torch.zeros(2, SEQ).double().masked_fill(padding, -torch.inf)
            found, expected = ours(x, x, x, **options)[0], theirs(x, x, x, **options)[0]
            seen = ~(padding if padding is not None else torch.zeros_like(MASK)).cummin(1)[0]  # rows that see something
            torch.testing.assert_close(found[seen], expected[seen])


@pytest.mark.parametrize("how", ["train", "eval", pytest.param("compiled", marks=pytest.mark.slow), "after"])
def test_a_transformer_encoder_hands_on_its_causal_mask(how):
    """`after`: the encoder was made before its layers held the module."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=how == "after")
    for held in encoder.layers:
        held.self_attn = multihead()
    expected_of = copy.deepcopy(encoder)
    for held in expected_of.layers:
        held.self_attn.is_causal = True
        held.self_attn.register_forward_pre_hook(lambda *call: (call[1], dict(call[2], is_causal=None)), with_kwargs=True)
    x = rows(2, SEQ, EMBED, dtype=torch.float32)
    expected, mask = expected_of(x), nn.Transformer.generate_square_subsequent_mask(SEQ)
    run = torch.compile(encoder, backend="eager") if how == "compiled" else encoder.train(how != "eval")
    with torch.set_grad_enabled(how == "train"):
        for options in (dict(mask=mask, is_causal=True), dict(mask=mask), dict(mask=mask == -torch.inf, is_causal=True)):
            torch.testing.assert_close(run(x, **options), expected.detach())
        assert not torch.allclose(run(x), expected)


def test_masks_of_a_mapped_dimension_are_looked_at():
    module, x = multihead(), torch.zeros(3, 2, SEQ, EMBED)
    one, masks = causal_mask(SEQ), torch.stack((causal_mask(SEQ), causal_mask(SEQ), torch.zeros(SEQ, SEQ, dtype=torch.bool)))
    with torch.no_grad():
        assert torch.vmap(lambda rows: module(rows, attn_mask=one)[0])(x).shape == x.shape
        for wrong in (masks, masks[2:].expand_as(masks)):
            with pytest.raises(ValueError, match="attn_mask is not the causal mask"):
                torch.vmap(lambda rows, mask: module(rows, attn_mask=mask)[0])(x, wrong)
        padding = torch.zeros(3, 2, SEQ)
        padding[1] = 5.0
        with pytest.raises(ValueError, match="holds other numbers than 0 and -inf"):
            torch.vmap(lambda rows, mask: module(rows, key_padding_mask=mask)[0])(x, padding)


def test_a_strided_nested_tensor_is_refused_with_the_way_out_of_torchs_encoder():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, 32, batch_first=True), 1).eval()
    encoder.layers[0].self_attn = multihead()
    mask = torch.zeros(2, SEQ, dtype=torch.bool)
    mask[1, 7:] = True
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's, of nested tensors
        with pytest.raises(TypeError, match=r"nested with layout torch.strided.*enable_nested_tensor=False"):
            encoder(torch.zeros(2, SEQ, EMBED), src_key_padding_mask=mask)


def test_a_transformer_encoder_layer_hands_on_its_mask():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    layer.self_attn = multihead()
    x, mask = rows(2, SEQ, EMBED, dtype=torch.float32), torch.zeros(2, SEQ, dtype=torch.bool)
    mask[0, SEQ // 2 :] = True
    by_hand = layer.self_attn(x, key_padding_mask=mask)[0]
    assert torch.equal(layer.self_attn(x, key_padding_mask=torch.zeros(2, SEQ).masked_fill(mask, -torch.inf))[0], by_hand)
    changed = x.clone()
    changed[mask] = 100.0
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for module in (layer, encoder, torch.compile(layer, backend="eager")):
        torch.testing.assert_close(module(changed, src_key_padding_mask=mask)[~mask], module(x, src_key_padding_mask=mask)[~mask])
