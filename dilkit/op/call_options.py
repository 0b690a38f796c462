"""`CallOptions`, all of a call that is no tensor; and calls as torch's operators take them, with options as a line of text."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.checks import shown
from dilkit.inputs import Inputs
from dilkit.op.dropout import Dropout
from dilkit.pattern import Pattern

_FORMAT = "a"
"""The first letter of every text: change it with `encode` and with autograd in `dilkit.op.attend`, because torch.compile finds
graphs on disk by such constants.
"""
_DIGITS = "01"

FIRST = 5
"""So many tensors of a call, from query to cu_seqlens, come first in `Inputs` and in the operators alike."""
_NONE = (None,) * len(Inputs._fields)
Tensors = tuple[Tensor | None, ...]
"""The tensors of a call in the order of `dilkit.op.schema.TENSORS`."""


class CallOptions(NamedTuple):
    """All of a call that is no tensor: checked, hashable.

    `requires_grad`: a backward pass may follow. `backends`: names in order of preference, none for the automatic choice.
    `softcap`: 0 for none. `bias`: the form of that of the inputs. `scale`: None for `head_dim ** -0.5`. `max_seqlen`, `max_keys`:
    of packed sequences, or None. `query_offset`: the position of the first query among the keys; None for the default one, or
    where the inputs say it.
    """

    pattern: Pattern
    is_causal: bool = False
    requires_grad: bool = False
    backends: tuple[str, ...] = ()
    dropout_p: float = 0.0
    softcap: float = 0.0
    bias: BiasForm | None = None
    scale: float | None = None
    max_seqlen: int | None = None
    query_offset: int | None = None
    max_keys: int | None = None

    def factor(self, query: Tensor) -> float:
        factor: float = query.size(-1) ** -0.5 if self.scale is None else self.scale
        return factor


def encode(options: CallOptions) -> str:
    """Return the options as text, but for numbers that the operators take as they are, scale and max_seqlen."""
    pattern, is_causal, requires_grad, backends, dropout_p, softcap, bias, _, _, offset, _ = options
    scores = f"{softcap or ''},{'' if bias is None else bias.encode()}" if softcap or bias is not None else ""
    flags = _DIGITS[is_causal] + _DIGITS[requires_grad]  # torch.compile formats no bools
    position = "" if offset is None else f"{offset}"
    return f"{_FORMAT}{flags}{','.join(backends)};{dropout_p or ''};{scores};{position};{pattern.to_json()}"


@lru_cache(maxsize=1024)
def decode(text: str) -> CallOptions:
    """Return the options that `encode` wrote. Raises ValueError for a text of another form or version."""
    parts = text.split(";", 4)
    if text[:1].isdigit() and len(parts) >= 4:
        raise ValueError(f"call={shown(text)} was written by another version of dilkit; export the graph again")
    if len(parts) != 5 or not re.match(_FORMAT + "[01][01]", text) or not re.fullmatch("-?[0-9]{1,19}|", parts[3]):
        form = "'flags and backends;dropout;scores;offset;pattern'"
        raise ValueError(f"call={shown(text)} is not of the form {form} that dilkit writes")
    names, dropout_p, scores, position, pattern = parts
    softcap, _, bias = scores.partition(",")
    return CallOptions(
        Pattern.from_json(pattern),
        names[1:2] == "1",
        names[2:3] == "1",
        tuple(names[3:].split(",")) if names[3:] else (),
        float(dropout_p or 0.0),
        float(softcap or 0.0),
        BiasForm.decode(bias) if bias else None,
        query_offset=int(position) if position else None,
    )


def flat(inputs: Inputs) -> Tensors:
    """Return all tensors of a call, None for one that is missing."""
    query, key, value, mask, cu_seqlens, _, dropout, bias, *others = inputs
    seed, places = (None, None) if dropout is None else (dropout.seed, dropout.places)
    weights, positions = (None, None) if bias is None else (bias.weights, bias.positions)
    return query, key, value, mask, cu_seqlens, seed, places, weights, positions, *others


def unflat(tensors: Tensors, options: CallOptions) -> Inputs:
    """Return `Inputs` of the tensors of a call, the last of which may be left out."""
    if len(tensors) <= FIRST:
        return tuple.__new__(Inputs, tensors + _NONE[len(tensors) :])
    every: list[Any] = [*tensors, *(None,) * (9 - len(tensors))]
    query, key, value, mask, cu_seqlens, seed, places, weights, positions, *others = every
    form: Any = options.bias  # None where the text lacks it, which is refused when the call is prepared
    dropout = None if seed is None and places is None else Dropout(options.dropout_p, seed, places=places)
    bias = None if weights is None and positions is None else LoweredBias(form, weights, positions)
    return Inputs(query, key, value, mask, cu_seqlens, None, dropout, bias, *others)


def forward_arguments(inputs: Inputs, options: CallOptions) -> tuple[Any, ...]:
    query, key, value, mask, cu_seqlens, *others = flat(inputs)
    return query, key, value, mask, options.factor(inputs.query), encode(options), cu_seqlens, options.max_seqlen, *others


def forward_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, text: str, *rest: Any
) -> tuple[Inputs, CallOptions]:
    every: list[Any] = [*rest, *(None,) * (2 - len(rest))]
    cu_seqlens, max_seqlen, *others = every
    options = decode(text)._replace(scale=scale, max_seqlen=max_seqlen)
    return unflat((query, key, value, mask, cu_seqlens, *others), options), options


def backward_arguments(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, options: CallOptions) -> tuple[Any, ...]:
    query, key, value, *others = forward_arguments(inputs, options)
    return dout, query, key, value, out, lse, *others


def backward_call(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *others: Any
) -> tuple[Tensor, Inputs, Tensor, Tensor, CallOptions]:
    inputs, options = forward_call(query, key, value, *others)
    return dout, inputs, out, lse, options
