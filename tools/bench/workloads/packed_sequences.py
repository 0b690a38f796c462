"""Causal attention of sequences of different lengths, forward and backward: packed, one by one, and padded to the longest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dilkit import dilated_attention, dilated_attention_varlen
from dilkit.pattern import Pattern
from dilkit.tools.bench.workloads.ways import BACKEND, checked, timed
from dilkit.tools.measure.case import CaseFields
from dilkit.tools.measure.timing import agreement, call_once
from dilkit.tools.results.record import Entries

PACKED, ALONE, MASKED, PADDED = "packed", "one by one", "padded and masked", "padded"


class PackedWay(NamedTuple):
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


def measured(lengths: Sequence[int], pattern: Pattern, heads: int, head_dim: int, repeats: int) -> CaseFields:
    """Compare the results of all ways with those of the sequences one by one, then time the ways in turns."""
    ways = packed_ways(lengths, pattern, heads, head_dim)
    alone = ways[ALONE].joined(ways[ALONE].call())
    entries: Entries = {}
    for name, way in ways.items():
        one = call_once(way.call)
        entries[name] = checked(agreement(name, way.joined(one.result), alone, max(lengths)), one)
    del alone, one
    return timed(entries, {name: way.call for name, way in ways.items()}, repeats)


def packed_ways(lengths: Sequence[int], pattern: Pattern, heads: int, head_dim: int) -> Mapping[str, PackedWay]:
    """The ways, with random sequences of these lengths. Their inputs are made before they are called."""
    shape, generator = (4, sum(lengths), heads, head_dim), torch.Generator().manual_seed(0)
    rows = torch.randn(shape, generator=generator).unbind()
    cut = [torch.split(x, list(lengths)) for x in rows]
    options: dict[str, Any] = dict(pattern=pattern, is_causal=True, backend=BACKEND)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packed = partial(dilated_attention_varlen, cu_seqlens=cu_seqlens, max_seqlen=max(lengths), **options)
    each = [_leaves([x[None] for x in one]) for one in zip(*cut, strict=True)]
    filled = _leaves([pad_sequence(list(parts), batch_first=True) for parts in cut])
    mask = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    alone = partial(dilated_attention, **options)

    def joined(results: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.stack([torch.cat(parts, dim=1)[0] for parts in zip(*results, strict=True)])

    def without_padding(results: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(results))[:, ~mask]

    return {
        PACKED: PackedWay(partial(gradients, packed, _leaves(rows)), torch.stack),
        ALONE: PackedWay(lambda: [gradients(alone, one) for one in each], joined),
        MASKED: PackedWay(partial(gradients, partial(alone, key_padding_mask=mask), filled), without_padding),
        PADDED: PackedWay(partial(gradients, alone, filled), without_padding),
    }


def gradients(attend: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`out` and the gradients of query, key and value; `tensors` are these and the gradient of `out`."""
    *inputs, dout = tensors
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Queries, keys, values and the gradient of the results; the first three ask for gradients."""
    return [x.detach().requires_grad_(i < 3) for i, x in enumerate(tensors)]
