"""Attention along token orders."""

import copy
import pickle

import pytest
import torch
from helpers.backends_here import on

from dilkit import (
    DilatedAttention,
    DilatedSegment,
    GlobalTokens,
    MultiheadDilatedAttention,
    Pattern,
    SlidingWindow,
    TokenOrder,
    dilated_attention,
    order,
    ordered_dilated_attention,
)
from dilkit.oracle import oracle_attention
from dilkit.rotary import rotary_embedding

SHAPE, SEQ, HEADS, KV_HEADS, DIM = (6, 8), 49, 8, 4, 8
HILBERT = order(SHAPE, extra_tokens=1)
SNAKE = order(SHAPE, "snake", extra_tokens=1)
TURNED = order(SHAPE, "row-major", extra_tokens=1).transposed()
POINTS = TokenOrder.from_permutation(torch.randperm(48, generator=torch.Generator().manual_seed(1)).numpy(), extra_tokens=1)
IDENTITY = order((SEQ,))
PATTERN = Pattern([12, 24, 49], [1, 3, 5])
ORDERS = {
    "one": [HILBERT],
    "points": [POINTS],
    "two": [HILBERT, SNAKE],
    "three": [SNAKE, HILBERT, IDENTITY],
    "four": [HILBERT, SNAKE, TURNED, POINTS],
}
SEVERAL = pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])


def rows(heads=HEADS, kv_heads=KV_HEADS, seq=SEQ, dtype=torch.float64, grad=False):
    return [torch.randn(2, seq, n, DIM, dtype=dtype, requires_grad=grad) for n in (heads, kv_heads, kv_heads)]


def a_mask(seq=SEQ):
    mask = torch.rand(2, seq) < 0.3
    mask[1] = True  # nothing is seen at all
    return mask


def by_count(query, key, value, pattern, orders, mask=None, is_causal=False):
    heads, kv_heads = query.shape[2], key.shape[2]
    first = pattern.head_shard[0] if pattern.head_shard else 0
    counts = pattern.count(query.shape[1], heads, kv_heads=kv_heads, is_causal=is_causal)
    outs, lses = [], []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        place = torch.tensor(orders[(first + kv_head) % len(orders)].rank).long()
        seen = counts[head][place][:, place].expand(len(query), -1, -1)
        if mask is not None:
            seen = seen * ~mask[:, None]
        scores = DIM**-0.5 * query[:, :, head] @ key[:, :, kv_head].mT + seen.double().log()
        nothing = (seen == 0).all(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        outs.append(weights @ value[:, :, kv_head])
        lses.append(scores.masked_fill(nothing, 0.0).logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf))
    return torch.stack(outs, 2), torch.stack(lses, 1)


def assert_by_count(tensors, pattern, orders, mask=None, **options):
    found = ordered_dilated_attention(*tensors, pattern, orders, key_padding_mask=mask, return_lse=True, **options)
    expected = by_count(*tensors, pattern, orders, mask, options.get("is_causal", False))
    torch.testing.assert_close(found, expected)
    if tensors[0].requires_grad:
        weights = [torch.randn_like(x) for x in found]
        grads = [torch.autograd.grad(_loss(x, weights), tensors) for x in (found, expected)]
        torch.testing.assert_close(*grads)


def _loss(results, weights):
    return sum((x.masked_fill(x == -torch.inf, 0.0) * w).sum() for x, w in zip(results, weights, strict=True))


@pytest.mark.smoke
@SEVERAL
@MASKED
def test_it_is_the_permuted_count_with_gradients(orders, masked, poisoned):
    assert_by_count(rows(grad=True), PATTERN, orders, a_mask() if masked else None)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", on("cpu"))
def test_one_order_is_the_oracle_on_moved_tokens(backend):
    tensors = rows(kv_heads=HEADS, dtype=torch.float32)
    mask = a_mask()
    moved = [HILBERT.apply(x) for x in tensors]
    expected = HILBERT.restore(oracle_attention(*moved, PATTERN, key_padding_mask=HILBERT.apply(mask))[0])
    found = ordered_dilated_attention(*tensors, PATTERN, HILBERT, key_padding_mask=mask, backend=backend)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [
    Pattern([12, 24], [2, 4], offset="block"),
    Pattern([12, 24, 49], [1, 2, 3], overlap="once"),
    Pattern([12, 49], [2, 3], heads=[(0, 3), (2, 8)]),
    Pattern([12, 49], [2, 3], heads=[(1, 3), (5, 6)]),
    Pattern([12, 24], [3, 5], head_shard=(3, 9)),
    Pattern([12, 24], [3, 5], "block", heads=[None, (1, 7)], head_shard=(2, 7)),
    Pattern.of(DilatedSegment(16, 4), SlidingWindow(3), GlobalTokens(2)),
], ids=str)  # fmt: skip
@MASKED
def test_every_kind_of_pattern(pattern, masked):
    for orders in (ORDERS["two"], ORDERS["three"]):
        assert_by_count(rows(grad=True), pattern, orders, a_mask() if masked else None)


def test_a_shard_may_have_fewer_heads_than_there_are_orders():
    assert_by_count(rows(2, 1), Pattern([12, 24], [3, 5], head_shard=(3, 9)), ORDERS["two"])


@MASKED
def test_the_identity_changes_no_bit(masked):
    tensors, mask = rows(dtype=torch.float32), a_mask() if masked else None
    for orders in (IDENTITY, [order(SHAPE, "row-major", extra_tokens=1), IDENTITY]):
        for is_causal in (False, True):
            options = dict(key_padding_mask=mask, return_lse=True, is_causal=is_causal)
            found = ordered_dilated_attention(*tensors, PATTERN, orders, **options)
            assert all(map(torch.equal, found, dilated_attention(*tensors, PATTERN, **options)))


def test_equal_orders_are_one_order():
    tensors = rows()
    generated = order(SHAPE, extra_tokens=1, is_generation_order=True)
    assert len(DilatedAttention(PATTERN, orders=[generated] * 3).orders) == 1
    ordered_dilated_attention(*tensors, PATTERN, [generated] * 9, is_causal=True)


def test_causal_attention_along_an_order_is_refused_unless_it_is_how_tokens_are_generated():
    tensors = rows(grad=True)
    for given in (HILBERT, SNAKE, POINTS, TURNED):
        with pytest.raises(ValueError, match=r"is_causal=True along .* see their future.*is_generation_order=True"):
            ordered_dilated_attention(*tensors, PATTERN, given, is_causal=True)
    generated = [order(SHAPE, curve, extra_tokens=1, is_generation_order=True) for curve in ("hilbert", "snake")]
    with pytest.raises(ValueError, match=r"is_causal=True with 2 orders .* see their future: a token"):
        ordered_dilated_attention(*tensors, PATTERN, generated, is_causal=True)
    for one in generated:
        assert_by_count(tensors, PATTERN, [one], a_mask(), is_causal=True)
    assert_by_count(tensors, PATTERN, [order((SEQ,), is_generation_order=True)], is_causal=True)


@pytest.mark.parametrize("name", ["three", pytest.param("points", marks=pytest.mark.slow)])
def test_compiled(name):
    module, mask = DilatedAttention(PATTERN, orders=ORDERS[name]), a_mask()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    inputs = rows(grad=True)
    plain, found = (f(*inputs, key_padding_mask=mask, return_lse=True) for f in (module, compiled))
    torch.testing.assert_close(found, plain)
    weights = [torch.randn_like(x) for x in plain]
    torch.testing.assert_close(*(torch.autograd.grad(_loss(x, weights), inputs) for x in (found, plain)))


@SEVERAL
def test_vmap(orders):
    query, key, value = (torch.stack([x, 2 * x]) for x in rows())
    mask = torch.stack([a_mask(), a_mask()])

    def attend(query, key, value, mask):
        return ordered_dilated_attention(query, key, value, PATTERN, orders, key_padding_mask=mask)

    mapped = torch.func.vmap(attend)(query, key, value, mask)
    torch.testing.assert_close(mapped, torch.stack([attend(*x) for x in zip(query, key, value, mask, strict=True)]))


def test_the_module_is_the_function():
    tensors, mask = rows(), a_mask()
    options = dict(key_padding_mask=mask, return_lse=True)
    for given, orders in ((dict(order=HILBERT), HILBERT), (dict(orders=ORDERS["two"]), ORDERS["two"])):
        found = DilatedAttention(PATTERN, scale=0.3, **given)(*tensors, **options)
        expected = ordered_dilated_attention(*tensors, PATTERN, orders, scale=0.3, **options)
        assert all(map(torch.equal, found, expected))


def test_the_text_of_a_module_names_its_orders():
    assert "order=order((6, 8), 'hilbert', extra_tokens=1)" in str(DilatedAttention(PATTERN, order=HILBERT))
    assert "orders=[order((6, 8), 'hilbert'" in str(DilatedAttention(PATTERN, orders=ORDERS["two"]))
    assert "order" not in str(DilatedAttention(PATTERN))


def test_orders_that_are_the_same_under_two_names_are_told():
    wide = order((6, 8))  # a generalised curve goes along the longest side, also of the reversed grid
    with pytest.warns(UserWarning, match=r"order\(\(6, 8\), 'hilbert'\) and .*transposed\(\) are the same permutation"):
        DilatedAttention(PATTERN, orders=[wide, wide.transposed()])
    DilatedAttention(PATTERN, orders=[HILBERT, SNAKE, HILBERT])


def test_modules_are_copied_and_stored_as_without_orders():
    for orders in ORDERS.values():
        module = MultiheadDilatedAttention(16, HEADS, DilatedAttention(PATTERN, orders=orders))
        plain = MultiheadDilatedAttention(16, HEADS, DilatedAttention(PATTERN))
        assert module.state_dict().keys() == plain.state_dict().keys()
        x = torch.randn(2, SEQ, 16)
        for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert again.attention.orders == module.attention.orders
            assert torch.equal(again(x)[0], module(x)[0])


def test_rotary_positions_move_with_their_tokens():
    module = MultiheadDilatedAttention(
        64, HEADS, DilatedAttention(PATTERN, orders=ORDERS["two"]), rotary=True, dtype=torch.float64
    )
    x = torch.randn(2, SEQ, 64, dtype=torch.float64)
    query, key, value = (y.view(2, SEQ, HEADS, DIM) for y in torch.nn.functional.linear(x, module.in_proj_weight).chunk(3, -1))
    out, _ = by_count(rotary_embedding(query), rotary_embedding(key), value, PATTERN, ORDERS["two"])
    torch.testing.assert_close(module(x)[0], module.out_proj(out.reshape(2, SEQ, 64)))
