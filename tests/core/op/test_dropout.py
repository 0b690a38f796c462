"""Dropout."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from helpers.backends_here import on
from helpers.calls import TORCH_WARNS, close, differentiated, encode_call, random_leaves
from hypothesis import given, strategies as st
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dilkit
from dilkit import (
    DilatedAttention,
    DilatedCache,
    MultiheadDilatedAttention,
    Pattern,
    Problem,
    dilated_attention,
    dilated_attention_varlen,
    order,
    ordered_dilated_attention,
)
from dilkit.backends.native import _native
from dilkit.inputs import Inputs
from dilkit.op.dropout import Dropout, draw_seed, philox
from dilkit.op.operators import backward_op, forward_op
from dilkit.threads import torch_threads

PATTERN = Pattern([8, 16, 64], [1, 2, 4])
ABLE = [name for name in on("cpu") if dilkit.registry.backends()[name].limits.dropout]
LOW = 2**32 - 1


def tensors(seq=37, heads=(4, 2), seed=0, dtype=torch.float64):
    return random_leaves(*((2, seq, h, 6) for h in (heads[0], heads[1], heads[1])), seed=seed, dtype=dtype)


def seeded(attend, seed=3):
    def call(*inputs, **options):
        torch.manual_seed(seed)
        return attend(*inputs, **options)

    return call


def drawn(p, seed=3, **where):
    return Dropout(p, int(draw_seed(torch.Generator().manual_seed(seed))), **where)


def mask_of(seq, heads, p, dtype=torch.float32, **options):
    """Return a dense call's kept weights, `(batch, heads, seq, seq)`, read from results of unit vectors."""
    zeros = torch.zeros(2, seq, heads, seq, dtype=dtype)
    value = torch.eye(seq, dtype=dtype)[:, None].expand(2, seq, heads, seq).contiguous()
    out = seeded(dilated_attention)(zeros, zeros, value, Pattern.dense(), dropout_p=p, **options)
    return out.transpose(1, 2) > 0


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0, 0, 0, 0], [0, 0], "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([LOW] * 4, [LOW] * 2, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_known_answers_of_philox(counter, key, words):
    found = philox(tuple(torch.tensor([x]) for x in counter), key[0] | key[1] << 32)
    assert " ".join(f"{int(x):08x}" for x in found) == words


def plainly_kept(seed, p, batch, head, i, j):
    """The definition once more, in Python's integers."""
    x, key = [j // 4 & LOW, i & LOW, batch, head | (i >> 32) << 16 | (j >> 34) << 24], [seed & LOW, seed >> 32]
    for _ in range(7):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = [b >> 32 ^ x[1] ^ key[0], b & LOW, a >> 32 ^ x[3] ^ key[1], a & LOW]
        key = [(key[0] + 0x9E3779B9) & LOW, (key[1] + 0xBB67AE85) & LOW]
    return x[j % 4] >= round(p * 2**32)


@given(
    st.integers(0, 2**63 - 1),
    st.floats(0.01, 0.99),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**16 - 4), *[st.integers(0, 2**40 - 99)] * 2), min_size=1),
    st.integers(1, 5),
)
def test_places_of_any_size(seed, p, places, step):
    lines = torch.tensor([(*place, step) for place in places])
    kept = Dropout(p, seed, places=lines).kept(2, torch.arange(2), torch.arange(5), len(places))
    for at, (batch, head, i, j) in enumerate(places):
        for h, a, b in product(range(2), range(2), range(5)):
            assert bool(kept[at, h, a, b]) == plainly_kept(seed, p, batch, head + h, i + step * a, j + step * b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", _native.instruction_sets())
def test_every_instruction_set_and_number_of_threads_drops_the_same(isa, dtype, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    rows = torch.arange(203)
    want = drawn(0.3).kept(2, rows, rows, 2)
    for threads in (1, 3):
        with torch_threads(threads):
            assert torch.equal(mask_of(203, 2, 0.3, dtype, backend="native"), want)


@pytest.mark.parametrize("backend", on("cpu"))
def test_none_dropped_is_the_call_without_dropout_to_the_bit(backend):
    inputs, before = tensors(dtype=torch.float32), torch.get_rng_state()
    found, want = (
        differentiated(lambda q, k, v, o=o: dilated_attention(q, k, v, PATTERN, backend=backend, return_lse=True, **o), inputs)
        for o in (dict(dropout_p=0.0), {})
    )
    assert all(torch.equal(got, right) for got, right in zip(found, want, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("masked", [False, True])
def test_orders_drop_by_places_along_them(masked):
    pattern, orders = Pattern([12, 48], [1, 3]), [order((6, 8)), order((6, 8), "snake")]
    q, k, v = (x.detach() for x in tensors(48))
    options = dict(key_padding_mask=torch.zeros(2, 48, dtype=torch.bool)) if masked else {}
    found = seeded(ordered_dilated_attention)(q, k, v, pattern, orders, dropout_p=0.5, **options)
    for head, along in enumerate(orders):
        rows = [along.apply(x) for x in (q, k, v)]
        want = along.restore(seeded(dilated_attention)(*rows, pattern, dropout_p=0.5))
        torch.testing.assert_close(found[:, :, 2 * head : 2 * head + 2], want[:, :, 2 * head : 2 * head + 2])


@pytest.mark.parametrize("backend", ABLE)
def test_packed_sequences_are_numbered(backend):
    """Equal lengths are a batch; others are numbered as its elements. To the bit on `native`."""
    options = dict(is_causal=True, dropout_p=0.4, backend=backend, return_lse=True)
    qkv = [x.detach() for x in tensors(20, dtype=torch.float32)]
    flat, cut = [x.flatten(0, 1) for x in qkv], torch.tensor([0, 20, 40], dtype=torch.int32)
    out, lse = seeded(dilated_attention_varlen)(*flat, PATTERN, cut, **options)
    want, want_lse = seeded(dilated_attention)(*qkv, PATTERN, **options)
    close([out.unflatten(0, (2, 20)), lse], [want, torch.cat([*want_lse], 1)], 1e-6)
    uneven, call = torch.tensor([0, 3, 3, 40], dtype=torch.int32), encode_call(PATTERN, True, False, backend, 0.4)
    out, lse = seeded(dilated_attention_varlen)(*flat, PATTERN, uneven, **options)
    place = torch.tensor([[2, 0, 0, 0, 1]])
    alone = forward_op(*(x[None, 3:] for x in flat), None, 6**-0.5, call, None, None, seeded(draw_seed)(), place)
    assert torch.equal(out[3:], alone[0][0])
    assert torch.equal(lse[:, 3:], alone[1][0])


def test_activation_checkpointing_drops_the_same_again():
    def layer(q, k, v):
        return dilated_attention(q.sin(), k, v, PATTERN, dropout_p=0.5)

    inputs = tensors()
    want = torch.autograd.grad(seeded(layer)(*inputs).square().sum(), inputs)
    found = torch.autograd.grad(seeded(lambda *x: checkpoint(layer, *x, use_reentrant=False))(*inputs).square().sum(), inputs)
    close(list(found), list(want))


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
def test_vmap_is_refused(randomness):
    inputs = [torch.stack([x.detach()] * 2) for x in tensors()]
    with pytest.raises(RuntimeError, match=r"random|dropout_p > 0"):
        torch.vmap(lambda *x: dilated_attention(*x, PATTERN, dropout_p=0.5), randomness=randomness)(*inputs)


@TORCH_WARNS
def test_opcheck():
    inputs, call, seed = tensors(20), encode_call(PATTERN, True, True, "reference", 0.3), torch.tensor(5)
    for places in (None, torch.tensor([[3, 0, 7, 9, 2], [4, 1, 0, 0, 1]])):
        torch.library.opcheck(forward_op, (*inputs, None, 0.3, call, None, None, seed, places))
        out, lse = forward_op(*inputs, None, 0.3, call, None, None, seed, places)
        saved = [x.detach() for x in (*inputs, out, lse)]
        torch.library.opcheck(backward_op, (torch.randn_like(saved[3]), *saved, None, 0.3, call, None, None, seed, places))


@pytest.mark.usefixtures("fresh_compiler")
@TORCH_WARNS
def test_compiled_calls_draw_seeds_of_their_own():
    compiled = []

    def counting(graph, inputs):
        compiled.append(1)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def two_layers(q, k, v):
        first, second = (dilated_attention(q, k, v, PATTERN, dropout_p=0.5) for _ in range(2))
        return first, second

    fast, inputs = torch.compile(two_layers, backend=counting, fullgraph=True), tensors()
    for seed in (3, 4, 5):
        found, want = (seeded(step, seed)(*inputs) for step in (fast, two_layers))
        assert not torch.equal(*found)
        close([*found, *torch.autograd.grad(found[0].sum(), inputs)], [*want, *torch.autograd.grad(want[0].sum(), inputs)])
    assert len(compiled) == 1


def wave(q, k, v):
    """Two calls between functions that cost little to compute again."""
    first, second = (dilated_attention(q.sin(), k.cos(), v.sin(), PATTERN, dropout_p=0.5) for _ in range(2))
    return (first.sin() * second.cos()).exp()


def drawn_again(*inputs):
    return checkpoint(wave, *inputs, use_reentrant=False)


def selectively(*inputs):
    contexts = partial(create_selective_checkpoint_contexts, lambda *call, **options: CheckpointPolicy.PREFER_RECOMPUTE)
    return checkpoint(wave, *inputs, use_reentrant=False, context_fn=contexts)


@pytest.mark.usefixtures("fresh_compiler")
@TORCH_WARNS
@pytest.mark.parametrize(("function", "budget"), [(wave, 0.1), (wave, 0.01), (drawn_again, 0.3), (selectively, 0.3)])
def test_backward_passes_that_compute_again_draw_no_other_seed(function, budget):
    fast, inputs = torch.compile(function, backend="aot_eager_decomp_partition"), tensors(8)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        found, want = (seeded(step, 3)(*inputs) for step in (fast, wave))
        close(*([out, *torch.autograd.grad(out.sum(), inputs)] for out in (found, want)))


@pytest.mark.usefixtures("fresh_compiler")
@TORCH_WARNS
def test_a_budget_that_saves_nothing_is_refused():
    fast = torch.compile(wave, backend="aot_eager_decomp_partition")
    with (
        torch._functorch.config.patch(activation_memory_budget=0),
        pytest.raises(Exception, match="activation_memory_budget=0 has"),
    ):
        fast(*tensors(8))


def test_the_module_drops_in_training_alone():
    layer = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), dropout=0.5).double()
    plain = MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN)).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(2, 37, 24, dtype=torch.float64)
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])
    assert "dropout=0.5" in repr(layer)
    layer.train()
    first, again = (seeded(layer)(x)[0] for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, plain(x)[0])
    cut = torch.tensor([0, 37, 74], dtype=torch.int32)
    torch.testing.assert_close(seeded(layer)(x.flatten(0, 1), cu_seqlens=cut)[0].unflatten(0, (2, 37)), first)
    cache = DilatedCache(PATTERN, 4)
    with pytest.raises(ValueError, match=r"cache is given with dropout_p=0.5.*eval\(\)"):
        layer(x[:, :1], is_causal=True, cache=cache)


@pytest.mark.parametrize("p", [2**-32, 0.1, 1 / 3, 1 - 1e-9, 1 - 2**-32])
def test_the_expectation_of_a_weight_is_the_weight(p):
    dropout = Dropout(p, seed=0)
    words_kept = 2**32 - dropout.threshold
    assert abs(words_kept / 2**32 - (1 - p)) <= 2**-33
    assert dropout.factor * words_kept / 2**32 == 1


LIMITS = r"dropout_p=.* must be 0, or from 2\*\*-32 = 2.3283.*e-10 to 1 - 2\*\*-32 = 0.99999999976"
NONE = [
    *((p, ValueError, LIMITS) for p in (1e-12, 1e-300, 1 - 1e-12, math.nextafter(1, 0))),  # would drop nothing, or everything
    *((p, ValueError, "dropout_p=.* must be") for p in (-0.1, 1.0, 1.5, math.nan)),
    *((p, TypeError, "dropout_p=.*a number is needed") for p in ("0.1", True, None)),
]


@pytest.mark.parametrize(("p", "error", "text"), NONE, ids=str)
def test_what_is_no_probability(p, error, text):
    inputs, cut = tensors(), torch.tensor([0, 37], dtype=torch.int32)
    calls = [
        lambda: dilated_attention(*inputs, PATTERN, dropout_p=p),
        lambda: dilated_attention_varlen(*(x[0] for x in inputs), PATTERN, cut, dropout_p=p),
        lambda: ordered_dilated_attention(*inputs, PATTERN, order((37,)), dropout_p=p),
        lambda: Problem(pattern=PATTERN, seq=8, heads=1, head_dim=8, dropout_p=p),
    ]
    for call in calls:
        with pytest.raises(error, match=text):
            call()
    with pytest.raises(error, match=text.replace("dropout_p", "dropout")):
        MultiheadDilatedAttention(24, 4, DilatedAttention(PATTERN), dropout=p)


@pytest.mark.parametrize("backend", [name for name in on("cpu") if name not in ABLE])
def test_backends_that_drop_nothing_refuse(backend):
    with pytest.raises(ValueError, match=r"dropout_p 0.1: drops no weights"):
        dilated_attention(*tensors(), PATTERN, dropout_p=0.1, backend=backend)
    dilated_attention(*tensors(), PATTERN, dropout_p=0.1, backend=[backend, "native"])


def test_more_heads_than_can_be_told_apart():
    with pytest.raises(ValueError, match=r"batch, seq and heads can be at most .* with dropout_p=0.1"):
        Problem(pattern=PATTERN, seq=8, heads=2**17, head_dim=1, dropout_p=0.1)


CALL = encode_call(PATTERN, False, False, "native", 0.3)


@pytest.mark.parametrize(
    ("seed", "places", "error", "text"),
    [
        (None, None, TypeError, "dropout_seed is a NoneType; an int64"),
        (torch.tensor(1.0), None, ValueError, "dropout_seed is torch.float32"),
        (torch.tensor([1]), None, ValueError, r"dropout_seed is torch.int64 \(1,\)"),
        (torch.tensor(1), torch.zeros(2, 4, dtype=torch.int64), ValueError, r"dropout_places is torch.int64 \(2, 4\)"),
        (torch.tensor(1), torch.zeros(2, 5), ValueError, "dropout_places is torch.float32"),
        (torch.tensor(1), torch.zeros(5, 2, dtype=torch.int64).mT, ValueError, "dropout_places .* contiguous"),
    ],
)
def test_seeds_and_places_that_do_not_fit(seed, places, error, text):
    inputs = [x.detach() for x in tensors()]
    with pytest.raises(error, match=text):
        forward_op(*inputs, None, 0.3, CALL, None, None, seed, places)


def test_the_kernel_takes_no_places_beyond_their_memory():
    from dilkit.backends.native.backend import Native

    q, k, v = (x.detach() for x in tensors())
    problem = Problem.of(q, k, PATTERN, dropout_p=0.3)
    with pytest.raises(ValueError, match=r"places has shape \(1, 5\); int64 \(2, 5\)"):
        Native().forward(Inputs(q, k, v, dropout=Dropout(0.3, 1, places=torch.zeros(1, 5, dtype=torch.int64))), problem)
