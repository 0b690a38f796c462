"""flash-attn's functions against their definition in float64, with explicit masks, written out here."""

import importlib
import inspect
import random
import sys
from types import SimpleNamespace

import pytest
import torch

from dilkit import NoBackendError, use_backend
from dilkit.integrations import flash_attn as door
from dilkit.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    install,
    installation,
)
from dilkit.integrations.flash_attn.calls import reproducible_backends
from dilkit.integrations.gigapath import install as install_gigapath

EPSILONS = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Allowed errors by dtype, of numbers up to 1; of larger ones they are relative."""
SQUARE = ("flash_attn_qkvpacked_func", "flash_attn_varlen_qkvpacked_func")


def reference(q, k, v, slopes=None, factors=1, **options):
    """Compute `(out, lse)` of one sequence, `(rows, heads, head_dim)`; `factors` are those of dropped weights."""
    (n, heads, dim), m = q.shape, k.shape[0]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // len(x), 0) for x in (k, v))
    scores = q @ k.mT * (dim**-0.5 if options.get("softmax_scale") is None else options["softmax_scale"])
    if cap := options.get("softcap", 0.0):
        scores = cap * torch.tanh(scores / cap)
    row, column = torch.arange(n)[:, None] + m - n, torch.arange(m)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (row - column).abs()
    left, right = options.get("window_size", (-1, -1))
    right = 0 if options.get("causal") else right
    seen = torch.ones(n, m, dtype=torch.bool)
    seen = seen if left < 0 else seen & (column >= row - left)
    seen = seen if right < 0 else seen & (column <= row + right)
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1) if m else torch.full((heads, n), -torch.inf).double()
    safe = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = torch.exp(scores - safe[..., None]).masked_fill(~seen, 0.0) * factors
    return (weights @ v).transpose(0, 1), lse


def starts_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_near(found, wanted, dtype, times=1):
    assert found.shape == wanted.shape
    finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), finite)
    wrong = (found.double() - wanted)[finite].abs()
    largest = max(1.0, float(wanted[finite].abs().max())) if wrong.numel() else 1.0
    assert wrong.numel() == 0 or float(wrong.max()) <= times * EPSILONS[dtype] * largest


def random_call(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name = draw.choice([name for name in door.__all__ if name.endswith("_func")])
    heads, kv_heads = draw.choice([(1, 1), (4, 4), (4, 2), (6, 1)])
    kv_heads = heads if name in SQUARE else kv_heads
    dim, dtype, batch = draw.choice([8, 16, 20, 33]), draw.choice([*EPSILONS]), draw.randint(1, 3)
    longest = draw.choice([3, 20, 90])
    most, most_k = draw.randint(0 if longest > 3 else 1, longest), draw.randint(0 if longest > 3 else 1, longest)
    rows = [draw.randint(0, most) for _ in range(batch)] if "varlen" in name else [most] * batch
    keys = [draw.randint(0, most_k) for _ in range(batch)] if "varlen" in name else [most_k] * batch
    keys = rows if name in SQUARE or draw.random() < 0.2 else keys
    wide = dim + 3 if name in ("flash_attn_func", "flash_attn_varlen_func") and draw.random() < 0.2 else dim
    options = dict(causal=draw.random() < 0.4, softmax_scale=draw.choice([None, 0.3]))
    options |= dict(softcap=draw.choice([0.0, 0.0, 1.5]), deterministic=draw.random() < 0.2)
    options |= dict(window_size=draw.choice([(-1, -1), (draw.randint(-1, 30), draw.randint(-1, 30)), (draw.randint(-1, 4), 0)]))
    kind = draw.choice(["none", "none", "heads", "batch"])
    slopes = None if kind == "none" else torch.rand(*([batch] if kind == "batch" else []), heads)

    given = [torch.randn(sum(n), h, d) for n, h, d in ((rows, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, wide))]
    given = [x.to(dtype).requires_grad_() for x in given]
    dout = torch.randn(sum(rows), heads, wide).to(dtype)
    q, k, v = given if "varlen" in name else (x.unflatten(0, (batch, -1 if x.numel() else 0)) for x in given)
    packed = {"qkvpacked": lambda: [torch.stack((q, k, v), -3)], "kvpacked": lambda: [q, torch.stack((k, v), -3)]}
    arguments = packed.get(name.split("_")[-2], lambda: [q, k, v])()
    places = dict(cu_seqlens_q=starts_of(rows), cu_seqlens_k=starts_of(keys), max_seqlen_q=max(rows), max_seqlen_k=max(keys))
    if name == "flash_attn_varlen_qkvpacked_func":
        places = dict(cu_seqlens=starts_of(rows), max_seqlen=max(rows))
    elif draw.random() < 0.2 and rows == keys:
        places["cu_seqlens_k"] = places["cu_seqlens_q"]
    call = dict(options, alibi_slopes=slopes, **(places if "varlen" in name else {}))
    out, lse, weights = getattr(door, name)(*arguments, **call, return_attn_probs=True)
    assert weights is None
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    out.backward(dout.view_as(out))

    doubles = [x.detach().double().requires_grad_() for x in given]
    parts = zip(*(x.split(n) for x, n in zip(doubles, (rows, keys, keys), strict=True)), strict=True)
    own = [slopes if slopes is None or slopes.dim() == 1 else slopes[b] for b in range(batch)]
    wanted, wanted_lse = zip(*(reference(*part, own[b], **options) for b, part in enumerate(parts)), strict=True)
    torch.cat(wanted).backward(dout.double())
    assert_near(out.detach().reshape(sum(rows), heads, wide), torch.cat(wanted).detach(), dtype)
    lses = torch.cat(wanted_lse, -1) if "varlen" in name else torch.stack(wanted_lse)
    assert_near(lse.detach(), lses.detach(), torch.float32)
    for x, double in zip(given, doubles, strict=True):
        assert_near(x.grad, double.grad, dtype, times=4)


def turned(x, cos, sin, positions, interleaved):
    """Rotate `x` `(rows, heads, head_dim)` pair by pair, as complex numbers, in float64."""
    half = cos.shape[1]
    x, cos, sin = x.double().clone(), cos.double()[positions], sin.double()[positions]
    first, second = (range(0, 2 * half, 2), range(1, 2 * half, 2)) if interleaved else (range(half), range(half, 2 * half))
    pairs = torch.complex(x[..., [*first]], x[..., [*second]]) * torch.complex(cos, sin)[:, None]
    x[..., [*first]], x[..., [*second]] = pairs.real, pairs.imag
    return x


def random_cache_call(seed):
    """Compare a call with a cache, whose rows beyond the sequences are NaN, with the definition."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    heads, kv_heads = draw.choice([(1, 1), (4, 4), (4, 2), (6, 1)])
    dim, dtype, batch, rows = draw.choice([8, 16, 34]), draw.choice([*EPSILONS]), draw.randint(1, 3), draw.choice([1, 1, 2, 7])
    kind, page, pages = draw.choice(["plain", "plain", "index", "pages"]), draw.choice([5, 16]), draw.choice([2, 3])
    news, capacity = draw.choice([None, rows, rows, 3, 0]), page * pages
    options = dict(causal=draw.random() < 0.5, softmax_scale=draw.choice([None, 0.3]))
    options |= dict(softcap=draw.choice([0.0, 0.0, 1.5]), window_size=draw.choice([(-1, -1), (-1, -1), (5, 2), (-1, 1), (3, 0)]))
    slopes = draw.choice([None, torch.rand(heads), torch.rand(batch, heads)])
    whole, same = news is None and draw.random() < 0.2, draw.random() < 0.3
    lengths = [capacity if whole else draw.randint(0, capacity - (news or 0)) for _ in range(batch)]
    lengths = [lengths[0]] * batch if same else lengths
    ends = [n + (news or 0) for n in lengths]
    leftpad = [draw.randint(0, n) for n in ends] if draw.random() < 0.3 else None

    order, row = torch.randperm(batch * pages + 1).int(), torch.arange(capacity)
    size, table, index = (page, order[:-1].view(batch, pages), None) if kind == "pages" else (capacity, None, order[:batch])
    caches = [torch.full((len(order), size, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    if kind == "plain":
        caches, index = [cache[:batch] for cache in caches], None
    blocks = [torch.full_like(row, b if index is None else int(index[b])) for b in range(batch)]
    blocks = blocks if table is None else [table[b, row // page].long() for b in range(batch)]
    for b, length in enumerate(lengths):
        for cache in caches:
            cache[blocks[b][:length], row[:length] % size] = torch.randn(length, kv_heads, dim).to(dtype)
    expected = [cache.clone() for cache in caches]
    q = torch.randn(batch, rows, heads, dim).to(dtype)
    k, v = (None, None) if news is None else torch.randn(2, batch, news, kv_heads, dim).to(dtype)
    cos, sin, interleaved = None, None, draw.random() < 0.5
    if news is not None and draw.random() < 0.5:
        cos, sin = torch.randn(2, capacity + rows, draw.choice([dim // 2, 2])).clamp(-1, 1).to(dtype)
    seqlens = None if whole else lengths[0] if same else torch.tensor(lengths).int()
    pad = None if leftpad is None else torch.tensor(leftpad).int()
    named = dict(options, alibi_slopes=slopes, rotary_interleaved=interleaved, return_softmax_lse=True)
    out, lse = door.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, seqlens, index, pad, table, **named)

    is_local = options["causal"] or options["window_size"] != (-1, -1)
    for b, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        query, at = q[b], (blocks[b][length:end], row[length:end] % size)
        if cos is not None and sin is not None:
            query = turned(query, cos, sin, length + torch.arange(rows) * is_local, interleaved).to(dtype)
        for cache, kept, new in zip(caches, expected, (k, v), strict=True):
            if new is not None and new is k and cos is not None and sin is not None:
                assert_near(cache[at], turned(new[b], cos, sin, row[length:end], interleaved), dtype)
                kept[at] = cache[at]
            elif new is not None:
                kept[at] = new[b]
        span = slice(0 if leftpad is None else leftpad[b], end)
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        wanted, wanted_lse = reference(query, *(x[blocks[b][span], row[span] % size] for x in expected), own, **options)
        assert_near(out[b], wanted, dtype, times=2)
        assert_near(lse[b], wanted_lse, torch.float32 if cos is None else dtype)
    for cache, kept in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, kept, rtol=0, atol=0, equal_nan=True)


SEEDS = [range(at, at + 30) for at in range(0, 300, 30)]
MORE_SEEDS = [pytest.param(range(at, at + 200), marks=pytest.mark.slow) for at in range(1000, 3000, 200)]


@pytest.mark.parametrize("seeds", [*SEEDS, *MORE_SEEDS], ids=str)
def test_functions_are_their_definition(seeds):
    for seed in seeds:
        random_call(seed)
        random_cache_call(seed)


OPTIONS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 alibi_slopes=None deterministic=False "
    "return_attn_probs=False"
)
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = dict(
    flash_attn_func=f"q k v {OPTIONS}",
    flash_attn_kvpacked_func=f"q kv {OPTIONS}",
    flash_attn_qkvpacked_func=f"qkv {OPTIONS}",
    flash_attn_varlen_func=f"q k v {PACKED} {OPTIONS} block_table=None",
    flash_attn_varlen_kvpacked_func=f"q kv {PACKED} {OPTIONS}",
    flash_attn_varlen_qkvpacked_func=f"qkv cu_seqlens max_seqlen {OPTIONS}",
    flash_attn_with_kvcache="q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1, -1) softcap=0.0 "
    "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
)
"""Parameters of each function of flash-attn 2.8, with their defaults."""


def test_signatures_are_those_of_flash_attn():
    own = {name: inspect.signature(getattr(door, name)).parameters.values() for name in SIGNATURES}
    shown = {name: [p.replace(annotation=p.empty) for p in parameters] for name, parameters in own.items()}
    assert {name: " ".join(map(str, parameters)) for name, parameters in shown.items()} == SIGNATURES


def test_weights_are_dropped_by_the_seed_alone():
    q, k = (torch.randn(2, n, 4, 16, dtype=torch.float64, requires_grad=True) for n in (9, 16))
    identity = torch.eye(16).double()[:, None].expand(2, 16, 4, 16)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(flash_attn_func(q, k, identity, dropout_p=0.25, causal=True))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    whole = flash_attn_func(q, k, identity, causal=True)
    factors = torch.where(whole == 0, 0, outs[0] / whole).detach()  # (batch, rows, heads, keys)
    assert {round(x, 9) for x in factors.unique().tolist()} == {0.0, round(4 / 3, 9)}
    torch.manual_seed(3)
    out, _, signed = flash_attn_func(q, k, identity, dropout_p=0.25, causal=True, return_attn_probs=True)
    assert torch.equal(out, outs[0])
    assert torch.equal(signed < 0, ((outs[0] == 0) & (whole != 0)).transpose(1, 2))
    torch.testing.assert_close(signed.abs(), (whole / whole.amax(-1, keepdim=True)).transpose(1, 2))
    starts, rows = starts_of([9, 0, 9]), (x.flatten(0, 1) for x in (q, k[:, :9], identity[:, :9]))
    torch.manual_seed(3)
    out, _, signed = flash_attn_varlen_func(*rows, starts, starts, 9, 9, 0.25, causal=True, return_attn_probs=True)
    assert signed.shape == (3, 4, 9, 9)
    assert torch.equal(signed[0] > 0, (out[:9] > 0).transpose(0, 1)[..., :9])
    assert not signed[1].any()
    torch.manual_seed(3)
    v = torch.randn(2, 16, 4, 16).double()
    torch.manual_seed(3)
    out = flash_attn_func(q, k, v, dropout_p=0.25, causal=True)
    wanted = torch.stack([reference(q[b], k[b], v[b], None, factors[b].transpose(0, 1), causal=True)[0] for b in range(2)])
    torch.testing.assert_close(out, wanted)
    dout = torch.randn_like(out)
    found, right = (torch.autograd.grad(x, (q, k), dout) for x in (out, wanted))
    torch.testing.assert_close(found, right)


def test_packed_keys_are_read_out_of_their_pages():
    pages, rows = torch.randn(7, 4, 2, 8, requires_grad=True), [0, 9, 6]
    table, starts = torch.tensor([[3, 3, 3], [6, 0, 4], [1, 2, -1]]).int(), starts_of(rows)
    q = torch.randn(5, 4, 8)
    places = dict(cu_seqlens_q=starts_of([2, 1, 2]), cu_seqlens_k=starts, max_seqlen_q=2, max_seqlen_k=9, causal=True)
    out = flash_attn_varlen_func(q, pages, pages, **places, block_table=table)
    k = torch.cat([pages[[6, 0, 4]].flatten(0, 1)[:9], pages[[1, 2]].flatten(0, 1)[:6]])
    wanted = flash_attn_varlen_func(q, k, k, **places)
    assert torch.equal(out, wanted)
    for x, y in zip(torch.autograd.grad(out.sum(), pages), torch.autograd.grad(wanted.sum(), pages), strict=True):
        torch.testing.assert_close(x, y)
    for wrong, text in ((7, "names block 7; there are blocks 0 to 6"), (-1, "names block -1")):
        with pytest.raises(ValueError, match=text):
            flash_attn_varlen_func(q, pages, pages, **places, block_table=torch.where(table == 4, wrong, table))
    with pytest.raises(ValueError, match="block_table has 2 pages of 4 rows; a sequence has a row 8"):
        flash_attn_varlen_func(q, pages, pages, **places, block_table=table[:, :2])
    with pytest.raises(TypeError, match=r"block_table is torch\.int64"):
        flash_attn_varlen_func(q, pages, pages, **places, block_table=table.long())


Q, KV = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 2, 8)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (dict(q=[1]), "q is a list; a torch.Tensor is needed"),
        (dict(k=KV.to(torch.float8_e4m3fn)), r"k is torch\.float8_e4m3fn; dilkit does not compute FP8"),
        (dict(k=KV.int()), r"k is torch\.int32"),
        (dict(v=KV.half()), r"v is torch\.float16 on cpu; torch\.float32 on cpu is needed, as q is"),
        (dict(q=Q[0]), r"q has shape \(3, 4, 8\); \(batch, seqlen, heads, head_dim\) is needed"),
        (dict(k=KV[:1], v=KV[:1]), "k has batch 1 and q 2"),
        (dict(k=KV[..., :4]), "k has head_dim 4 and q 8"),
        (dict(v=KV[:, :4]), r"v has shape \(2, 4, 2, 8\) and k \(2, 5, 2, 8\)"),
        (dict(q=Q[:, :, :3]), "k has 2 heads and q 3"),
        (dict(dropout_p=1.0), r"dropout_p=1\.0 must be at least 0"),
        (dict(softmax_scale="1"), "softmax_scale='1' is a str"),
        (dict(softcap=-1.0), r"softcap=-1\.0 must be at least 0"),
        (dict(causal=1), "causal=1 is a int"),
        (dict(window_size=(1, 2, 3)), r"window_size=\(1, 2, 3\) has 3 numbers"),
        (dict(window_size=(1.5, 2)), r"window_size\[0\]=1\.5 is a float"),
        (dict(alibi_slopes=torch.ones(3)), r"alibi_slopes has shape \(3,\); \(heads,\) = \(4,\) or"),
        (dict(alibi_slopes=torch.full((2, 4), torch.inf)), r"alibi_slopes\[0, 0\] is inf"),
        (dict(deterministic=None), "deterministic=None is a NoneType"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_arguments_that_are_refused(changed, text):
    with pytest.raises((TypeError, ValueError), match=text):
        flash_attn_func(**{**dict(q=Q, k=KV, v=KV), **changed})


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (dict(cu_seqlens_q=ints(0, 2)), "cu_seqlens_q ends with 2; the number of rows of q is needed, 3"),
        (dict(cu_seqlens_k=ints(1, 5)), "cu_seqlens_k begins with 1"),
        (dict(cu_seqlens_k=ints(0, 2, 5)), "cu_seqlens_k is of 2 sequences and cu_seqlens_q of 1"),
        (dict(cu_seqlens_k=torch.tensor([0, 5])), r"cu_seqlens_k is torch\.int64"),
        (dict(max_seqlen_q=2), "max_seqlen_q=2, but cu_seqlens_q has a sequence of 3 rows"),
        (dict(max_seqlen_k=2.5), r"max_seqlen_k=2\.5 is a float"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_packed_arguments_that_are_refused(changed, text):
    places = dict(cu_seqlens_q=ints(0, 3), cu_seqlens_k=ints(0, 5), max_seqlen_q=3, max_seqlen_k=5)
    with pytest.raises((TypeError, ValueError), match=text):
        flash_attn_varlen_func(Q[0], KV[0], KV[0], **{**places, **changed})
    with pytest.raises(ValueError, match=r"qkv has shape \(3, 2, 4, 8\); \(total, 3, heads, head_dim\) is needed"):
        door.flash_attn_varlen_qkvpacked_func(torch.zeros(3, 2, 4, 8), ints(0, 3), 3)


NEW, TABLES = torch.ones(2, 1, 2, 8), torch.ones(9, 4)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (dict(v=None), "k and v go together"),
        (dict(k=NEW[:, :0]), r"v has shape \(2, 1, 2, 8\); \(2, 0, 2, 8\) is needed"),
        (dict(cache_seqlens=None), "k and v are given without cache_seqlens"),
        (dict(cache_seqlens=5), r"cache_seqlens\[0\]=5; 0 to 4 is needed"),
        (dict(cache_seqlens=ints(1, -1)), r"cache_seqlens\[1\]=-1; 0 to 4"),
        (dict(cache_batch_idx=ints(0, 2)), r"cache_batch_idx\[1\]=2; 0 to 1"),
        (dict(cache_batch_idx=ints(1, 1)), "by cache_batch_idx two sequences write"),
        (dict(cache_batch_idx=ints(0, 1), block_table=ints(0, 1)[:, None]), "cache_batch_idx goes with no block_table"),
        (dict(block_table=ints(1, 1)[:, None]), "by block_table two sequences write"),
        (dict(cache_leftpad=ints(0, 4)), r"cache_leftpad\[1\]=4; 0 to 3"),
        (dict(rotary_cos=TABLES), "rotary_cos and rotary_sin go together"),
        (dict(rotary_cos=TABLES[:2], rotary_sin=TABLES[:2]), "rotary_cos is of 2 positions; position 2 is needed"),
        (dict(rotary_cos=TABLES.repeat(1, 2), rotary_sin=TABLES.repeat(1, 2)), "rotary_dim at most head_dim=8"),
        (dict(rotary_cos=TABLES, rotary_sin=TABLES, k=None, v=None), "rotary_cos is given without k and v"),
        (dict(q=Q.clone().requires_grad_()), "a tensor requires a gradient"),
        (dict(num_splits=-1), "num_splits=-1 must be at least 0"),
        (dict(return_softmax_lse=1), "return_softmax_lse=1 is a int"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_calls_with_a_cache_that_are_refused_leave_it_unchanged(changed, text):
    k_cache, v_cache = KV.clone(), KV.clone()
    call = dict(q=Q, k_cache=k_cache, v_cache=v_cache, k=NEW, v=NEW, cache_seqlens=2)
    with pytest.raises((TypeError, ValueError), match=text):
        flash_attn_with_kvcache(**{**call, **changed})
    with pytest.raises(ValueError, match="k_cache has stride 2 in its last dimension"):
        flash_attn_with_kvcache(**{**call, "k_cache": k_cache.repeat(1, 1, 1, 2)[..., ::2]})
    with pytest.raises(ValueError, match="v_cache shares memory with k_cache"):
        flash_attn_with_kvcache(**{**call, "v_cache": k_cache})
    with use_backend("cupy_raw"), pytest.raises(NoBackendError):  # which refuses a CPU
        flash_attn_with_kvcache(**call, cache_leftpad=ints(0, 1))
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == 0


def test_deterministic_calls_on_a_gpu_take_backends_that_are():
    names = reproducible_backends()
    assert {"native", "reference"} <= {*names}
    assert "sdpa" not in names
    with use_backend("sdpa"):
        assert reproducible_backends() is None


@pytest.fixture
def not_installed():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "flash_attn", None)
        yield


@pytest.mark.usefixtures("not_installed")
def test_packages_import_what_is_installed(monkeypatch):
    with pytest.warns(UserWarning, match=r"flash_attn 2\.8\.3 is a stand-in"):
        handle = install()
    with install(), install_gigapath(flash_attn="2.8.3"):  # without a second warning
        module, padding = importlib.import_module("flash_attn"), importlib.import_module("flash_attn.bert_padding")
    assert module.__version__ == "2.8.3"
    for name in SIGNATURES:
        own = getattr(door, name)
        assert getattr(module, name) is getattr(importlib.import_module("flash_attn.flash_attn_interface"), name) is own
    x, mask = torch.randn(3, 5, 2, requires_grad=True), torch.tensor([[0, 1, 1, 1, 0], [0] * 5, [1] * 5])
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()])
    assert (indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()) == (
        [1, 2, 3, *range(10, 15)],
        [0, 3, 3, 8],
        5,
        [3, 0, 5],
    )
    padded = padding.pad_input(rows, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None])
    assert torch.equal(torch.autograd.grad(padded.sum(), x)[0], mask[..., None].expand_as(x).float())
    assert repr(handle) == "<dilkit for flash_attn: version='2.8.3', installed>"
    monkeypatch.setitem(sys.modules, "flash_attn.of_others", SimpleNamespace())  # which has no hash
    with pytest.raises(ValueError, match=r"flash_attn='2\.5\.8', but flash_attn='2\.8\.3' is installed"):
        install_gigapath(flash_attn="2.5.8")
    handle.uninstall()
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn.bert_padding")


def test_an_installed_flash_attn_is_replaced_where_that_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.1'")
    (tmp_path / "flash_attn" / "layers.py").write_text("mine = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    theirs = importlib.import_module("flash_attn")
    with pytest.raises(ValueError, match=r"flash_attn is installed; install\(replace=True\) takes its place"):
        install()
    with pytest.warns(UserWarning, match="stand-in"):
        handle = install(replace=True)
    with handle:
        assert importlib.import_module("flash_attn").flash_attn_func is flash_attn_func
        assert importlib.import_module("flash_attn.layers").mine
    assert importlib.import_module("flash_attn") is theirs
    assert not installation.patches.handles
    for name in ("flash_attn", "flash_attn.layers"):
        del sys.modules[name]
