"""Malformed biases and softcaps, at the values, at the calls and at the torch operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from core.malformed.attention import LAYER
from core.malformed.case import ROWS, Case, P, Q, attend, made

import dilkit
from dilkit import Alibi, CoordinateAlibi, DilatedAttention, DilatedCache, GridTable, RelativeTable, alibi_slopes, t5_buckets
from dilkit.bias.form import BiasForm
from dilkit.op.kvcache import last_rows_op
from dilkit.op.operators import backward_op, encode_call, forward_op

SLOPES, TABLE, PLACES = alibi_slopes(4), torch.zeros(4, 5), torch.zeros(2, 6, 2)
LEARNED, WHOLE = torch.zeros(6, 2, requires_grad=True), PLACES.long()
NAN = torch.tensor([0.5, float("nan"), 1.0, 1.0])
NESTED = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(6, 2)], layout=torch.jagged)
LSE = torch.zeros(2, 4, 6)


def bucketed(buckets: Any) -> Callable[[], Any]:
    return made(RelativeTable, TABLE, torch.tensor(buckets))


def placed(*args: Any, **options: Any) -> Callable[[], Any]:
    """A call with a bias by coordinates."""
    return lambda: attend(bias=CoordinateAlibi(SLOPES, *args, **options))()


def cached(bias: Any = None, softcap: Any = None) -> Callable[[], Any]:
    lengths = torch.full((2,), 6, dtype=torch.int32)
    return lambda: dilkit.dilated_attention_with_kvcache(
        Q[:, :1], Q.clone(), Q.clone(), P, cache_seqlens=lengths, bias=bias, softcap=softcap
    )


def gone(*shape: int) -> torch.Tensor:
    """A tensor whose memory was taken away."""
    x = torch.zeros(shape)
    x.untyped_storage().resize_(0)
    return x


def at_operator(form: BiasForm | None, *tensors: Any, softcap: float = 0.0) -> Callable[[], Any]:
    call = encode_call(P, False, True, "reference", 0.0, softcap, form)
    return lambda: forward_op(Q, Q, Q, None, 1.0, call, None, None, None, None, None, *tensors)


def at_backward(form: BiasForm | None, *tensors: Any) -> Callable[[], Any]:
    call = encode_call(P, False, True, "reference", 0.0, 0.0, form)
    return lambda: backward_op(Q, Q, Q, Q, Q, LSE, None, 1.0, call, None, None, None, None, *tensors)


def at_last_rows(form: BiasForm | None, *tensors: Any) -> Callable[[], Any]:
    call, lengths = encode_call(P, True, False, "reference", 0.0, 0.0, form), torch.full((2,), 6, dtype=torch.int32)
    return lambda: last_rows_op(Q[:, :1], Q.clone(), Q.clone(), None, None, lengths, 1.0, call, None, *tensors)


VALUES = {
    "a NaN slope": Case(made(Alibi, NAN), ValueError, "slopes[1] is nan", "finite"),
    "slopes of 2 dimensions": Case(made(Alibi, SLOPES[None]), ValueError, "slopes", "(1, 4)", "(heads,)"),
    "slopes of integers": Case(made(Alibi, torch.ones(4).long()), TypeError, "slopes", "int64", "slopes.float()"),
    "slopes of an array": Case(made(Alibi, np.ones(4)), TypeError, "slopes", "ndarray", "torch.Tensor"),
    "sparse slopes": Case(made(Alibi, SLOPES.to_sparse()), TypeError, "slopes", "sparse_coo", "plain"),
    "slopes of no heads": Case(made(alibi_slopes, 0), ValueError, "heads=0", "at least 1"),
    "a table of even size": Case(made(RelativeTable, TABLE[:, :4]), ValueError, "table has 4 entries", "odd"),
    "a table without entries": Case(made(RelativeTable, TABLE[:, :0]), ValueError, "table", "(4, 0)", "entries"),
    "a table with inf": Case(made(RelativeTable, TABLE - float("inf")), ValueError, "table[0, 0] is -inf", "finite"),
    "buckets out of range": Case(bucketed([0, 5, 1]), ValueError, "buckets are from 0 to 5", "0 to 4"),
    "buckets below zero": Case(bucketed([0, -1, 1]), ValueError, "buckets", "-1", "0 to 4"),
    "buckets of floats": Case(bucketed([0.0, 1.0, 2.0]), TypeError, "buckets", "float32", "integer"),
    "an even number of buckets": Case(bucketed([0] * 4), ValueError, "buckets", "(4,)", "2 * m + 1"),
    "buckets without distances": Case(made(t5_buckets, 32, 8), ValueError, "max_distance=8", "at least 9"),
    "coordinates of 4 numbers": Case(made(CoordinateAlibi, SLOPES, torch.zeros(6, 4)), ValueError, "(6, 4)", "1 to 3 numbers"),
    "whole coordinates": Case(made(CoordinateAlibi, SLOPES, WHOLE), TypeError, "coordinates", "int64", "coordinates.float()"),
    "coordinates with a gradient": Case(made(CoordinateAlibi, SLOPES, LEARNED), ValueError, "coordinates", "detach"),
    "NaN coordinates": Case(made(CoordinateAlibi, SLOPES, PLACES * float("nan")), ValueError, "coordinates[0, 0, 0] is nan"),
    "nested coordinates": Case(made(CoordinateAlibi, SLOPES, NESTED), TypeError, "coordinates", "jagged", "plain"),
    "an unknown metric": Case(made(CoordinateAlibi, SLOPES, PLACES, "cosine"), ValueError, "metric='cosine'", "'euclidean'"),
    "a grid table of even size": Case(made(GridTable, torch.zeros(4, 3, 4), (2, 3)), ValueError, "table", "(4, 3, 4)", "odd"),
    "a grid of other dimensions": Case(made(GridTable, torch.zeros(4, 3), (2, 3)), ValueError, "table", "shape=(2, 3)"),
    "other dilation": Case(made(GridTable, torch.zeros(4, 3, 3), (2, 3), (1,)), ValueError, "dilation=(1,)", "shape=(2, 3)"),
    "a dilation of 0": Case(made(GridTable, torch.zeros(4, 3), (6,), 0), ValueError, "dilation=0", "at least 1"),
    "a shape of a number": Case(made(GridTable, torch.zeros(4, 3), 6), TypeError, "shape=6", "sequence"),
}

CALLS = {
    "slopes of other heads": Case(attend(bias=Alibi(SLOPES[:3])), ValueError, "slopes", "3 heads", "4 heads of query"),
    "slopes elsewhere": Case(attend(bias=Alibi(SLOPES.to("meta"))), ValueError, "slopes", "meta", "cpu"),
    "coordinates elsewhere": Case(placed(PLACES.to("meta")), ValueError, "coordinates", "meta", "cpu"),
    "coordinates of another length": Case(placed(PLACES[:, :5]), ValueError, "coordinates", "(2, 5, 2)", "(2, 6, 1 to 3)"),
    "a small grid": Case(attend(bias=GridTable(torch.zeros(4, 3), (5,))), ValueError, "shape=(5,)", "5 tokens", "6 of query"),
    "a tensor as bias": Case(attend(bias=torch.zeros(4)), TypeError, "bias=", "Tensor", "never a tensor of all pairs"),
    "a kind as bias": Case(attend(bias=Alibi), TypeError, "bias=", "ABCMeta", "dilkit.Alibi"),
    "softcap of 0": Case(attend(softcap=0), ValueError, "softcap=0", "more than 0", "None"),
    "softcap is NaN": Case(attend(softcap=float("nan")), ValueError, "softcap=nan", "finite"),
    "softcap is a text": Case(attend(softcap="30"), TypeError, "softcap='30'", "str", "number"),
    "a backend that has none": Case(attend(bias=Alibi(SLOPES), backend="sdpa"), ValueError, "sdpa", "bias alibi"),
    "part of a cache": Case(cached(CoordinateAlibi(SLOPES, PLACES[:, :5])), ValueError, "coordinates", "(2, 5, 2)", "(2, 6,"),
    "slopes of a cache with a gradient": Case(cached(Alibi(SLOPES.clone().requires_grad_())), ValueError, "gradient", "no_grad"),
    "softcap of a cache": Case(cached(softcap=-2), ValueError, "softcap=-2", "more than 0"),
    "softcap of steps": Case(made(DilatedCache(P, 4).attend, *3 * [Q[:, :1]], softcap="x"), TypeError, "softcap='x'", "number"),
    "softcap of a module": Case(lambda: DilatedAttention(P, softcap=0), ValueError, "softcap=0", "more than 0"),
    "bias of a module": Case(made(DilatedAttention, P, bias=TABLE), TypeError, "bias=", "Tensor", "dilkit.Alibi"),
    "bias of other heads": Case(lambda: LAYER(ROWS, score_bias=Alibi(SLOPES[:2])), ValueError, "slopes", "2 heads", "4 heads"),
    "score_bias of a call": Case(lambda: LAYER(ROWS, score_bias=TABLE), TypeError, "bias=", "Tensor", "dilkit.Alibi"),
}

_ALIBI, _PLACED = BiasForm(), BiasForm(dims=2, metric="euclidean", placed=True)
_WEIGHTS = torch.ones(4, 1)

OPERATORS = {
    "weights missing": Case(at_operator(_ALIBI), ValueError, "bias is missing", "text"),
    "weights too many": Case(at_operator(None, _WEIGHTS), ValueError, "bias is given", "text"),
    "positions missing": Case(at_operator(_PLACED, _WEIGHTS), ValueError, "positions is missing"),
    "positions too many": Case(at_operator(_ALIBI, _WEIGHTS, PLACES), ValueError, "positions is given"),
    "weights of another dtype": Case(at_operator(_ALIBI, _WEIGHTS.double()), TypeError, "bias", "float64", "float32"),
    "weights of other heads": Case(at_operator(_ALIBI, _WEIGHTS[:3]), ValueError, "bias", "(3, 1)", "(4, 1)"),
    "weights of another form": Case(at_operator(BiasForm(sizes=(5,)), _WEIGHTS), ValueError, "bias", "(4, 1)", "(4, 5)"),
    "weights with strides": Case(at_operator(BiasForm(sizes=(5,)), torch.zeros(5, 4).T), TypeError, "bias", "contiguous"),
    "weights without memory": Case(at_operator(_ALIBI, gone(4, 1)), ValueError, "bias", "storage"),
    "positions without memory": Case(at_operator(_PLACED, _WEIGHTS, gone(2, 6, 2)), ValueError, "positions", "storage"),
    "positions of another length": Case(at_operator(_PLACED, _WEIGHTS, PLACES[:, :5].contiguous()), ValueError, "(2, 5, 2)"),
    "backward without weights": Case(at_backward(_ALIBI), ValueError, "bias is missing"),
    "backward with weights too many": Case(at_backward(None, _WEIGHTS), ValueError, "bias is given"),
    "last rows without weights": Case(at_last_rows(_ALIBI), ValueError, "bias is missing"),
    "last rows with other positions": Case(at_last_rows(_PLACED, _WEIGHTS, PLACES[:, :1].contiguous()), ValueError, "(2, 1, 2)"),
    "a softcap below 0": Case(at_operator(None, softcap=-1.0), ValueError, "softcap"),
    "a form of 4 dimensions": Case(made(BiasForm, dims=4, placed=True), ValueError, "dims=4", "1 to 3"),
    "a form of even size": Case(made(BiasForm, sizes=(4,)), ValueError, "sizes=(4,)", "odd"),
    "a form of an unknown metric": Case(made(BiasForm, metric="cosine"), ValueError, "metric='cosine'", "euclidean"),
    "a form of other dimensions": Case(made(BiasForm, dims=2, sizes=(3,), placed=True), ValueError, "sizes=(3,)", "dims=2"),
    "a text of other flags": Case(made(BiasForm.decode, "1//l1/"), ValueError, "bias", "'1//l1/'"),
}
SCORES = VALUES | CALLS | {f"operator: {name}": case for name, case in OPERATORS.items()}
