"""The arguments of a call: checked, and put together as `Inputs` and `CallOptions`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.checks import boolean, probability, real, shown
from dilkit.inputs import Inputs
from dilkit.op._facts import call_key, want_gradient
from dilkit.op.autocast import AUTOCAST_KEYS
from dilkit.op.boundary import TORCH_DTYPES, check_device, check_shapes, check_tensor
from dilkit.op.call_options import CallOptions
from dilkit.op.dropout import Dropout, draw_seed
from dilkit.op.given import check_given
from dilkit.op.offsets import packed_alike
from dilkit.op.scores import PLAIN, Scores, check_detached, packed_scores, scores_of
from dilkit.op.zero_keys import check_sink
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES
from dilkit.selector import names_of

BOOL_MASK = "torch.bool is needed, True = ignored (mask == 0 of one that has 1 for tokens)"


def call_of(
    inputs: Inputs,
    pattern: Pattern,
    is_causal: bool = False,
    scale: float | None = None,
    backend: str | Sequence[str] | None = None,
    dropout_p: float = 0.0,
    bias: Bias | None = None,
    softcap: float | None = None,
    max_seqlen: int | None = None,
    scores: Scores = PLAIN,
    query_offset: int | None = None,
    key: Hashable | None = None,
) -> tuple[Inputs, CallOptions, Hashable | None]:
    """Return the arguments of `attend`: inputs with a bias and the seed of a dropout, options, and the `call_key`.

    `scores`, `key`: bias and softcap, and the `call_key`, where they are known already. Raises TypeError or ValueError, naming
    argument and limit. Plain tensors are checked when the first call with tensors like these is prepared (`prepared_call.py`).
    """
    if key is None and not torch.compiler.is_compiling():
        key = call_key(inputs)
    if key is None or not isinstance(pattern, Pattern):
        check_inputs(inputs, pattern, packed_alike(inputs))
    if bias is not None or softcap is not None:
        check_inputs(inputs, pattern, packed_alike(inputs))
        sequences = inputs.cu_seqlens if inputs.cu_seqlens_k is None else inputs.cu_seqlens_k
        facts = inputs.query, pattern, inputs.key.shape[2]
        if sequences is None:
            scores = scores_of(bias, softcap, *facts, inputs.key.shape[1])
        else:
            scores = packed_scores(bias, softcap, *facts, sequences, inputs.key.shape[1])
    if type(is_causal) is not bool:
        boolean("is_causal", is_causal)
    if type(dropout_p) is not float or dropout_p:
        dropout_p = probability("dropout_p", dropout_p)
    if scale is not None:
        scale = real("scale", scale)
    backends = () if backend is None else names_of(backend)
    form = None
    if scores.bias is not None:
        inputs, key, form = inputs._replace(bias=scores.bias), None, scores.bias.form
    if dropout_p:
        inputs, key = inputs._replace(dropout=Dropout(dropout_p, draw_seed())), None
    wanting = inputs if inputs.sink is None else inputs._replace(sink=None)  # its gradient needs no backend
    requires_grad = torch.is_grad_enabled() and (_traced_want_gradient(wanting) if key is None else want_gradient(wanting))
    fields = pattern, is_causal, requires_grad, backends, dropout_p, scores.softcap, form, scale, max_seqlen, query_offset, None
    options = CallOptions(*fields) if key is None else tuple.__new__(CallOptions, fields)  # as `dilated_attention` makes `Inputs`
    return inputs, options, key


def _traced_want_gradient(inputs: Inputs) -> bool:
    bias, tensors = inputs.bias, [x for x in inputs if isinstance(x, Tensor)]
    if bias is not None:
        check_detached(bias.positions)
    return any(x.requires_grad for x in tensors) or (bias is not None and bias.form.learned)


def check_inputs(inputs: Inputs, pattern: Pattern, is_square: bool = True) -> None:
    """Raise TypeError or ValueError unless these fit each other; `is_square`: with as many queries as keys."""
    check_pattern(pattern)
    query, key, value, *_ = inputs
    named = (("query", query), ("key", key), ("value", value))
    for name, x in named:
        _check_tensor(name, x, query)
    check_shapes(query.shape, key.shape, value.shape, is_square)
    for name, x in named:
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; 1 is needed ({name}.contiguous())")
    if pattern.heads is not None or pattern.head_shard is not None:
        pattern.check_heads(query.shape[2], key.shape[2])
    check_others(inputs, pattern)


def check_others(inputs: Inputs, pattern: Pattern) -> None:
    """Raise TypeError or ValueError unless mask, sink, layout and intervals fit query and key, which fit each other."""
    if inputs.key_padding_mask is not None:
        _check_mask(inputs.key_padding_mask, inputs.key)
    if inputs.sink is not None:
        check_sink(inputs.sink, inputs.query)
    if inputs.given is not None:  # where it is missing the operator says so
        check_given(inputs, pattern)


def check_pattern(pattern: object) -> None:
    if not isinstance(pattern, Pattern):
        needed = "a dilkit.Pattern is needed, such as Pattern([2048], [1])"
        raise TypeError(f"pattern={shown(pattern)} is a {type(pattern).__name__}; {needed}")


def _check_tensor(name: str, x: Tensor, query: Tensor) -> None:
    if type(x) is not torch.Tensor:
        check_tensor(name, x)
    if x.dtype not in TORCH_DTYPES:
        raise TypeError(f"{name} is {x.dtype}; one of {', '.join(DTYPES)} is needed")
    if x.layout is not torch.strided or x.is_nested:
        way = "query, key and value may be nested together" if x.is_nested else f"{name}.to_dense()"
        what = "is nested" if x.is_nested else f"has layout {x.layout}"
        raise TypeError(f"{name} {what}; a plain tensor, torch.strided, is needed ({way})")
    kind = query.device.type
    if x.device != query.device or (x.dtype != query.dtype and not (kind in AUTOCAST_KEYS and torch.is_autocast_enabled(kind))):
        other = f"query {query.dtype} on {query.device}"
        raise ValueError(f"{name} is {x.dtype} on {x.device} but {other}; make them equal with {name}.to(query)")


def _check_mask(mask: Tensor, key: Tensor) -> None:
    check_tensor("key_padding_mask", mask, "a bool torch.Tensor")
    if mask.layout is not torch.strided:
        raise TypeError(f"key_padding_mask has layout {mask.layout}; a plain tensor is needed (key_padding_mask.to_dense())")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {mask.dtype}; {BOOL_MASK}")
    if mask.shape != key.shape[:2]:
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}; (batch, seq) = {tuple(key.shape[:2])} is needed")
    check_device("key_padding_mask", mask, key)
