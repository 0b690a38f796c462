"""Biases and softcaps in every way of calling: modules, token orders, caches, weights, transforms; and what is refused."""

import copy
import math

import pytest
import torch
from helpers.calls import encode_call
from helpers.pairwise import all_but
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dilkit import (
    Alibi,
    CoordinateAlibi,
    CoordinateTable,
    DilatedAttention,
    DilatedCache,
    GridTable,
    MultiheadDilatedAttention,
    Pattern,
    RelativeTable,
    RowTable,
    attention_mass,
    attention_rows,
    dilated_attention,
    dilated_attention_varlen,
    order,
    ordered_dilated_attention,
    t5_buckets,
)
from dilkit.comm import ring_dilated_attention, run_threads
from dilkit.op.operators import backward_op, forward_op
from dilkit.op.scores import scores_of
from dilkit.oracle import oracle_attention

PATTERN = Pattern([8, 36], [1, 2])
HEADS, SEQ = 4, 36
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.05], dtype=torch.float64)


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


def qkv(batch=2, seq=SEQ):
    return normal(batch, seq, HEADS, 8), normal(batch, seq, 2, 8), normal(batch, seq, 2, 8)


def every_bias(batch=2, seq=SEQ):
    return dict(
        alibi=Alibi(SLOPES),
        coordinates=CoordinateAlibi(SLOPES, normal(batch, seq, 2)),
        table=RelativeTable(normal(HEADS, 12), t5_buckets(12, 20)),
        grid=GridTable(normal(HEADS, 5, 5), (6, 6)),
        cells=CoordinateTable(normal(HEADS, 5, 5), torch.randint(0, 9, (batch, seq, 2))),
        axes=CoordinateTable(normal(HEADS, 8), torch.randint(0, 9, (batch, seq, 2)), (3, 5)),
        rows=RowTable(normal(batch, HEADS, seq, 9)),
        split=RowTable(normal(batch, HEADS, seq, 12), (6, 6), (5, 7)),
    )


KINDS = tuple(every_bias())


@pytest.fixture
def nothing_traced():
    """Keep sizes static, whatever was compiled before or is later."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orders", [1, 2])
def test_along_an_order_positions_are_those_of_the_rows_as_given(kind, orders):
    """A dense pattern, and so a bias of row-major positions, is the same along any order."""
    along = [order((6, 6)), order((6, 6), "morton")][:orders]
    bias, (q, k, v) = every_bias()[kind], qkv()
    found = ordered_dilated_attention(q, k, v, Pattern.dense(), along, bias=bias, softcap=2.0)
    torch.testing.assert_close(found, oracle_attention(q, k, v, Pattern.dense(), bias=bias, softcap=2.0)[0])
    inner = DilatedAttention(Pattern.dense(), orders=along, bias=bias, softcap=2.0)
    torch.testing.assert_close(inner(q, k, v), found)


@pytest.mark.parametrize("kind", KINDS)
def test_mass_and_rows_are_those_of_the_biased_scores(kind):
    bias, (q, k, _) = every_bias()[kind], qkv()
    options = dict(bias=bias, softcap=1.5)
    rows = attention_rows(q, k, PATTERN, range(SEQ), **options)
    unit = torch.eye(SEQ, dtype=torch.float64).expand(2, 2, SEQ, SEQ).transpose(1, 2)
    wide = (torch.nn.functional.pad(x, (0, SEQ - 8)) for x in (q, k))
    right = oracle_attention(*wide, unit, PATTERN, scale=8**-0.5, **options)[0].transpose(1, 2)
    torch.testing.assert_close(rows, right)
    torch.testing.assert_close(attention_mass(q, k, PATTERN, **options), right.sum(2))


def test_a_module_keeps_the_weights_of_its_bias():
    table = nn.Parameter(normal(HEADS, 7))
    layer = MultiheadDilatedAttention(32, HEADS, DilatedAttention(PATTERN, bias=RelativeTable(table), softcap=3.0)).double()
    assert "attention.bias_weights" in layer.state_dict()
    other = copy.deepcopy(layer)
    other.attention.bias_weights.data.zero_()
    other.load_state_dict(layer.state_dict())
    x = normal(2, SEQ, 32)
    torch.testing.assert_close(other(x)[0], layer(x)[0])
    layer(x)[0].sum().backward()
    assert layer.attention.bias_weights.grad.any()
    fixed = MultiheadDilatedAttention(32, HEADS, DilatedAttention(PATTERN, bias=Alibi(SLOPES)))
    assert "attention.bias_weights" in fixed.state_dict()  # a buffer


def test_a_layer_is_given_the_coordinates_of_a_call_and_passes_them_on():
    layer = MultiheadDilatedAttention(32, HEADS, DilatedAttention(PATTERN, bias=Alibi(SLOPES))).double()
    x, coordinates = normal(1, SEQ, 32), normal(SEQ, 2)
    bias = CoordinateAlibi(SLOPES, coordinates)
    own = MultiheadDilatedAttention(32, HEADS, DilatedAttention(PATTERN, bias=bias)).double()
    own.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x, score_bias=bias)[0], own(x)[0])
    packed = layer(x[0], cu_seqlens=torch.tensor([0, SEQ], dtype=torch.int32), score_bias=bias)[0]
    torch.testing.assert_close(packed, own(x)[0][0])
    assert not torch.allclose(layer(x)[0], own(x)[0])
    cache, whole = DilatedCache(PATTERN, HEADS), layer.eval()(x, is_causal=True, score_bias=bias)[0]
    with torch.no_grad():
        for start, stop in ((0, 7), (7, SEQ)):
            seen = CoordinateAlibi(SLOPES, coordinates[:stop])
            out = layer(x[:, start:stop], is_causal=True, cache=cache, score_bias=seen)[0]
            torch.testing.assert_close(out, whole[:, start:stop])


@pytest.mark.usefixtures("nothing_traced")
@pytest.mark.parametrize("kind", all_but(["alibi", "grid"], KINDS))
def test_under_torch_compile_nothing_changes(kind):
    bias, (q, k, v) = every_bias()[kind], qkv()

    def attend(q, weights):
        own = bias.with_weights(weights)
        return dilated_attention(q, k, v, PATTERN, bias=own, softcap=2.0, backend="reference")

    found = []
    for call in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        leaves = q.clone().requires_grad_(), bias.weights.clone().requires_grad_()
        out = call(*leaves)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found)


def test_the_operators_pass_the_checks_of_torch():
    q, k, v = (x.requires_grad_() for x in qkv(1))
    scores = scores_of(CoordinateAlibi(SLOPES.clone().requires_grad_(), normal(SEQ, 2)), 2.0, q, PATTERN, 2)
    call = encode_call(PATTERN, False, True, "reference", 0.0, scores.softcap, scores.form)
    tensors = [None if x is None else x.detach().requires_grad_(x.requires_grad) for x in scores.tensors]
    given = q, k, v, None, 0.3, call, None, None, None, None, *tensors
    torch.library.opcheck(forward_op, given)
    out, lse = forward_op(*given)
    saved = (x.detach() for x in (torch.ones_like(out), q, k, v, out, lse))
    torch.library.opcheck(backward_op, (*saved, None, 0.3, call, None, None, None, None, *(x.detach() for x in tensors)))


@pytest.mark.parametrize("mapped", ["inputs", "weights", "coordinates"])
def test_mapped_by_vmap(mapped):
    q, k, v = (normal(3, 1, SEQ, HEADS, 8) for _ in range(3))
    slopes, places = SLOPES.expand(3, HEADS) * torch.arange(1, 4)[:, None], normal(3, 1, SEQ, 2)
    dims = (0, 0, 0, 0 if mapped == "weights" else None, 0 if mapped == "coordinates" else None)

    def attend(q, k, v, slopes, places):
        return dilated_attention(q, k, v, PATTERN, bias=CoordinateAlibi(slopes, places), backend="reference")

    given = q, k, v, *(x if dim == 0 else x[0] for x, dim in zip((slopes, places), dims[3:], strict=True))
    found = torch.vmap(attend, dims)(*given)
    one_by_one = [attend(*(x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True))) for i in range(3)]
    torch.testing.assert_close(found, torch.stack(one_by_one))


def weight_gradients(attend, weights):
    leaf = weights.detach().requires_grad_()
    return torch.autograd.grad(attend(leaf).sin().sum(), leaf)[0]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_mapped_by_vmap_have_their_gradients(kind, packed):
    bias, (q, k, v), starts = every_bias(1)[kind], qkv(1), torch.tensor([0, 20, SEQ], dtype=torch.int32)

    def attend(weights):
        own = bias.with_weights(weights)
        if packed:
            return dilated_attention_varlen(q[0], k[0], v[0], PATTERN, starts, bias=own, backend="reference")
        return dilated_attention(q, k, v, PATTERN, bias=own, backend="reference")

    weights = torch.stack([bias.weights, 2 * bias.weights])
    one_by_one = weight_gradients(lambda x: torch.stack(list(map(attend, x))), weights)
    torch.testing.assert_close(weight_gradients(torch.vmap(attend), weights), one_by_one)


@pytest.mark.parametrize("kind", ["alibi", "coordinates", "grid"])  # the range of buckets is looked at, which is not traced
def test_a_graph_traced_without_gradients_has_those_of_the_weights(kind):
    bias, (q, k, v) = every_bias()[kind], qkv()

    def attend(weights):
        return dilated_attention(q, k, v, PATTERN, bias=bias.with_weights(weights), softcap=2.0, backend="reference")

    graph = make_fx(attend)(bias.weights)
    torch.testing.assert_close(weight_gradients(graph, bias.weights), weight_gradients(attend, bias.weights))


def test_mapped_coordinates_that_require_a_gradient_are_refused():
    coordinates = torch.zeros(3, 6, 2, requires_grad=True)
    with pytest.raises(ValueError, match="coordinates of the bias require a gradient, which is not computed"):
        torch.vmap(lambda x: calls(bias=CoordinateAlibi(TWO, x), backend="reference"))(coordinates)


def test_coordinates_that_alone_require_a_gradient_are_refused():
    bias = CoordinateAlibi(TWO, coordinates := torch.zeros(6, 2))
    coordinates.requires_grad_()
    with pytest.raises(ValueError, match="coordinates of the bias require a gradient, which is not computed"):
        calls(bias=bias, backend="reference")


def test_under_autocast_weights_keep_their_digits():
    q, k, v = (x.float() for x in qkv())
    bias = Alibi(SLOPES.float() + 1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        out = dilated_attention(q, k, v, PATTERN, bias=bias)
    half = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(out, dilated_attention(*half, PATTERN, bias=bias))


Q, K, V = torch.zeros(1, 6, 2, 4), torch.zeros(1, 6, 2, 4), torch.zeros(1, 6, 2, 4)
TWO = torch.ones(2)
FAR, FAR_GRID = torch.full((6, 2), 2.0**24 + 1, dtype=torch.float64), GridTable(torch.ones(2, 3), (2**24 + 2,))
ROWS = RowTable(torch.ones(1, 2, 6, 3))


def calls(**options):
    return dilated_attention(Q, K, V, Pattern.dense(), **options)


def packed(**options):
    return dilated_attention_varlen(Q[0], K[0], V[0], Pattern.dense(), torch.tensor([0, 2, 6], dtype=torch.int32), **options)


def on_ranks(bias):
    run_threads(2, lambda comm: ring_dilated_attention(Q, K, V, Pattern.dense(), comm, bias=bias))


WRONG = [
    (lambda: Alibi(torch.tensor([math.inf, 1.0])), ValueError, r"slopes\[0\] is inf"),
    (lambda: CoordinateAlibi(TWO, torch.zeros(6)), ValueError, r"coordinates has shape \(6,\)"),
    (lambda: CoordinateAlibi(TWO, torch.zeros(6, 4)), ValueError, "1 to 3 numbers a row"),
    (
        lambda: CoordinateAlibi(TWO, torch.full((6, 2), -300.0).bfloat16()),
        ValueError,
        "reach 300, .*bfloat16.* up to 256 .*float",
    ),
    (lambda: CoordinateAlibi(TWO, torch.full((6, 2), 2050.0).half()), ValueError, "coordinates reach 2,050, but torch.float16"),
    (lambda: CoordinateAlibi(TWO, torch.full((6, 2), 2.0**25)), ValueError, "reach 33,554,432, .*float32.* up to 16,777,216"),
    (lambda: calls(bias=CoordinateAlibi(TWO, FAR)), ValueError, "coordinates reach 16,777,217.*query in float64"),
    (lambda: calls(bias=FAR_GRID), ValueError, r"shape=\(16777218,\) of the bias reach 16,777,217"),
    (lambda: packed(bias=FAR_GRID), ValueError, r"shape=\(16777218,\) of the bias reach 16,777,217"),
    (lambda: DilatedCache(PATTERN, 2).attend(Q, K, V, bias=FAR_GRID), ValueError, "of the bias reach 16,777,217"),
    (lambda: on_ranks(FAR_GRID), ValueError, "of the bias reach 16,777,217"),
    (lambda: RelativeTable(torch.ones(2)), ValueError, r"table has shape \(2,\)"),
    (lambda: RelativeTable(torch.ones(2, 4), torch.tensor([0, 1, 4])), ValueError, "buckets are from 0 to 4; 0 to 3"),
    (lambda: GridTable(torch.ones(2, 3, 3), (0, 3)), ValueError, "shape=0 must be at least 1"),
    (lambda: t5_buckets(3), ValueError, "num_buckets=3"),
    (lambda: t5_buckets(32, 8), ValueError, "max_distance=8"),
    (lambda: calls(bias=CoordinateAlibi(TWO, torch.zeros(2, 6, 2))), ValueError, r"shape \(2, 6, 2\); \(1, 6, 1 to 3\)"),
    (lambda: calls(bias=GridTable(torch.ones(2, 3, 3), (2, 2))), ValueError, "grid of 4 tokens; at least the 6 of query"),
    (lambda: packed(bias=GridTable(torch.ones(2, 3, 3), (1, 3))), ValueError, "grid of 3 tokens; at least the 4 of query"),
    (lambda: calls(bias=RowTable(torch.ones(1, 2, 5, 3))), ValueError, r"values .* \(1, 5\); those of query, \(1, 6\)"),
    (lambda: calls(bias=RowTable(torch.ones(1, 2, 6, 8), (1, 5), (3, 5))), ValueError, "grid of 5 tokens; at least the 6"),
    (lambda: RowTable(torch.ones(1, 2, 6, 4)), ValueError, "values has 4 columns, .* odd number"),
    (lambda: RowTable(torch.ones(1, 2, 6, 4), (2, 3)), ValueError, r"sizes=\(3, 5\); an odd size for each of 2 axes.* 4 columns"),
    (lambda: CoordinateTable(torch.ones(2, 7), torch.zeros(6, 2).long(), (3, 4)), ValueError, r"sizes=\(3, 4\); an odd size"),
    (
        lambda: DilatedCache(PATTERN, 2).attend(Q, K, V, bias=ROWS),
        ValueError,
        "bias=RowTable has values for each query, of which caches keep none",
    ),
    (lambda: on_ranks(ROWS), ValueError, "bias=RowTable has values for each query, which ranks do not exchange"),
    (
        lambda: DilatedAttention(PATTERN, bias=RowTable(nn.Parameter(ROWS.values))),
        ValueError,
        "values of the bias require a gradient, but are of the queries of one call",
    ),
    (
        lambda: DilatedAttention(PATTERN, bias=RelativeTable(nn.Parameter(torch.ones(2, 3)) * 2)),
        ValueError,
        "table of the bias require a gradient, but are no parameter.* in each call",
    ),
    (lambda: calls(bias=ROWS, query_offset=1), ValueError, "bias by query: as many queries as keys"),
    (lambda: calls(softcap=0), ValueError, "softcap=0 must be more than 0"),
    (lambda: calls(softcap=math.inf), ValueError, "softcap"),
    (lambda: calls(softcap=2.0, backend="sdpa"), ValueError, "softcap 2: caps no scores"),
]
"""Faults that are not in `tests/core/malformed`, and limits."""


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_is_no_bias_is_refused(number):
    call, error, told = WRONG[number]
    with pytest.raises(error, match=told):
        call()


@pytest.mark.usefixtures("nothing_traced")
def test_a_packed_sequence_longer_than_the_grid_is_refused_by_a_graph_too():
    bias, starts = GridTable(torch.ones(2, 3, 3), (2, 2)), torch.tensor([0, 5, 6], dtype=torch.int32)
    attend = torch.compile(
        lambda cu: dilated_attention_varlen(Q[0], K[0], V[0], Pattern.dense(), cu, 6, bias=bias), backend="aot_eager"
    )
    with pytest.raises(RuntimeError, match="more rows than the 4 of the bias"):
        attend(starts)
