"""The modules: equal to nn.MultiheadAttention where the pattern is dense, to the oracle elsewhere, and good citizens of torch."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, dilated_attention, order
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
    for mine, expected in zip(
        DilatedAttention(PATTERN, scale=0.3)(q, k, v, **options),
        dilated_attention(q, k, v, PATTERN, scale=0.3, **options),
        strict=True,
    ):
        assert torch.equal(mine, expected)


def test_dilated_attention_passes_its_backend_on():
    with pytest.raises(ValueError, match="no-such-backend"):
        DilatedAttention(PATTERN, backend="no-such-backend")(*rows(3, 1, SEQ, HEADS, 8))


def test_the_repr_tells_pattern_options_and_sizes():
    assert repr(DilatedAttention(PATTERN)) == "DilatedAttention(Pattern([4, 8], [1, 2]))"
    assert (
        repr(DilatedAttention(PATTERN, scale=1, backend="a"))
        == "DilatedAttention(Pattern([4, 8], [1, 2]), scale=1.0, backend='a')"
    )
    text = repr(multihead(num_kv_heads=2, kdim=6, rotary=500, is_causal=True, layer_norm=True))
    for part in (
        "embed_dim=16, num_heads=4, num_kv_heads=2, kdim=6, rotary=500.0, is_causal=True",
        "Pattern([4, 8]",
        "LayerNorm((16,)",
    ):
        assert part in text
    assert "embed_dim=16, num_heads=4\n" in repr(multihead())


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 6}, {"vdim": 5, "kdim": 7, "bias": False}], ids=str)
def test_the_same_seed_gives_the_same_parameters(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options).state_dict()
    ours = multihead(seed=3, **options).state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_weights_load_both_ways():
    theirs, ours = nn.MultiheadAttention(EMBED, HEADS), multihead(seed=5)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.in_proj_weight, ours.in_proj_weight)


def test_weights_load_packed_or_apart():
    """A layer has them packed where queries, keys and values have the same width, and takes those of the other layout."""
    layer, apart = multihead(num_kv_heads=2, seed=5), multihead(num_kv_heads=2, kdim=6)
    state = layer.state_dict()
    names = "q_proj_weight", "k_proj_weight", "v_proj_weight"
    split = {**state, **dict(zip(names, state["in_proj_weight"].split([16, 8, 8]), strict=True))}
    del split["in_proj_weight"]
    fresh = multihead(num_kv_heads=2)
    assert (
        str(nn.Sequential(fresh).load_state_dict({f"0.{name}": x for name, x in split.items()}))
        == "<All keys matched successfully>"
    )
    assert all(torch.equal(x, state[name]) for name, x in fresh.state_dict().items())
    assert "in_proj_weight" not in split, "the caller's dict is changed"
    with pytest.raises(RuntimeError, match=r"size mismatch for k_proj_weight: .*\[8, 16\].*\[8, 6\]"):
        apart.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Unexpected key.* "in_proj_weight"'):
        apart.load_state_dict({**apart.state_dict(), "in_proj_weight": state["in_proj_weight"]})
    with pytest.raises(RuntimeError, match=r'Missing key.* "in_proj_weight"'):
        fresh.load_state_dict({name: x for name, x in split.items() if name != "k_proj_weight"})


MASK = torch.zeros(2, SEQ, dtype=torch.bool)
MASK[0, 4:6] = MASK[1, 8:] = True


@pytest.mark.smoke
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ((), {}),
        ((), {"bias": False}),
        ((EMBED, EMBED), {}),
        ((6, EMBED), {"kdim": 6}),
        ((6, 5), {"kdim": 6, "vdim": 5, "bias": False}),
    ],
    ids=str,
)
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
    blind = torch.zeros(2, SEQ, dtype=torch.bool)
    blind[0, :3] = True
    torch.testing.assert_close(out[~blind], expected[~blind])
    torch.testing.assert_close(out[blind], ours.out_proj.bias.expand(3, EMBED))
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


def test_a_transformer_encoder_layer_keeps_it_in_inference():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 32, dropout=0.0, batch_first=True)
    layer.self_attn = multihead()
    x = rows(2, SEQ, EMBED, dtype=torch.float32)
    expected = layer(x)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), expected)


def by_hand(module, x, positions=None, is_causal=False):
    """The module's formula over the oracle, for packed projections."""
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


def test_grouped_heads_shrink_the_projections():
    shapes = {name: tuple(x.shape) for name, x in multihead(num_kv_heads=2).state_dict().items()}
    assert shapes == {"in_proj_weight": (32, 16), "in_proj_bias": (32,), "out_proj.weight": (16, 16), "out_proj.bias": (16,)}
    assert multihead(num_kv_heads=2, kdim=6).k_proj_weight.shape == (8, 6)


class Recorder(nn.Module):
    """An inner attention that returns its values, repeated to all heads, and notes what it was called with."""

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    module = multihead(rotary=True, layer_norm=True, num_kv_heads=2)
    x = rows(2, SEQ, EMBED, dtype=dtype)
    low = copy.deepcopy(module).half() if dtype == torch.float16 else copy.deepcopy(module).to(dtype)
    out, _ = low(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), module.to(dtype).float()(x.float())[0], atol=0.05, rtol=0.05)


def test_autocast():
    module, x = multihead(rotary=True, layer_norm=True), rows(2, SEQ, EMBED, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x)[0], atol=0.05, rtol=0.05)
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["deepcopy", "pickle"]
)
def test_copies_compute_the_same(duplicate):
    module, x = multihead(rotary=True, layer_norm=True, is_causal=True), rows(2, SEQ, EMBED, dtype=torch.float32)
    module(x)
    twin = duplicate(module)
    assert repr(twin) == repr(module)
    assert torch.equal(twin(x)[0], module(x)[0])
    assert twin.in_proj_weight is not module.in_proj_weight


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


def test_checkpointing_gives_the_same_gradients():
    module, x = multihead(rotary=True), rows(2, SEQ, EMBED, dtype=torch.float32)
    gradients = []
    for run in (module, lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)):
        module.zero_grad()
        run(x)[0].square().sum().backward()
        gradients.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_training_reduces_the_loss():
    """Copy the token before: within reach of causal attention with rotary positions."""
    module = multihead(is_causal=True, rotary=True, layer_norm=True)
    x = rows(4, SEQ, EMBED, dtype=torch.float32)
    target = x.roll(1, dims=1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (module(x)[0] - target)[:, 1:].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


INNER = DilatedAttention(PATTERN)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(embed_dim=15), ValueError, "embed_dim=15 is not divisible by num_heads=4"),
        (dict(embed_dim=0), ValueError, "embed_dim=0 must be at least 1"),
        (dict(embed_dim=16.0), TypeError, "embed_dim=16.0 is a float"),
        (dict(num_heads=True), TypeError, "num_heads=True is a bool"),
        (dict(num_heads=-4), ValueError, "num_heads=-4 must be at least 1"),
        (dict(num_kv_heads=3), ValueError, "num_kv_heads=3 does not divide num_heads=4"),
        (dict(num_kv_heads=0), ValueError, "num_kv_heads=0 must be at least 1"),
        (dict(kdim=0), ValueError, "kdim=0 must be at least 1"),
        (dict(vdim="5"), TypeError, "vdim='5' is a str"),
        (dict(attention=None), ValueError, "attention=None with segment_lengths=None and dilation_rates=None"),
        (dict(attention=None, segment_lengths=[4]), ValueError, r"segment_lengths=\[4\] and dilation_rates=None"),
        (dict(dilation_rates=[4]), ValueError, r"give either attention.*dilation_rates=\[4\]"),
        (dict(segment_lengths=[4], dilation_rates=[1]), ValueError, "give either attention"),
        (dict(attention=None, segment_lengths=[4], dilation_rates=[8]), ValueError, r"dilation_rates\[0\]=8 exceeds"),
        (
            dict(attention=PATTERN),
            TypeError,
            r"attention=Pattern.* is a Pattern; a module is needed.*DilatedAttention\(pattern\)",
        ),
        (dict(attention=0.1), TypeError, "attention=0.1 is a float"),
        (dict(dropout=1), ValueError, "dropout=1.0 must be at least 0 and less than 1"),
        (dict(add_bias_kv=True), ValueError, "add_bias_kv=True is not supported"),
        (dict(add_zero_attn=True), ValueError, "add_zero_attn=True is not supported"),
        (dict(batch_first=False), ValueError, "batch_first=False is not supported.*transpose"),
        (dict(rotary=-1.0), ValueError, "rotary=-1.0 must be finite and greater than 1"),
        (dict(rotary=1), ValueError, "rotary=1.0 must be finite and greater than 1"),  # True is meant
        (dict(rotary="yes"), TypeError, "rotary='yes' is a str"),
        (dict(embed_dim=12, rotary=True), ValueError, "head_dim=3 is odd"),
        (dict(is_causal=1), TypeError, "is_causal=1 is a int"),
        (dict(bias=None), TypeError, "bias=None is a NoneType"),
        (dict(layer_norm="post"), TypeError, "layer_norm='post' is a str"),
        (dict(layer_norm_eps=0, layer_norm=True), ValueError, "layer_norm_eps=0.0 must be finite and greater than 0"),
    ],
)
def test_constructor_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        MultiheadDilatedAttention(**{"embed_dim": EMBED, "num_heads": HEADS, "attention": INNER, **arguments})


X = torch.zeros(2, SEQ, EMBED)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(need_weights=True), ValueError, "need_weights=True is not supported.*Pattern.count"),
        (dict(attn_mask=~causal_mask(SEQ)), ValueError, "not the causal mask.*True .not allowed, the opposite of F.scaled_dot"),
        (dict(attn_mask=causal_mask(SEQ), is_causal="yes"), TypeError, "is_causal='yes' is a str"),
        (dict(attn_mask=torch.zeros(SEQ, SEQ, dtype=torch.bool)), ValueError, "attn_mask is not the causal mask"),
        (dict(attn_mask=causal_mask(SEQ).float() * -1e9), ValueError, "attn_mask is not the causal mask.*-inf, above"),
        (dict(attn_mask=causal_mask(SEQ + 1)), ValueError, r"attn_mask has shape \(12, 12\); only the causal mask \(11, 11\)"),
        (dict(attn_mask=causal_mask(SEQ).expand(8, -1, -1)), ValueError, r"attn_mask has shape \(8, 11, 11\); only the causal"),
        (dict(attn_mask=causal_mask(SEQ).long()), TypeError, "attn_mask is torch.int64; torch.bool, True = not allowed"),
        (dict(attn_mask="causal"), TypeError, "attn_mask is a str; a torch.Tensor, the causal mask, or None"),
        (dict(key_padding_mask=torch.ones(2, SEQ)), ValueError, "key_padding_mask is torch.float32.*0 and -inf"),
        (dict(key_padding_mask=MASK[0]), ValueError, r"key_padding_mask has shape \(11,\); \(2, 11\)"),
        (dict(key_padding_mask=[[False] * SEQ] * 2), TypeError, "key_padding_mask is a list"),
        (
            dict(key=X[:, :5]),
            ValueError,
            r"key has shape \(2, 5, 16\) and query \(2, 11, 16\); dilated attention is defined within one",
        ),
        (dict(value=X[:1]), ValueError, r"value has shape \(1, 11, 16\) and query"),
        (dict(key=X[0]), ValueError, r"key has shape \(11, 16\) and query"),
        (dict(query=X[..., :8]), ValueError, r"query has shape \(2, 11, 8\); \(batch, seq, 16\)"),
        (dict(query=X[None]), ValueError, r"query has shape \(1, 2, 11, 16\)"),
        (dict(query=None), TypeError, "query is a NoneType"),
        (dict(is_causal="yes"), TypeError, "is_causal='yes' is a str"),
        (dict(value="x"), TypeError, "value is a str"),
        (dict(positions=torch.arange(SEQ)), ValueError, "positions is given.*rotary=True"),
    ],
)
def test_call_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        multihead()(**{"query": X, **arguments})


@pytest.mark.parametrize(
    ("pattern", "options", "error", "message"),
    [
        ([4], {}, TypeError, r"pattern=\[4\] is a list; a dilkit.Pattern is needed"),
        (PATTERN, {"scale": float("nan")}, ValueError, "scale=nan must be finite"),
        (PATTERN, {"scale": "1"}, TypeError, "scale='1' is a str"),
    ],
)
def test_dilated_attention_errors_name_the_argument(pattern, options, error, message):
    with pytest.raises(error, match=message):
        DilatedAttention(pattern, **options)


STARTS, CACHE = torch.tensor([0, SEQ], dtype=torch.int32), DilatedCache(PATTERN, HEADS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(cache={}), TypeError, "cache={} is a dict; a dilkit.DilatedCache is needed"),
        (dict(cache=DilatedCache(Pattern.dense(), HEADS)), ValueError, "cache is of .*, but the inner attention has"),
        (dict(cache=CACHE), ValueError, "cache is given, but is_causal=False"),
        (dict(cache=CACHE, is_causal=True, dropout_p=0.5), ValueError, "cache is given with dropout_p=0.5"),
        (dict(cache=CACHE, return_lse=True), ValueError, "return_lse is given with cache, which returns the result alone"),
        (dict(cache=CACHE, key_padding_mask=MASK), ValueError, "key_padding_mask is given with cache, which keeps no mask"),
        (dict(cache=CACHE, cu_seqlens=STARTS), ValueError, "cache is given with cu_seqlens, but a cache is of"),
        (dict(key_padding_mask=MASK, cu_seqlens=STARTS), ValueError, "key_padding_mask is given with cu_seqlens, but packed"),
        (dict(max_seqlen=SEQ), ValueError, "max_seqlen=11 is given without cu_seqlens"),
    ],
)
def test_calls_of_dilated_attention_name_what_does_not_go_together(options, error, message):
    with pytest.raises(error, match=message):
        DilatedAttention(PATTERN)(*rows(3, 2, SEQ, HEADS, 4), **options)


@pytest.mark.parametrize("options", [dict(cache=CACHE, is_causal=True), dict(cu_seqlens=STARTS)], ids=["cache", "cu_seqlens"])
def test_token_orders_take_no_cache_and_no_packed_sequences(options):
    with pytest.raises(ValueError, match="is given, but the attention is along token orders"):
        DilatedAttention(PATTERN, order=order((SEQ,)))(*rows(3, SEQ, HEADS, 4), **options)


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
    """`after`: the encoder was made before its layers held the module, and may think that they are torch's own."""
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


def test_a_causal_mask_of_what_is_no_whole_sequence_is_refused():
    mask, x = causal_mask(SEQ), torch.zeros(2, SEQ, EMBED)
    module, cu_seqlens = multihead(is_causal=True), torch.tensor([0, 4, SEQ], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attn_mask is given with cu_seqlens.*use is_causal=True"):
        module(x[0], attn_mask=mask, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="attn_mask is given with cache"):
        module(x, attn_mask=mask, cache=DilatedCache(PATTERN, HEADS))
    with pytest.raises(ValueError, match="attn_mask is given with cu_seqlens"):
        module(torch.nested.nested_tensor_from_jagged(x[0], cu_seqlens.long()), attn_mask=mask)
    with pytest.raises(ValueError, match=r"attn_mask is given, but the inner attention is Recorder\(\)"):
        MultiheadDilatedAttention(EMBED, HEADS, Recorder())(x, attn_mask=mask)


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
    for module in (
        layer,
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(),
        torch.compile(layer, backend="eager"),
    ):
        torch.testing.assert_close(module(changed, src_key_padding_mask=mask)[~mask], module(x, src_key_padding_mask=mask)[~mask])
