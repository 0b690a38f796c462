"""Malformed calls of `dilated_attention` and of the torch modules."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from core.malformed.case import MASK, ROWS, Case, P, Q, attend, made

from dilkit import (
    DilatedAttention,
    DilatedCache,
    MultiheadDilatedAttention,
    NoBackendError,
    Pattern,
    PatternError,
    attention_mass,
    attention_rows,
    locality_report,
    order,
)
from dilkit.oracle import oracle_attention
from dilkit.rotary import rotary_embedding
from dilkit.viz import draw_orders

INNER = DilatedAttention(P)
LAYER = MultiheadDilatedAttention(32, 4, INNER)
TURNING = MultiheadDilatedAttention(32, 4, INNER, rotary=True)
LONG, LINE = torch.zeros(1, 2**16, 1, 1), order((2, 3))
LISTS = dict(attention=None, segment_lengths=[4])
CAUSAL, NOT_CAUSAL = torch.ones(6, 6, dtype=torch.bool).triu(1), "attn_mask is not the causal mask"
STARTS, WITH_STARTS = torch.tensor([0, 4, 6], dtype=torch.int32), ("attn_mask is given with cu_seqlens", "is_causal=True")
JAGGED = torch.nested.nested_tensor_from_jagged(ROWS[0], STARTS.long())
CACHE, ALONG = DilatedCache(P, 4), DilatedAttention(P, order=LINE)
TUPLES: Any = reduce(lambda x, _: (x,), range(1000), ())
OTHER = MultiheadDilatedAttention(32, 4, torch.nn.Identity())


def layer(embed_dim=32, num_heads=4, attention=INNER, **options) -> Callable[[], Any]:
    return lambda: MultiheadDilatedAttention(embed_dim, num_heads, attention, **options)


def layer_on(*rows, **options) -> Callable[[], Any]:
    return lambda: LAYER(*rows, **options)


def masked(attn_mask, **options) -> Callable[[], Any]:
    return lambda: LAYER(ROWS, attn_mask=attn_mask, **options)


def inner(**options) -> Callable[[], Any]:
    return lambda: INNER(Q, Q, Q, **options)


CALLS = {
    "key is None": Case(attend(key=None), TypeError, "key", "NoneType", "torch.Tensor"),
    "key of tuples in tuples": Case(attend(key=TUPLES), TypeError, "key", "tuple", "torch.Tensor"),
    "sparse mask": Case(attend(key_padding_mask=MASK.to_sparse()), TypeError, "key_padding_mask", "sparse_coo", "to_dense"),
    "query of 3 dimensions": Case(attend(Q[0]), ValueError, "query", "(6, 4, 8)", "(batch, seq, heads, head_dim)"),
    "integer tensors": Case(attend(*[Q.long()] * 3), TypeError, "query", "int64", "float32", "bfloat16"),
    "mixed dtypes": Case(attend(key=Q.half()), ValueError, "key", "float16", "float32", "key.to(query)"),
    "mixed devices": Case(attend(value=Q.to("meta")), ValueError, "value", "meta", "cpu", "value.to(query)"),
    "sparse query": Case(attend(Q.to_sparse()), TypeError, "query", "sparse_coo", "strided", "to_dense"),
    "strided last dimension": Case(attend(key=Q.mT.contiguous().mT), ValueError, "key", "stride 4", "contiguous"),
    "key and value differ": Case(attend(key=Q[:, :, :2]), ValueError, "key", "value", "(2, 6, 2, 8)", "equal"),
    "batches differ": Case(attend(Q[:1]), ValueError, "key", "batch 2", "query 1"),
    "kv heads do not divide": Case(attend(key=Q[:, :, :3], value=Q[:, :, :3]), ValueError, "key", "3 heads", "4 heads of query"),
    "no heads": Case(attend(*[Q[:, :, :0]] * 3), ValueError, "query", "at least one head"),
    "pattern is a tuple": Case(attend(pattern=([4], [1])), TypeError, "pattern", "tuple", "dilkit.Pattern"),
    "pattern's heads": Case(attend(pattern=Pattern([4], [1], heads=[(2, 5)])), PatternError, "heads[0]", "(2, 5)", "4 heads"),
    "mask with 1 for tokens": Case(attend(key_padding_mask=MASK.long()), TypeError, "int64", "True = ignored", "mask == 0"),
    "mask of other length": Case(attend(key_padding_mask=MASK[:, :5]), ValueError, "key_padding_mask", "(2, 5)", "(2, 6)"),
    "mask elsewhere": Case(attend(key_padding_mask=MASK.to("meta")), ValueError, "key_padding_mask", "meta", "cpu", ".to("),
    "is_causal is a tensor": Case(attend(is_causal=torch.tensor(True)), TypeError, "is_causal", "Tensor", "True or False"),
    "return_lse is a number": Case(attend(return_lse=1), TypeError, "return_lse=1", "int", "True or False"),
    "scale is a bool": Case(attend(scale=True), TypeError, "scale=True", "bool", "number"),
    "scale is NaN": Case(attend(scale=float("nan")), ValueError, "scale=nan", "finite"),
    "scale is an endless integer": Case(attend(scale=10**400), ValueError, "scale", "too large", "finite"),
    "scale leaves fp32": Case(attend(scale=-1e38), ValueError, "scale=-1e+38", "float32", "1e+30"),
    "backend is a number": Case(attend(backend=1), TypeError, "backend=1", "int", "name"),
    "backend of numbers": Case(attend(backend=["reference", 2]), ValueError, "backend=['reference', 2]", "name"),
    "two backends in one text": Case(attend(backend="sdpa,reference"), ValueError, "backend='sdpa,reference'", "list of names"),
    "unknown backend": Case(attend(backend="fast"), ValueError, "backend='fast'", "known: ", "reference"),
    "unknown backend, nothing to do": Case(attend(*[Q[:0]] * 3, backend="fast"), ValueError, "backend='fast'", "known: "),
    "oracle beyond its size": Case(made(oracle_attention, *3 * [LONG], P), PatternError, "seq=65536", "entries", "at most"),
}

MODULES = {
    "pattern of a module": Case(made(DilatedAttention, [4]), TypeError, "pattern=[4]", "dilkit.Pattern"),
    "scale of a module": Case(made(DilatedAttention, P, scale="x"), TypeError, "scale='x'", "number"),
    "embed_dim and heads": Case(layer(30, 4, INNER), ValueError, "embed_dim=30", "num_heads=4"),
    "no heads": Case(layer(32, 0, INNER), ValueError, "num_heads=0", "at least 1"),
    "kv heads of a module": Case(layer(num_kv_heads=3), ValueError, "num_kv_heads=3", "num_heads=4"),
    "batch_first": Case(layer(batch_first=False), ValueError, "batch_first=False", "only"),
    "need_weights": Case(layer_on(ROWS, ROWS, ROWS, need_weights=True), ValueError, "need_weights=True", "only"),
    "1 for tokens": Case(layer_on(ROWS, key_padding_mask=MASK.long()), TypeError, "int64", "True = ignored", "mask == 0"),
    "backend of a module": Case(made(DilatedAttention, P, backend=3), TypeError, "backend=3", "int", "name"),
    "order of a module": Case(made(DilatedAttention, P, order="hilbert"), TypeError, "order='hilbert'", "TokenOrder"),
    "no orders": Case(made(DilatedAttention, P, orders=[]), ValueError, "orders is empty", "at least one"),
    "order and orders": Case(made(DilatedAttention, P, order=LINE, orders=[LINE]), ValueError, "order=", "orders=", "one order"),
    "embed_dim is a fraction": Case(layer(32.0, 4, INNER), TypeError, "embed_dim=32.0", "integer"),
    "embed_dim below zero": Case(layer(-32, 4, INNER), ValueError, "embed_dim=-32", "at least 1"),
    "a pattern as attention": Case(layer(32, 4, P), TypeError, "attention=", "Pattern", "a module"),
    "lengths without rates": Case(layer(attention=None, segment_lengths=[4]), ValueError, "dilation_rates=None", "both"),
    "attention and lists": Case(layer(segment_lengths=[4], dilation_rates=[1]), ValueError, "segment_lengths=[4]", "either"),
    "dtype of integers": Case(layer(dtype=torch.int32), TypeError, "dtype=torch.int32", "floating-point"),
    "unknown device": Case(layer(device="tpu"), ValueError, "device='tpu'", "cuda"),
    "rotary is a text": Case(layer(rotary="yes"), TypeError, "rotary='yes'", "number"),
    "rotary of an odd head": Case(layer(28, 4, INNER, rotary=True), ValueError, "head_dim=7", "odd"),
    "epsilon of 0": Case(layer(layer_norm_eps=0), ValueError, "layer_norm_eps=0", "greater than 0"),
    "rows of 4 dimensions": Case(layer_on(Q), ValueError, "query", "(2, 6, 4, 8)", "(batch, seq, 32)"),
    "rows of fp64": Case(layer_on(ROWS, ROWS.double()), TypeError, "key", "float64", "float32", "key.to("),
    "rows elsewhere": Case(layer_on(ROWS.to("meta")), ValueError, "query", "meta", "cpu"),
    "length of the mask": Case(layer_on(ROWS, key_padding_mask=MASK[:, :5]), ValueError, "(2, 5)", "(2, 6)"),
    "mask is a list": Case(layer_on(ROWS, key_padding_mask=[1]), TypeError, "key_padding_mask", "list", "bool"),
    "causality is a text": Case(layer_on(ROWS, is_causal="x"), TypeError, "is_causal='x'", "True or False"),
    "positions without rotary": Case(layer_on(ROWS, positions=torch.arange(6)), ValueError, "positions", "rotary=True"),
    "heads are a bool": Case(layer(num_heads=True), TypeError, "num_heads=True", "bool"),
    "no kv heads": Case(layer(num_kv_heads=0), ValueError, "num_kv_heads=0", "at least 1"),
    "no width of keys": Case(layer(kdim=0), ValueError, "kdim=0", "at least 1"),
    "width of values is a text": Case(layer(vdim="5"), TypeError, "vdim='5'", "str"),
    "a rate beyond its segment": Case(layer(**LISTS | dict(dilation_rates=[8])), ValueError, "dilation_rates[0]=8", "exceeds"),
    "rotary of 1, where True is meant": Case(layer(rotary=1), ValueError, "rotary=1.0", "greater than 1"),
    "a norm is a text": Case(layer(layer_norm="post"), TypeError, "layer_norm='post'", "str"),
    "the mask of scaled_dot_product_attention": Case(masked(CAUSAL.logical_not()), ValueError, NOT_CAUSAL, "the opposite of F."),
    "a causal mask, and causality of a text": Case(masked(CAUSAL, is_causal="yes"), TypeError, "is_causal='yes'", "str"),
    "a mask of large numbers": Case(masked(CAUSAL.float() * -1e9), ValueError, NOT_CAUSAL, "-inf, above"),
    "a longer mask": Case(masked(torch.ones(7, 7).bool().triu(1)), ValueError, "(7, 7)", "only the causal mask (6, 6)"),
    "a mask of heads": Case(masked(CAUSAL.expand(8, -1, -1)), ValueError, "attn_mask has shape (8, 6, 6)", "only the causal"),
    "a mask of integers": Case(masked(CAUSAL.long()), TypeError, "attn_mask is torch.int64", "torch.bool, True = not allowed"),
    "a mask of a name": Case(masked("causal"), TypeError, "attn_mask is a str", "the causal mask, or None"),
    "a mask of nested rows": Case(layer_on(JAGGED, attn_mask=CAUSAL), ValueError, *WITH_STARTS),
    "a mask of cached rows": Case(masked(CAUSAL, cache=CACHE), ValueError, "attn_mask is given with cache"),
    "a mask for another module": Case(made(OTHER, ROWS, attn_mask=CAUSAL), ValueError, "attn_mask is given", "Identity()"),
    "keys of a part of the rows": Case(layer_on(ROWS, ROWS[:, :5]), ValueError, "key has shape (2, 5, 32)", "must be equal"),
    "keys without a batch": Case(layer_on(ROWS, ROWS[0]), ValueError, "key has shape (6, 32)"),
    "values are a text": Case(layer_on(ROWS, ROWS, "x"), TypeError, "value is a str"),
    "unknown backend of a module": Case(made(DilatedAttention(P, backend="fast"), Q, Q, Q), ValueError, "backend='fast'"),
    "scale of a module is NaN": Case(made(DilatedAttention, P, scale=float("nan")), ValueError, "scale=nan", "finite"),
    "a cache that is none": Case(inner(cache={}), TypeError, "cache={} is a dict", "dilkit.DilatedCache"),
    "another cache": Case(inner(cache=DilatedCache(Pattern.dense(), 4)), ValueError, "cache is of ", "inner attention has"),
    "a cache without causality": Case(inner(cache=CACHE), ValueError, "cache is given, but is_causal=False"),
    "cached dropout": Case(inner(cache=CACHE, is_causal=True, dropout_p=0.5), ValueError, "cache is given with dropout_p=0.5"),
    "lse of a cache": Case(inner(cache=CACHE, return_lse=True), ValueError, "return_lse is given with cache"),
    "a mask of a cache": Case(inner(cache=CACHE, key_padding_mask=MASK), ValueError, "key_padding_mask is given with cache"),
    "a cache of packed rows": Case(inner(cache=CACHE, cu_seqlens=STARTS), ValueError, "cache is given with cu_seqlens"),
    "packed padding": Case(inner(key_padding_mask=MASK, cu_seqlens=STARTS), ValueError, "given with cu_seqlens, but packed"),
    "a length without starts": Case(inner(max_seqlen=6), ValueError, "max_seqlen=6 is given without cu_seqlens"),
    "a cache along an order": Case(made(ALONG, Q, Q, Q, cache=CACHE, is_causal=True), ValueError, "along token orders"),
    "packed rows along an order": Case(made(ALONG, *[Q[0]] * 3, cu_seqlens=STARTS), ValueError, "along token orders"),
    "no cache of a layer": Case(layer_on(ROWS, cache={}), TypeError, "cache={} is a dict", "dilkit.DilatedCache"),
    "a cache for another module": Case(made(OTHER, ROWS, cache=CACHE), ValueError, "cache is given", "attention is Identity"),
    "a cache, and gradients": Case(layer_on(ROWS, cache=CACHE, is_causal=True), ValueError, "decode under torch.no_grad()"),
    "packed rows for another module": Case(made(OTHER, ROWS[0], cu_seqlens=STARTS), ValueError, "attention is Identity"),
    "packed rows of a batch": Case(layer_on(ROWS, cu_seqlens=STARTS), ValueError, "with cu_seqlens (total, 32) is needed"),
    "packed rows of others": Case(made(TURNING, ROWS[0], cu_seqlens=STARTS[:-1]), ValueError, "cu_seqlens ends with 4"),
    "a length without starts, of a layer": Case(layer_on(ROWS, max_seqlen=6), ValueError, "max_seqlen=6 is given without"),
    "positions of floats": Case(made(TURNING, ROWS, positions=torch.zeros(6)), TypeError, "positions", "float32", "integers"),
}

FOUR = Pattern([4, 8], [1, 2], heads=[None, (3, 5)])


def turned(x=Q, positions=None, **options) -> Callable[[], Any]:
    return made(rotary_embedding, x, positions, **options)


def weighed(*, query=Q, key=Q, pattern=P, **options) -> Callable[[], Any]:
    return made(attention_mass, query, key, pattern, **options)


def looked_at(rows, key=Q, pattern=P, **options) -> Callable[[], Any]:
    return made(attention_rows, Q, key, pattern, rows, **options)


WRONG = [(order((4, 4)), locality_report(order((4, 4), "row-major"), 4))]
EXTRAS = {
    "rotary of a list": Case(turned([1.0]), TypeError, "x is a list"),
    "rotary of integers": Case(turned(Q.long()), ValueError, "dtype torch.int64"),
    "a base of 0": Case(turned(base=0), ValueError, "base=0.0 must be finite and greater than 0"),
    "a base of a bool": Case(turned(base=True), TypeError, "base=True is a bool"),
    "a list of positions": Case(turned(Q, [0, 1, 2, 3, 4, 5]), TypeError, "positions is a list"),
    "positions of bools": Case(turned(Q, MASK[0]), TypeError, "positions is torch.bool"),
    "positions of another batch": Case(turned(Q, torch.zeros(3, 6).long()), ValueError, "(batch, seq) = (2, 6)"),
    "positions elsewhere": Case(turned(Q, torch.arange(6, device="meta")), ValueError, "positions is on meta"),
    "weights of a row too many": Case(looked_at([6]), IndexError, "rows"),
    "weights of row -1": Case(looked_at([-1]), IndexError, "rows"),
    "weights of lists of rows": Case(looked_at([[0]]), TypeError, "rows"),
    "weights of bools": Case(looked_at([True]), TypeError, "rows"),
    "weights of no causality": Case(looked_at([0], is_causal=1), TypeError, "is_causal"),
    "weights of heads that are not there": Case(looked_at([0], Q, FOUR), ValueError, "heads[1]"),
    "weights of scale NaN": Case(looked_at([0], scale=float("nan")), ValueError, "scale"),
    "mass of fewer keys": Case(weighed(key=Q[:, 1:]), ValueError, "key"),
    "mass along a list": Case(weighed(pattern=[4, 8]), TypeError, "pattern"),
    "mass of heads that are not there": Case(weighed(pattern=FOUR), ValueError, "heads[1]"),
    "mass by a backend of GPUs": Case(weighed(backend="cupy_raw"), NoBackendError, "cupy_raw"),
    "a wrong picture": Case(made(draw_orders, None, WRONG), ValueError, "order((4, 4), 'hilbert')", "another order"),
    "a picture of no orders": Case(made(draw_orders, None, []), ValueError, "orders are of 0 grids []"),
}
