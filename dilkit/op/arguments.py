"""The arguments of a call: checked, and as the torch operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dilkit.checks import boolean, not_distributed, probability, real, shown
from dilkit.op._facts import plain_facts, surely_fit
from dilkit.op.boundary import check_shapes
from dilkit.op.dropout import draw_seed
from dilkit.op.operators import encode_call
from dilkit.op.rules import AUTOCAST_KEYS
from dilkit.op.scores import PLAIN, Scores
from dilkit.op.zero_keys import check_sink
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES
from dilkit.selector import names_of

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def encode_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    is_causal: bool,
    scale: float | None,
    backend: str | Sequence[str] | None,
    dropout_p: float = 0.0,
    scores: Scores = PLAIN,
) -> tuple[float, str]:
    """The two arguments of the operators beside the tensors: the scale, and the others as one text (`encode_call`)."""
    if type(is_causal) is not bool:
        boolean("is_causal", is_causal)
    factor = query.size(-1) ** -0.5 if scale is None else real("scale", scale)
    names = "" if backend is None else ",".join(names_of(backend))
    requires_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    rate = probability("dropout_p", dropout_p)
    if scores is PLAIN:
        return factor, encode_call(pattern, is_causal, requires_grad, names, rate)
    requires_grad = requires_grad or (scores.form is not None and scores.form.learned)
    return factor, encode_call(pattern, is_causal, requires_grad, names, rate, scores.softcap, scores.form)


def further_arguments(
    dropout_p: float,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    scores: Scores = PLAIN,
    block_layout: Tensor | None = None,
) -> tuple[Any, ...]:
    """The arguments of the forward operator after the sink, as far as they are needed; for dropout a seed is drawn."""
    if block_layout is not None:
        return cu_seqlens, max_seqlen, draw_seed() if dropout_p > 0 else None, None, *scores.tensors, block_layout
    if scores.bias is not None:
        return cu_seqlens, max_seqlen, draw_seed() if dropout_p > 0 else None, None, *scores.tensors
    if dropout_p > 0:
        return cu_seqlens, max_seqlen, draw_seed()
    return () if cu_seqlens is None else (cu_seqlens, max_seqlen)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
) -> bytes | None:
    """Raise TypeError or ValueError, naming the argument and the limit, unless these arguments fit each other.

    Returns the `plain_facts` of query, key and value where these are all tensors.
    """
    if not isinstance(pattern, Pattern):
        check_pattern(pattern)
    compiling = torch.compiler.is_compiling()
    facts = None if compiling else plain_facts(query, key, value)
    if facts is None and (compiling or not surely_fit(query, key, value)):
        _check_tensors(query, key, value)
    if pattern.heads is not None or pattern.head_shard is not None:
        pattern.check_heads(query.shape[2], key.shape[2])
    if key_padding_mask is not None:
        _check_mask(key_padding_mask, query)
    if sink is not None:
        check_sink(sink, query)
    return facts if key_padding_mask is sink is None else None


def check_pattern(pattern: object) -> None:
    """Raise TypeError unless `pattern` is one."""
    if not isinstance(pattern, Pattern):
        raise TypeError(
            f"pattern={shown(pattern)} is a {type(pattern).__name__}; a dilkit.Pattern is needed, such as Pattern([2048], [1])"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise TypeError or ValueError, naming the tensor, unless these can be computed together."""
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        _check_tensor(name, x, query)
    check_shapes(query.shape, key.shape, value.shape)
    for name, x in named:
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; 1 is needed ({name}.contiguous())")


def _check_tensor(name: str, x: Tensor, query: Tensor) -> None:
    """Raise TypeError or ValueError for a tensor that cannot be computed."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
    if type(x) is not torch.Tensor:
        not_distributed(name, x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{name} is {x.dtype}; one of {', '.join(DTYPES)} is needed")
    if x.layout is not torch.strided or x.is_nested:
        what, way = (
            ("is nested", "query, key and value may be nested together")
            if x.is_nested
            else (f"has layout {x.layout}", f"{name}.to_dense()")
        )
        raise TypeError(f"{name} {what}; a plain tensor, torch.strided, is needed ({way})")
    if x.device != query.device or (x.dtype != query.dtype and not _autocast(query.device.type)):
        raise ValueError(
            f"{name} is {x.dtype} on {x.device} but query {query.dtype} on {query.device}; make them equal with {name}.to(query)"
        )


def _autocast(device: str) -> bool:
    """Whether the operator will be called under an autocast that makes mixed dtypes equal."""
    return device in AUTOCAST_KEYS and torch.is_autocast_enabled(device)


def _check_mask(mask: Tensor, query: Tensor) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"key_padding_mask is a {type(mask).__name__}; a bool torch.Tensor is needed")
    if type(mask) is not torch.Tensor:
        not_distributed("key_padding_mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask is {mask.dtype}; torch.bool is needed, True = ignored (mask == 0 of one that has 1 for tokens)"
        )
    if mask.dim() != 2 or mask.shape[0] != query.shape[0] or mask.shape[1] != query.shape[1]:
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}; (batch, seq) = {tuple(query.shape[:2])} is needed")
    if mask.device != query.device:
        raise ValueError(f"key_padding_mask is on {mask.device} but query on {query.device}; move it with .to(query.device)")
