"""Malformed biases and softcaps, at the values, at the calls and at the torch operators."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from core.malformed.attention import LAYER
from core.malformed.case import ROWS, Case, P, Q, attend, made
from helpers.calls import encode_call

import dilkit
from dilkit import Alibi, CoordinateAlibi, CoordinateTable, DilatedAttention, DilatedCache, GridTable, RelativeTable, alibi_slopes
from dilkit.bias.form import BiasForm
from dilkit.op.kvcache import last_rows_op
from dilkit.op.operators import backward_op, forward_op

SLOPES, TABLE, PLACES = alibi_slopes(4), torch.zeros(4, 5), torch.zeros(2, 6, 2)
LEARNED = torch.zeros(6, 2, requires_grad=True)
NESTED = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(6, 2)], layout=torch.jagged)
LSE = torch.zeros(2, 4, 6)


def bucketed(buckets) -> Callable[[], Any]:
    return made(RelativeTable, TABLE, torch.tensor(buckets))


def placed(*args, **options) -> Callable[[], Any]:
    return lambda: attend(bias=CoordinateAlibi(SLOPES, *args, **options))()


def cached(bias=None, softcap=None) -> Callable[[], Any]:
    lengths = torch.full((2,), 6, dtype=torch.int32)
    return lambda: dilkit.dilated_attention_with_kvcache(
        Q[:, :1], Q.clone(), Q.clone(), P, cache_seqlens=lengths, bias=bias, softcap=softcap
    )


def gone(*shape: int) -> torch.Tensor:
    x = torch.zeros(shape)
    x.untyped_storage().resize_(0)
    return x


def at_operator(form: BiasForm | None, *tensors, softcap: float = 0.0) -> Callable[[], Any]:
    call = encode_call(P, False, True, "reference", 0.0, softcap, form)
    return lambda: forward_op(Q, Q, Q, None, 1.0, call, None, None, None, None, *tensors)


def at_backward(form: BiasForm | None, *tensors) -> Callable[[], Any]:
    call = encode_call(P, False, True, "reference", 0.0, 0.0, form)
    return lambda: backward_op(Q, Q, Q, Q, Q, LSE, None, 1.0, call, None, None, None, None, *tensors)


def at_last_rows(form: BiasForm | None, *tensors) -> Callable[[], Any]:
    call, lengths = encode_call(P, True, False, "reference", 0.0, 0.0, form), torch.full((2,), 6, dtype=torch.int32)
    return lambda: last_rows_op(Q[:, :1], Q.clone(), Q.clone(), None, None, lengths, 1.0, call, None, *tensors)


VALUES = {
    "slopes of an array": Case(made(Alibi, np.ones(4)), TypeError, "slopes", "ndarray", "torch.Tensor"),
    "sparse slopes": Case(made(Alibi, SLOPES.to_sparse()), TypeError, "slopes", "sparse_coo", "plain"),
    "slopes of no heads": Case(made(alibi_slopes, 0), ValueError, "heads=0", "at least 1"),
    "a table of even size": Case(made(RelativeTable, TABLE[:, :4]), ValueError, "table has 4 entries", "odd"),
    "a table without entries": Case(made(RelativeTable, TABLE[:, :0]), ValueError, "table", "(4, 0)", "entries"),
    "buckets of floats": Case(bucketed([0.0, 1.0, 2.0]), TypeError, "buckets", "float32", "integer"),
    "an even number of buckets": Case(bucketed([0] * 4), ValueError, "buckets", "(4,)", "2 * m + 1"),
    "coordinates with a gradient": Case(made(CoordinateAlibi, SLOPES, LEARNED), ValueError, "coordinates", "detach"),
    "nested coordinates": Case(made(CoordinateAlibi, SLOPES, NESTED), TypeError, "coordinates", "jagged", "plain"),
    "an unknown metric": Case(made(CoordinateAlibi, SLOPES, PLACES, "cosine"), ValueError, "metric='cosine'", "'euclidean'"),
    "neutral rows as numbers": Case(made(CoordinateAlibi, SLOPES, PLACES, neutral=PLACES[..., 0]), TypeError, "neutral", "bool"),
    "neutral rows of a list": Case(made(CoordinateAlibi, SLOPES, [[1.0]], neutral=PLACES > 0), TypeError, "coordinates=", "list"),
    "neutral rows of others": Case(made(CoordinateAlibi, SLOPES, PLACES, neutral=PLACES > 0), ValueError, "neutral", "(2, 6)"),
    "cells of floats": Case(made(CoordinateTable, torch.zeros(4, 3, 3), PLACES), TypeError, "coordinates", "float32", "integer"),
    "cells of a line": Case(made(CoordinateTable, torch.zeros(4, 3), PLACES.long()), ValueError, "(2, 6, 2)", "(seq, 1)"),
    "a grid table of even size": Case(made(GridTable, torch.zeros(4, 3, 4), (2, 3)), ValueError, "table", "(4, 3, 4)", "odd"),
    "other dilation": Case(made(GridTable, torch.zeros(4, 3, 3), (2, 3), (1,)), ValueError, "dilation=(1,)", "shape=(2, 3)"),
    "a dilation of 0": Case(made(GridTable, torch.zeros(4, 3), (6,), 0), ValueError, "dilation=0", "at least 1"),
    "a shape of a number": Case(made(GridTable, torch.zeros(4, 3), 6), TypeError, "shape=6", "sequence"),
}

CALLS = {
    "slopes elsewhere": Case(attend(bias=Alibi(SLOPES.to("meta"))), ValueError, "slopes", "meta", "cpu"),
    "coordinates elsewhere": Case(placed(PLACES.to("meta")), ValueError, "coordinates", "meta", "cpu"),
    "a tensor as bias": Case(attend(bias=torch.zeros(4)), TypeError, "bias=", "Tensor", "never a tensor of all pairs"),
    "a backend that has none": Case(attend(bias=Alibi(SLOPES), backend="sdpa"), ValueError, "sdpa", "bias alibi"),
    "slopes of a cache with a gradient": Case(cached(Alibi(SLOPES.clone().requires_grad_())), ValueError, "gradient", "no_grad"),
    "softcap of a cache": Case(cached(softcap=-2), ValueError, "softcap=-2", "more than 0"),
    "softcap of steps": Case(made(DilatedCache(P, 4).attend, *3 * [Q[:, :1]], softcap="x"), TypeError, "softcap='x'", "number"),
    "softcap of a module": Case(lambda: DilatedAttention(P, softcap=0), ValueError, "softcap=0", "more than 0"),
    "bias of a module": Case(made(DilatedAttention, P, bias=TABLE), TypeError, "bias=", "Tensor", "dilkit.Alibi"),
    "score_bias of a call": Case(lambda: LAYER(ROWS, score_bias=TABLE), TypeError, "bias=", "Tensor", "dilkit.Alibi"),
}

_ALIBI, _PLACED = BiasForm(), BiasForm(dims=2, metric="euclidean", placed=True)
_WEIGHTS = torch.ones(4, 1)

OPERATORS = {
    "weights missing": Case(at_operator(_ALIBI), ValueError, "bias is missing", "text"),
    "positions too many": Case(at_operator(_ALIBI, _WEIGHTS, PLACES), ValueError, "positions is given"),
    "weights of another form": Case(at_operator(BiasForm(sizes=(5,)), _WEIGHTS), ValueError, "bias", "(4, 1)", "(4, 5)"),
    "weights with strides": Case(at_operator(BiasForm(sizes=(5,)), torch.zeros(5, 4).T), TypeError, "bias", "contiguous"),
    "positions without memory": Case(at_operator(_PLACED, _WEIGHTS, gone(2, 6, 2)), ValueError, "positions", "storage"),
    "backward with weights too many": Case(at_backward(None, _WEIGHTS), ValueError, "bias is given"),
    "last rows with other positions": Case(at_last_rows(_PLACED, _WEIGHTS, PLACES[:, :1].contiguous()), ValueError, "(2, 1, 2)"),
    "a softcap below 0": Case(at_operator(None, softcap=-1.0), ValueError, "softcap"),
    "a form of 4 dimensions": Case(made(BiasForm, dims=4, placed=True), ValueError, "dims=4", "1 to 3"),
    "a neutral form of a table": Case(made(BiasForm, sizes=(3,), placed=True, neutral=True), ValueError, "neutral=True"),
    "a form of an unknown metric": Case(made(BiasForm, metric="cosine"), ValueError, "metric='cosine'", "euclidean"),
    "a form of other dimensions": Case(made(BiasForm, dims=2, sizes=(3,), placed=True), ValueError, "sizes=(3,)", "dims=2"),
    "a text of other flags": Case(made(BiasForm.decode, "1//l1/"), ValueError, "bias", "'1//l1/'"),
}
SCORES = VALUES | CALLS | {f"operator: {name}": case for name, case in OPERATORS.items()}
