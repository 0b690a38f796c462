"""Jagged tensors in and out of `dilated_attention` and `MultiheadDilatedAttention`."""

import pytest
import torch
from helpers.calls import TORCH_WARNS, starts_of

from dilkit import DilatedAttention, DilatedCache, MultiheadDilatedAttention, Pattern, dilated_attention, dilated_attention_varlen

PATTERN = Pattern([8, 24], [1, 3])
LENGTHS = [13, 0, 1, 30]
CU = starts_of(LENGTHS)


def jagged(x, offsets=CU):
    return torch.nested.nested_tensor_from_jagged(x, offsets)


def rows(heads=4, seed=0, **options):
    return torch.randn(44, heads, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), **options)


def inputs():
    return [rows(4), rows(2, 1), rows(2, 2)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_is_packed(is_causal):
    sink, options = torch.randn(4, dtype=torch.float64), dict(is_causal=is_causal, scale=0.4, backend="native")

    def differentiated(attend):
        leaves = [x.requires_grad_() for x in inputs()]
        out, lse = attend(*leaves)
        weight = torch.arange(6)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out.sin() * weight).sum() + lse.cos().sum(), leaves)]

    def packed(*qkv):
        return dilated_attention_varlen(*qkv, PATTERN, CU, sink=sink, return_lse=True, **options)

    def nested(*qkv):
        query, key, value = (jagged(x) for x in qkv)
        out, lse = dilated_attention(query, key, value, PATTERN, sink=sink, return_lse=True, **options)
        assert out.shape == query.shape  # the same j: they can be added
        assert [tuple(x.shape) for x in lse.unbind()] == [(4, n) for n in LENGTHS]
        return (out + query).values() - query.values(), lse.transpose(1, 2).values().T

    for found, right in zip(differentiated(nested), differentiated(packed), strict=True):
        torch.testing.assert_close(found, right)


def test_the_same_weights_are_dropped():
    options = dict(dropout_p=0.5, backend="native")
    torch.manual_seed(3)
    nested = dilated_attention(jagged(Q), jagged(K), jagged(V), PATTERN, **options)
    torch.manual_seed(3)
    assert torch.equal(nested.values(), dilated_attention_varlen(Q, K, V, PATTERN, CU, **options))


def test_made_of_a_list_of_sequences():
    sequences = [torch.randn(n, 4, 6) for n in (5, 2, 70)]
    x = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
    out = DilatedAttention(PATTERN)(x, x, x)
    for found, alone in zip(out.unbind(), sequences, strict=True):
        torch.testing.assert_close(found, dilated_attention(*[alone[None]] * 3, PATTERN)[0])
    out.values().sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("kdim", [None, 12])
def test_through_the_module(kdim):
    layer = MultiheadDilatedAttention(16, 4, DilatedAttention(PATTERN), rotary=True, sink=True, kdim=kdim).double()
    x, other = (torch.randn(44, n, dtype=torch.float64, requires_grad=True) for n in (16, kdim or 16))
    given = dict(key=other, value=x) if kdim else {}
    nested = layer(jagged(x), **{name: jagged(y) for name, y in given.items()})[0]
    packed = layer(x, **given, cu_seqlens=CU)[0]
    assert torch.equal(nested.values(), packed)
    assert torch.equal(*(torch.autograd.grad(out.sin().sum(), x, retain_graph=True)[0] for out in (nested.values(), packed)))
    nested.sum().backward()


@pytest.mark.usefixtures("fresh_compiler")
@TORCH_WARNS
@pytest.mark.slow
def test_compiled():
    layer = MultiheadDilatedAttention(16, 4, DilatedAttention(PATTERN), rotary=True)
    fast = torch.compile(layer, backend="aot_eager")
    for lengths in ([5, 9], [3, 8, 20], [31, 2]):
        x = torch.nested.nested_tensor([torch.randn(n, 16) for n in lengths], layout=torch.jagged)
        torch.testing.assert_close(fast(x)[0].values(), layer(x)[0].values())


Q, K, V = inputs()
J = jagged(Q)
OTHER = torch.tensor([0, 4, 13, 14, 44])
HOLES = torch.nested.nested_tensor_from_jagged(rows(2), CU[:-1], lengths=torch.tensor([3, 0, 1]))
WRONG = {
    "another packing": (dict(key=jagged(K, OTHER)), ValueError, r"key has the offsets \[0, 4, .* query \[0, 13"),
    "fewer sequences": (dict(value=jagged(V, OTHER[[0, 4]])), ValueError, r"value has the offsets \[0, 44\]"),
    "transposed": (dict(key=jagged(K).transpose(1, 2)), ValueError, "key is transposed, ragged in dimension 2"),
    "holes": (dict(query=HOLES, key=HOLES, value=HOLES), ValueError, "query has rows between its sequences"),
    "a plain key": (dict(key=K), TypeError, "key is a plain Tensor beside a nested one"),
    "a plain query": (dict(query=Q[None]), TypeError, "key is nested; a plain tensor"),
    "no tensor": (dict(value=[1.0]), TypeError, "value is a plain list beside a nested one"),
    "three dimensions": (dict(query=jagged(Q[:, 0])), ValueError, r"query has 3 dimensions; a jagged tensor \(batch, j, heads"),
    "a mask": (dict(key_padding_mask=torch.zeros(4, 30, dtype=torch.bool)), ValueError, "key_padding_mask is given with nested"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_nested_tensors_of_another_layout_are_refused():
    for name, x in (("query", Q), ("value", V)):
        given = dict(query=J, key=jagged(K), value=jagged(V)) | {name: torch.nested.nested_tensor([x])}
        with pytest.raises(TypeError, match=rf"{name} is nested with layout torch\.strided; a jagged tensor .* is needed"):
            dilated_attention(**given, pattern=PATTERN)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_named(wrong):
    changed, error, text = WRONG[wrong]
    with pytest.raises(error, match=text):
        dilated_attention(**{**dict(query=J, key=jagged(K), value=jagged(V), pattern=PATTERN), **changed})


X = torch.randn(44, 16)
WRONG_ROWS = {
    "starts": (dict(cu_seqlens=CU), ValueError, "cu_seqlens is given with a nested query"),
    "a cache": (dict(cache=DilatedCache(PATTERN, 4), is_causal=True), ValueError, "cache is given with cu_seqlens"),
    "a plain key": (dict(key=X), TypeError, "key is a plain Tensor beside a nested one"),
    "heads apart": (dict(query=J.float()), ValueError, r"query has 4 dimensions; a jagged tensor \(batch, j, embed_dim\)"),
}


@pytest.mark.parametrize("wrong", WRONG_ROWS)
def test_what_does_not_fit_the_module_is_named(wrong):
    changed, error, text = WRONG_ROWS[wrong]
    with pytest.raises(error, match=text):
        MultiheadDilatedAttention(16, 4, DilatedAttention(PATTERN))(**{**dict(query=jagged(X)), **changed})
