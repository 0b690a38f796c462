"""Causal attention of sequences of different lengths, forward and backward: packed, one by one, and padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, split
from torch.nn.utils.rnn import pad_sequence

from dilkit import dilated_attention, dilated_attention_varlen
from dilkit.pattern import Pattern
from dilkit.tools.bench.serving.record import ALONE, MASKED, PACKED, PADDED

BACKEND = "native"


@dataclass(frozen=True)
class Way:
    """A way to compute all sequences; `joined(call())` is its results and gradients, packed: `(4, total, heads, head_dim)`."""

    call: Callable[[], Any]
    joined: Callable[[Any], Tensor]


def lengths_of(count: int, shortest: int, longest: int, geometric: bool) -> tuple[int, ...]:
    """So many lengths, in an order that is random and fixed: evenly spaced, or each as many times the one before.

    >>> sorted(lengths_of(4, 8, 64, geometric=True))
    [8, 16, 32, 64]
    """
    places = torch.arange(count, dtype=torch.float64) / (count - 1)
    lengths = shortest * (longest / shortest) ** places if geometric else shortest + (longest - shortest) * places
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return tuple(lengths.round().long()[order].tolist())


def ways(lengths: Sequence[int], pattern: Pattern, heads: int, head_dim: int) -> Mapping[str, Way]:
    """The ways, with random sequences of these lengths. What they take is made before they are called."""
    shape, generator = (4, sum(lengths), heads, head_dim), torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator).unbind()
    cut = [split(x, list(lengths)) for x in rows]
    options: dict[str, Any] = dict(pattern=pattern, is_causal=True, backend=BACKEND)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = partial(dilated_attention_varlen, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), **options)
    each = [_leaves([x[None] for x in one]) for one in zip(*cut, strict=True)]
    filled = _leaves([pad_sequence(list(parts), batch_first=True) for parts in cut])
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    alone = partial(dilated_attention, **options)
    masked = partial(alone, key_padding_mask=mask)

    def without_padding(found: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(found))[:, ~mask]

    return {
        PACKED: Way(partial(gradients, packed, _leaves(rows)), torch.stack),
        ALONE: Way(lambda: [gradients(alone, one) for one in each], _joined),
        MASKED: Way(partial(gradients, masked, filled), without_padding),
        PADDED: Way(partial(gradients, alone, filled), without_padding),
    }


def gradients(attend: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`out` and the gradients of query, key and value; `tensors` are these and the gradient of `out`."""
    *inputs, dout = tensors
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys, values and the gradient of the results; the first three ask for gradients."""
    return [x.detach().requires_grad_(i < 3) for i, x in enumerate(tensors)]


def _joined(found: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.stack([torch.cat(parts, dim=1)[0] for parts in zip(*found, strict=True)])
