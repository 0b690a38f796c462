"""`dilated_attention_with_kvcache`."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.calls import encode_call
from helpers.fakes import Fake, registered
from helpers.pairwise import every_pair
from helpers.strategies import Heads
from hypothesis import given, strategies as st
from torch import Tensor
from torch.autograd import forward_ad

from dilkit import BlockSparse, DilatedCache, GlobalTokens, Pattern, SlidingWindow, Strided, dilated_attention_with_kvcache
from dilkit.backends.native.backend import Native, _instruction_sets
from dilkit.op.kvcache import last_rows_op
from dilkit.op.overlap import overlaps_itself, share_memory
from dilkit.oracle import oracle_attention

ABLE = ["native", "sdpa", "reference"]
PATTERN = Pattern([8, 16, 64], [1, 2, 4])


def whole(batch: int, seq: int, heads: Heads = (4, 2), dtype: torch.dtype = torch.float64, head_dim: int = 6) -> list[Tensor]:
    draw, sizes = torch.Generator().manual_seed(seq), (heads[0], *heads[1:] * 2)
    return [torch.randn(batch, seq, h, head_dim, generator=draw, dtype=torch.float64).to(dtype) for h in sizes]


def last_rows(qkv: list[Tensor], lengths: list[int], rows: int, pattern: Pattern, capacity: int, **options):
    """The last `rows` of sequences that have these lengths with them; all of the cache beyond them is NaN."""
    query, key, value = qkv
    caches = [x.new_full((len(lengths), capacity, *x.shape[2:]), float("nan")) for x in (key, value)]
    for b, length in enumerate(lengths):
        for cache, x in zip(caches, (key, value), strict=True):
            cache[b, : length - rows] = x[b, : length - rows]
    at = [slice(length - rows, length) for length in lengths]
    chunks = [torch.stack([x[b, cut] for b, cut in enumerate(at)]) for x in (query, key, value)]
    before = torch.tensor([length - rows for length in lengths], dtype=torch.int32)
    new = dict(key=chunks[1], value=chunks[2], cache_seqlens=before)
    return dilated_attention_with_kvcache(chunks[0], *caches, pattern, **new, return_lse=True, **options)


ROUNDED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.mark.parametrize(("isa", "dtype", "head_dim"), every_pair(_instruction_sets(), ROUNDED, [1, 15, 48, 130]), ids=str)
def test_few_rows(isa, dtype, head_dim, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", isa)
    qkv, sink, tolerance = whole(3, 300, (6, 2), dtype, head_dim), torch.zeros(6, dtype=dtype), ROUNDED[dtype]
    for rows, lengths in ((1, [300, 1, 133]), (2, [133, 90, 3]), (40, [165, 40, 300])):
        out, lse = last_rows(qkv, lengths, rows, PATTERN, 304, backend="native", sink=sink)
        for b, length in enumerate(lengths):
            given = [x[b : b + 1, :length].double() for x in qkv]
            right, right_lse = oracle_attention(*given, PATTERN, is_causal=True, sink=sink.double())
            torch.testing.assert_close(out[b].double(), right[0, -rows:], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(lse[b].double(), right_lse[0, :, -rows:], rtol=tolerance, atol=tolerance)


def test_a_cache_that_has_the_keys_already_is_not_written_to():
    query, key, value = whole(1, 20)
    lengths, caches = torch.tensor([20], dtype=torch.int32), (key.clone(), value.clone())
    out = dilated_attention_with_kvcache(query[:, -3:], *caches, PATTERN, cache_seqlens=lengths)
    torch.testing.assert_close(out, oracle_attention(query, key, value, PATTERN, is_causal=True)[0][:, -3:])
    assert torch.equal(caches[0], key)


def test_compiled():
    query, key, value = whole(1, 20)
    step = torch.compile(dilated_attention_with_kvcache, backend="aot_eager", fullgraph=True)
    caches, lengths = [torch.zeros_like(x) for x in (key, value)], torch.zeros(1, dtype=torch.int32)
    out = step(query, *caches, PATTERN, key=key, value=value, cache_seqlens=lengths)
    torch.testing.assert_close(out, oracle_attention(query, key, value, PATTERN, is_causal=True)[0])
    assert torch.equal(caches[1], value)


QUERY, KEY, VALUE = (x[:, :2] for x in whole(2, 2))
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)
WRONG = {
    "beyond the capacity": (dict(cache_seqlens=LENGTHS + 2), ValueError, r"cache_seqlens\[1\]=7 and 2 new rows: .* capacity 8"),
    "below zero": (dict(cache_seqlens=LENGTHS - 4), ValueError, r"cache_seqlens\[0\]=-1"),
    "fewer keys than rows": (dict(query=whole(2, 7)[0]), ValueError, r"cache_seqlens\[0\]=3 and 2 new rows are fewer than the 7"),
    "int64": (dict(cache_seqlens=LENGTHS.long()), TypeError, "cache_seqlens is torch.int64"),
    "another batch": (dict(cache_seqlens=LENGTHS[:1]), ValueError, r"cache_seqlens has shape \(1,\)"),
    "lengths of another device": (dict(cache_seqlens=LENGTHS.to("meta")), ValueError, "cache_seqlens is on meta"),
    "a key without a value": (dict(value=None), ValueError, "key and value go together"),
    "another dtype": (dict(key=KEY.float()), ValueError, "key is torch.float32 on cpu; torch.float64"),
    "other heads": (dict(key=KEY[:, :, :1], value=VALUE[:, :, :1]), ValueError, r"key has shape \(2, 2, 1, 6\)"),
    "caches of two shapes": (dict(v_cache=torch.zeros(2, 9, 2, 6).double()), ValueError, r"v_cache has shape \(2, 9, 2, 6\)"),
    "another head_dim": (dict(query=QUERY[..., :5].contiguous()), ValueError, r"k_cache has shape \(2, 8, 2, 6\)"),
    "a sink of other heads": (dict(sink=torch.zeros(2)), ValueError, r"sink has shape \(2,\); \(heads,\) = \(4,\)"),
    "a gradient": (dict(query=QUERY.clone().requires_grad_()), ValueError, "requires a gradient"),
    "a backend that cannot": (dict(backend="plain"), ValueError, "kv_cache yes: not supported"),
    "another grid": (dict(pattern=Pattern.natten((2, 3), 1)), ValueError, "seq=5: the neighborhood is of a grid of 2 x 3"),
    "no pattern": (dict(pattern=[8]), TypeError, "a dilkit.Pattern is needed"),
}


def views(step: int) -> tuple[Tensor, Tensor]:
    memory = torch.full((400,), 3.0, dtype=torch.float64)
    return tuple(memory.as_strided((2, 8, 2, 6), (96, 12, 6, 1), first) for first in (0, step))


CACHE = torch.full((2, 8, 2, 6), 3.0, dtype=torch.float64)
LARGE = torch.full((2, 8, 4, 6), 3.0, dtype=torch.float64)
with torch.inference_mode():
    INFERRED = CACHE.clone()
SHARED = {
    "one cache for both": (dict(k_cache=CACHE, v_cache=CACHE), "v_cache shares memory with k_cache, which is written"),
    "another view of it": (dict(k_cache=CACHE, v_cache=CACHE.view(-1).view(CACHE.shape)), "v_cache shares memory with k_cache"),
    "shifted by a row": (dict(zip(("k_cache", "v_cache"), views(12), strict=True)), "v_cache shares memory with k_cache"),
    "one row for all sequences": (dict(k_cache=CACHE[:1].expand(2, -1, -1, -1)), "k_cache has .* several elements in one place"),
    "one head for all": (dict(v_cache=CACHE[:, :, :1].expand(-1, -1, 2, -1)), "v_cache has .* several elements in one place"),
    "rows of two sequences": (
        dict(v_cache=views(0)[0].as_strided((2, 8, 2, 6), (60, 12, 6, 1))),
        r"v_cache has shape \(2, 8, 2, 6\) and strides \(60, 12, 6, 1\), with several elements in one place",
    ),
    "new rows out of a cache": (dict(k_cache=CACHE, key=CACHE[:, 2:4]), "key shares memory with k_cache"),
    "values out of the other": (dict(k_cache=CACHE, value=CACHE[:, 5:7]), "value shares memory with k_cache"),
    "queries out of a cache": (
        dict(v_cache=LARGE, k_cache=LARGE.clone(), query=LARGE[:, 3:5], key=LARGE[:, :2] + 1, value=LARGE[:, :2] + 1),
        "query shares memory with v_cache",
    ),
    "a sink out of a cache": (dict(k_cache=CACHE, sink=CACHE.flatten()[:4]), "sink shares memory with k_cache"),
    "lengths out of a cache": (
        dict(v_cache=(zeros := torch.zeros_like(CACHE)), cache_seqlens=zeros.view(torch.int32).flatten()[:2]),
        "cache_seqlens shares memory with v_cache",
    ),
    "a cache of inference mode": (dict(v_cache=INFERRED), "v_cache was made in inference mode"),
}


@pytest.mark.parametrize("shared", SHARED)
def test_what_is_written_is_in_one_place_and_of_nobody_else(shared):
    changed, text = SHARED[shared]
    given = dict(query=QUERY, k_cache=torch.full_like(CACHE, 3), v_cache=torch.full_like(CACHE, 3))
    given |= dict(key=KEY, value=VALUE, cache_seqlens=LENGTHS - 3) | changed
    before, sink = [given[name].clone() for name in ("k_cache", "v_cache")], given.pop("sink", None)
    call = encode_call(PATTERN, True, False, "")
    for attend in (partial(dilated_attention_with_kvcache, pattern=PATTERN), partial(last_rows_op, scale=0.5, call=call)):
        with pytest.raises(ValueError, match=text):
            attend(**given, sink=sink)
        assert all(torch.equal(given[name], x) for name, x in zip(("k_cache", "v_cache"), before, strict=True))


@pytest.mark.parametrize("layout", ["heads first", "side by side", "in one row", "one after the other"])
def test_caches_side_by_side_in_one_tensor_are_not_shared(layout):
    query, key, value = whole(2, 9)
    shape = {"heads first": (2, 2, 2, 12, 6), "side by side": (2, 12, 2, 2, 6), "in one row": (2, 12, 2, 12)}
    memory = torch.zeros(shape.get(layout, (2, 2, 12, 2, 6)), dtype=torch.float64)
    caches = {
        "heads first": lambda: (x.transpose(1, 2) for x in memory.unbind(1)),
        "side by side": lambda: memory.unbind(2),
        "in one row": lambda: memory.split(6, 3),
    }
    k_cache, v_cache = caches.get(layout, memory.unbind)()
    lengths = torch.zeros(2, dtype=torch.int32)
    out = dilated_attention_with_kvcache(query, k_cache, v_cache, PATTERN, key=key, value=value, cache_seqlens=lengths)
    torch.testing.assert_close(out, oracle_attention(query, key, value, PATTERN, is_causal=True)[0])
    assert torch.equal(k_cache[:, :9], key)
    assert torch.equal(v_cache[:, :9], value)


def test_what_is_only_read_may_be_shared():
    query, key, _ = whole(2, 9)
    cache, lengths = key[:1].expand(2, -1, -1, -1), torch.full((2,), 9, dtype=torch.int32)
    out = dilated_attention_with_kvcache(query[:, -3:], cache, cache, PATTERN, cache_seqlens=lengths)
    torch.testing.assert_close(out, oracle_attention(query, cache, cache, PATTERN, is_causal=True)[0][:, -3:])


@pytest.mark.parametrize("backend", ABLE)
def test_the_operator_has_no_gradient_either(backend):
    """`reference` gave that of some of its steps, `native` none."""
    caches = [torch.full_like(CACHE, 3) for _ in range(2)]
    given = QUERY.clone().requires_grad_(), *caches, KEY, VALUE, LENGTHS
    with pytest.raises(ValueError, match=r"a tensor requires a gradient, .* under torch\.no_grad"):
        last_rows_op(*given, 0.5, encode_call(PATTERN, True, False, backend))
    assert all((x == 3).all() for x in caches)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_vmap_and_forward_mode_are_refused():
    def step(query):
        return dilated_attention_with_kvcache(query, CACHE.clone(), CACHE.clone(), PATTERN, cache_seqlens=LENGTHS)

    with pytest.raises(RuntimeError, match=r"does not support vmap; make the mapped dimension a part of the batch"):
        torch.vmap(step)(torch.stack([QUERY, QUERY]))
    cache = DilatedCache(PATTERN, KEY.shape[2])
    with torch.no_grad(), forward_ad.dual_level():
        query = forward_ad.make_dual(QUERY, QUERY)
        for attend in (step, lambda query: cache.attend(query, KEY, VALUE)):
            with pytest.raises(ValueError, match=r"a tensor has a tangent \(jvp\)"):
                attend(query)


@given(st.data())
def test_whether_memory_is_shared(data):
    memory, found = torch.zeros(60), list[tuple[Tensor, set[int]]]()
    for _ in range(2):
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        strides = data.draw(st.lists(st.integers(0, 6), min_size=len(sizes), max_size=len(sizes)))
        view = memory.view(data.draw(st.sampled_from([torch.float32, torch.int16])))
        x = view.as_strided(sizes, strides, data.draw(st.integers(0, 5)))
        first, numbers = torch.arange(len(view)).as_strided(sizes, strides, x.storage_offset()).flatten().tolist(), x.itemsize
        found.append((x, {number * numbers + byte for number in first for byte in range(numbers)}))
        assert overlaps_itself(x.shape, x.stride()) or len(set(first)) == x.numel()
    (a, of_a), (b, of_b) = found
    assert share_memory(a, b) == bool(of_a & of_b)


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_leaves_the_cache_as_it_is(wrong):
    changed, error, text = WRONG[wrong]
    caches = [torch.full((2, 8, 2, 6), 3.0, dtype=torch.float64) for _ in range(2)]
    right = dict(query=QUERY, k_cache=caches[0], v_cache=caches[1], pattern=PATTERN, key=KEY, value=VALUE, cache_seqlens=LENGTHS)
    with registered(Fake("plain", -1)), pytest.raises(error, match=text):
        dilated_attention_with_kvcache(**{**right, **changed})
    assert all((x == 3).all() for x in caches)


BY_SPANS = {
    "segments": Pattern([8, 24, 64], [1, 3, 5]),
    "block": Pattern([8, 24], [2, 3], offset="block"),
    "ranges": Pattern([8, 16], [1, 2], heads=[(0, 4), (2, 6)]),
    "window": Pattern.of(SlidingWindow(9, 2)),
    "windows once": Pattern.of(SlidingWindow(5), SlidingWindow(13), overlap="once"),
    "strides": Pattern.of(Strided(7)),
    "tokens that are read": Pattern.of(GlobalTokens([2, 3, 9], "read"), SlidingWindow(4)),
    "tokens that see all": Pattern.of(GlobalTokens([0, 5, 30])),
}
BY_FORMS = {"blocks": Pattern.of(BlockSparse.local_global(40, 3)), "half a group": Pattern([8, 16], [1, 2], heads=[(0, 3), None])}


@pytest.mark.parametrize("name", [*BY_SPANS, *BY_FORMS])
def test_one_row_is_one_step_where_spans_say_what_it_sees(name, monkeypatch):
    pattern, steps = (BY_SPANS | BY_FORMS)[name], list[Any]()
    query, key, value = whole(2, 40, (6, 3))
    right, right_lse = oracle_attention(query, key, value, pattern, is_causal=True)
    attend = Native.attend_stored
    monkeypatch.setattr(Native, "attend_stored", lambda self, step, problem: steps.append(step) or attend(self, step, problem))
    caches = torch.full((2, *key.shape), torch.nan, dtype=key.dtype)
    for n in (0, 1, 5, 6, 23, 30, 39):
        caches[0][:, :n], caches[1][:, :n] = key[:, :n], value[:, :n]
        lengths, at = torch.tensor([n, n // 2], dtype=torch.int32), torch.tensor([n, n // 2])
        row = [x[torch.arange(2), at][:, None] for x in (query, key, value)]
        given = dict(key=row[1], value=row[2], cache_seqlens=lengths, backend="native", return_lse=True)
        out, lse = dilated_attention_with_kvcache(row[0], *caches, pattern, **given)
        for b in range(2):
            torch.testing.assert_close(out[b, 0], right[b, at[b]])
            torch.testing.assert_close(lse[b, :, 0], right_lse[b, :, at[b]])
            assert torch.equal(caches[0][b, at[b]], key[b, at[b]])
    assert len(steps) == (7 if name in BY_SPANS else 0)


def test_caches_that_show_one_row_everywhere():
    """Expanded, they have a stride of 0, which no span has."""
    query, key, value = whole(1, 20, (4, 2))
    shown = [x[:, :1].expand(-1, 20, -1, -1) for x in (key, value)]
    out = dilated_attention_with_kvcache(query[:, -1:], *shown, PATTERN, cache_seqlens=torch.tensor([20], dtype=torch.int32))
    right = oracle_attention(query, *(x.contiguous() for x in shown), PATTERN, is_causal=True)[0]
    torch.testing.assert_close(out, right[:, -1:])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("inference", [False, True])
def test_autograd_learns_that_the_caches_were_written(inference, backend, rows):
    query, key, value = (x[:, :rows] for x in whole(1, 20, (4, 2)))
    options = dict(cache_seqlens=torch.zeros(1, dtype=torch.int32), backend=backend)
    with torch.inference_mode(inference):
        caches = torch.zeros_like(key).repeat(1, 8, 1, 1), torch.zeros_like(key).repeat(1, 8, 1, 1)
        leaf = torch.ones(1, dtype=key.dtype, requires_grad=not inference)
        kept = [(leaf * cache).sum() for cache in caches]
        dilated_attention_with_kvcache(query, *caches, PATTERN, key=key, value=value, **options)
        assert torch.equal(caches[0][:, :rows], key)
    for total in kept if not inference else ():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("backend", ABLE)
def test_an_autocast_takes_nothing_away(backend, rows):
    qkv = whole(1, 20, dtype=torch.float32)
    right = last_rows(qkv, [20], rows, PATTERN, 24, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = last_rows(qkv, [20], rows, PATTERN, 24, backend=backend)
    for mine, other in zip(found, right, strict=True):
        assert torch.equal(mine, other)  # and of its dtype
