"""Malformed calls of `dilated_attention` and of the torch modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers.malformed.case import MASK, ROWS, Case, P, Q

import dilkit
from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern, PatternError, order
from dilkit.oracle import oracle_attention

INNER = DilatedAttention(P)
LAYER = MultiheadDilatedAttention(32, 4, INNER)


def attend(query: Any = Q, key: Any = Q, value: Any = Q, pattern: Any = P, **options: Any) -> Callable[[], Any]:
    return lambda: dilkit.dilated_attention(query, key, value, pattern, **options)


def layer(*args: Any, **options: Any) -> Callable[[], Any]:
    return lambda: MultiheadDilatedAttention(*args, **options)


def autocast_with_integers() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dilkit.dilated_attention(Q, Q.long(), Q.long(), P)


CALLS = {
    "query is an array": Case(attend(np.zeros((2, 6, 4, 8))), TypeError, ("query", "ndarray", "torch.Tensor")),
    "key is None": Case(attend(key=None), TypeError, ("key", "NoneType", "torch.Tensor")),
    "query of 3 dimensions": Case(attend(Q[0]), ValueError, ("query", "(6, 4, 8)", "(batch, seq, heads, head_dim)")),
    "value of 5 dimensions": Case(attend(value=Q[None]), ValueError, ("value", "(1, 2, 6, 4, 8)", "head_dim)")),
    "integer tensors": Case(attend(*[Q.long()] * 3), TypeError, ("query", "int64", "float32", "bfloat16")),
    "complex tensors": Case(attend(*[Q.cfloat()] * 3), TypeError, ("query", "complex64", "float64")),
    "integer key under autocast": Case(autocast_with_integers, TypeError, ("key", "int64", "float32")),
    "mixed dtypes": Case(attend(key=Q.half()), ValueError, ("key", "float16", "float32", "key.to(query)")),
    "mixed devices": Case(attend(value=Q.to("meta")), ValueError, ("value", "meta", "cpu", "value.to(query)")),
    "sparse query": Case(attend(Q.to_sparse()), TypeError, ("query", "sparse_coo", "strided", "to_dense")),
    "strided last dimension": Case(attend(key=Q.mT.contiguous().mT), ValueError, ("key", "stride 4", "contiguous")),
    "key and value differ": Case(attend(key=Q[:, :, :2]), ValueError, ("key", "value", "(2, 6, 2, 8)", "equal")),
    "batches differ": Case(attend(Q[:1]), ValueError, ("key", "batch 2", "query 1")),
    "lengths differ": Case(attend(Q[:, :5]), ValueError, ("key", "seq 6", "query 5")),
    "head_dims differ": Case(attend(Q[..., :7].contiguous()), ValueError, ("key", "head_dim 8", "query 7")),
    "kv heads do not divide": Case(
        attend(key=Q[:, :, :3], value=Q[:, :, :3]), ValueError, ("key", "3 heads", "4 heads of query")
    ),
    "no heads": Case(attend(*[Q[:, :, :0]] * 3), ValueError, ("query", "at least one head")),
    "no kv heads": Case(attend(key=Q[:, :, :0], value=Q[:, :, :0]), ValueError, ("key", "0 heads", "divide")),
    "no head_dim": Case(attend(*[Q[..., :0]] * 3), ValueError, ("query", "head_dim 1")),
    "pattern is a tuple": Case(attend(pattern=([4], [1])), TypeError, ("pattern", "tuple", "dilkit.Pattern")),
    "heads of the pattern": Case(
        attend(pattern=Pattern([4], [1], heads=[(2, 5)])), PatternError, ("heads[0]", "(2, 5)", "4 heads")
    ),
    "mask of floats": Case(attend(key_padding_mask=MASK.float()), TypeError, ("key_padding_mask", "float32", "torch.bool")),
    "mask with 1 for tokens": Case(attend(key_padding_mask=MASK.long()), TypeError, ("int64", "True = ignored", "mask == 0")),
    "mask is a list": Case(attend(key_padding_mask=[True]), TypeError, ("key_padding_mask", "list", "bool torch.Tensor")),
    "mask of other length": Case(attend(key_padding_mask=MASK[:, :5]), ValueError, ("key_padding_mask", "(2, 5)", "(2, 6)")),
    "mask of heads": Case(attend(key_padding_mask=MASK[:, None]), ValueError, ("key_padding_mask", "(2, 1, 6)", "(2, 6)")),
    "mask elsewhere": Case(attend(key_padding_mask=MASK.to("meta")), ValueError, ("key_padding_mask", "meta", "cpu", ".to(")),
    "is_causal is a text": Case(attend(is_causal="yes"), TypeError, ("is_causal='yes'", "str", "True or False")),
    "is_causal is a tensor": Case(attend(is_causal=torch.tensor(True)), TypeError, ("is_causal", "Tensor", "True or False")),
    "return_lse is a number": Case(attend(return_lse=1), TypeError, ("return_lse=1", "int", "True or False")),
    "dropout_p is a text": Case(attend(dropout_p="0.5"), TypeError, ("dropout_p='0.5'", "str", "number")),
    "dropout_p is 1": Case(attend(dropout_p=1), ValueError, ("dropout_p=1.0", "less than 1")),
    "scale is a text": Case(attend(scale="0.5"), TypeError, ("scale='0.5'", "str", "number")),
    "scale is a tensor": Case(attend(scale=torch.tensor(0.5)), TypeError, ("scale", "Tensor", "number")),
    "scale is a bool": Case(attend(scale=True), TypeError, ("scale=True", "bool", "number")),
    "scale is NaN": Case(attend(scale=float("nan")), ValueError, ("scale=nan", "finite")),
    "scale is an endless integer": Case(attend(scale=10**400), ValueError, ("scale", "too large", "finite")),
    "scale leaves fp32": Case(attend(scale=-1e38), ValueError, ("scale=-1e+38", "float32", "1e+30")),
    "nested tensors": Case(
        attend(*3 * [torch.nested.as_nested_tensor([ROWS[0], ROWS[1]], layout=torch.jagged)]), ValueError, ("query", "jagged")
    ),
    "scale is infinite": Case(attend(scale=-float("inf")), ValueError, ("scale=-inf", "finite")),
    "backend is a number": Case(attend(backend=1), TypeError, ("backend=1", "int", "name")),
    "backend is an object": Case(attend(backend=dilkit.Backend), TypeError, ("backend=", "ABCMeta", "name")),
    "backend is no one": Case(attend(backend=[]), ValueError, ("backend=[]", "name")),
    "backend of numbers": Case(attend(backend=["reference", 2]), ValueError, ("backend=['reference', 2]", "name")),
    "two backends in one text": Case(attend(backend="sdpa,reference"), ValueError, ("backend='sdpa,reference'", "list of names")),
    "backend with a semicolon": Case(attend(backend="sdpa;x"), ValueError, ("backend='sdpa;x'", "list of names")),
    "unknown backend": Case(attend(backend="fast"), ValueError, ("backend='fast'", "known: ", "reference")),
    "unknown backend, nothing to do": Case(attend(*[Q[:0]] * 3, backend="fast"), ValueError, ("backend='fast'", "known: ")),
    "oracle beyond its size": Case(
        lambda: oracle_attention(*[torch.zeros(1, 2**16, 1, 1)] * 3, P), PatternError, ("seq=65536", "entries", "at most")
    ),
}

MODULES = {
    "pattern of a module": Case(lambda: DilatedAttention([4]), TypeError, ("pattern=[4]", "dilkit.Pattern")),
    "scale of a module": Case(lambda: DilatedAttention(P, scale="x"), TypeError, ("scale='x'", "number")),
    "embed_dim and heads": Case(layer(30, 4, INNER), ValueError, ("embed_dim=30", "num_heads=4")),
    "no heads": Case(layer(32, 0, INNER), ValueError, ("num_heads=0", "at least 1")),
    "kv heads of a module": Case(layer(32, 4, INNER, num_kv_heads=3), ValueError, ("num_kv_heads=3", "num_heads=4")),
    "dropout": Case(layer(32, 4, INNER, dropout=1.5), ValueError, ("dropout=1.5", "less than 1")),
    "batch_first": Case(layer(32, 4, INNER, batch_first=False), ValueError, ("batch_first=False", "only")),
    "neither attention nor lists": Case(layer(32, 4), (ValueError, TypeError), ("attention", "segment_lengths")),
    "need_weights": Case(lambda: LAYER(ROWS, ROWS, ROWS, need_weights=True), ValueError, ("need_weights=True", "only")),
    "attn_mask": Case(lambda: LAYER(ROWS, ROWS, ROWS, attn_mask=MASK), ValueError, ("attn_mask", "pattern")),
    "width of the rows": Case(lambda: LAYER(ROWS[..., :31], ROWS, ROWS), ValueError, ("query", "(2, 6, 31)", "32")),
    "mask of a module with 1 for tokens": Case(
        lambda: LAYER(ROWS, key_padding_mask=MASK.long()), TypeError, ("int64", "True = ignored", "mask == 0")
    ),
    "mask of a module": Case(
        lambda: LAYER(ROWS, ROWS, ROWS, key_padding_mask=MASK.float() - 1), ValueError, ("key_padding_mask", "0 and -inf", "bool")
    ),
    "backend of a module": Case(lambda: DilatedAttention(P, backend=3), TypeError, ("backend=3", "int", "name")),
    "order of a module": Case(lambda: DilatedAttention(P, order="hilbert"), TypeError, ("order='hilbert'", "TokenOrder")),
    "no orders": Case(lambda: DilatedAttention(P, orders=[]), ValueError, ("orders is empty", "at least one")),
    "order and orders": Case(
        lambda: DilatedAttention(P, order=order((2, 3)), orders=[order((2, 3))]), ValueError, ("order=", "orders=", "one order")
    ),
    "embed_dim is a fraction": Case(layer(32.0, 4, INNER), TypeError, ("embed_dim=32.0", "integer")),
    "embed_dim below zero": Case(layer(-32, 4, INNER), ValueError, ("embed_dim=-32", "at least 1")),
    "a pattern as attention": Case(layer(32, 4, P), TypeError, ("attention=", "Pattern", "a module")),
    "a name as attention": Case(layer(32, 4, "sdpa"), TypeError, ("attention='sdpa'", "a module")),
    "lengths without rates": Case(layer(32, 4, segment_lengths=[4]), ValueError, ("dilation_rates=None", "both")),
    "attention and lists": Case(
        layer(32, 4, INNER, segment_lengths=[4], dilation_rates=[1]), ValueError, ("segment_lengths=[4]", "either")
    ),
    "dtype is a text": Case(layer(32, 4, INNER, dtype="float32"), TypeError, ("dtype='float32'", "torch.float32")),
    "dtype of integers": Case(layer(32, 4, INNER, dtype=torch.int32), TypeError, ("dtype=torch.int32", "floating-point")),
    "unknown device": Case(layer(32, 4, INNER, device="tpu"), ValueError, ("device='tpu'", "cuda")),
    "bias is a text": Case(layer(32, 4, INNER, bias="no"), TypeError, ("bias='no'", "True or False")),
    "rotary is a text": Case(layer(32, 4, INNER, rotary="yes"), TypeError, ("rotary='yes'", "number")),
    "rotary of an odd head": Case(layer(28, 4, INNER, rotary=True), ValueError, ("head_dim=7", "odd")),
    "epsilon of 0": Case(layer(32, 4, INNER, layer_norm_eps=0), ValueError, ("layer_norm_eps=0", "greater than 0")),
    "rows are None": Case(lambda: LAYER(None, ROWS, ROWS), TypeError, ("query", "NoneType", "torch.Tensor")),
    "rows of 4 dimensions": Case(lambda: LAYER(Q), ValueError, ("query", "(2, 6, 4, 8)", "(batch, seq, 32)")),
    "rows of integers": Case(lambda: LAYER(ROWS.long()), TypeError, ("query", "int64", "float32")),
    "rows of fp64": Case(lambda: LAYER(ROWS, ROWS.double()), TypeError, ("key", "float64", "float32", "key.to(")),
    "rows elsewhere": Case(lambda: LAYER(ROWS.to("meta")), ValueError, ("query", "meta", "cpu")),
    "batches of a module": Case(lambda: LAYER(ROWS, ROWS[:1]), ValueError, ("key", "(1, 6, 32)", "equal")),
    "length of the mask": Case(lambda: LAYER(ROWS, key_padding_mask=MASK[:, :5]), ValueError, ("(2, 5)", "(2, 6)")),
    "mask is a list": Case(lambda: LAYER(ROWS, key_padding_mask=[1]), TypeError, ("key_padding_mask", "list", "bool")),
    "causality is a text": Case(lambda: LAYER(ROWS, is_causal="x"), TypeError, ("is_causal='x'", "True or False")),
    "positions without rotary": Case(lambda: LAYER(ROWS, positions=torch.arange(6)), ValueError, ("positions", "rotary=True")),
    "positions of floats": Case(
        lambda: MultiheadDilatedAttention(32, 4, INNER, rotary=True)(ROWS, positions=torch.zeros(6)),
        TypeError,
        ("positions", "float32", "integers"),
    ),
}
