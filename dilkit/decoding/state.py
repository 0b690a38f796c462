"""What a cache is saved as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.decoding.branch import Layout
from dilkit.decoding.segment import OpenSegment, open_segments
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES


class CacheState(TypedDict):
    """A cache as plain values and tensors, which `torch.save` writes and `torch.load(..., weights_only=True)` reads.

    `pattern` is JSON; `rows`, `saved`, `since` and `latest` have an entry for each branch.
    """

    pattern: str
    kv_heads: int
    heads: int
    rollback: int
    seen: int
    rows: list[Tensor]
    saved: list[Tensor]
    since: list[int]
    latest: list[int]


def state_of(pattern: Pattern, kv_heads: int, heads: int, rollback: int, seen: int, segments: list[OpenSegment]) -> CacheState:
    """The state of a cache; its tensors are copies."""
    return CacheState(
        pattern=pattern.to_json(),
        kv_heads=kv_heads,
        heads=heads,
        rollback=rollback,
        seen=seen,
        rows=[segment.rows.clone() for segment in segments],
        saved=[segment.saved.clone() for segment in segments],
        since=[segment.since for segment in segments],
        latest=[segment.latest for segment in segments],
    )


def loaded(state: CacheState, pattern: Pattern, kv_heads: int, rollback: int) -> tuple[int, Layout | None, list[OpenSegment]]:
    """Tokens seen, layout and segments of a cache. Raises TypeError or ValueError for what is no state of such a cache."""
    if not isinstance(state, Mapping) or state.keys() != CacheState.__required_keys__:
        raise TypeError("state is not what DilatedCache.state_dict() returns")
    own = dict(pattern=(state["pattern"], pattern.to_json()), kv_heads=(state["kv_heads"], kv_heads))
    for name, (found, wanted) in {**own, "rollback": (state["rollback"], rollback)}.items():
        if found != wanted:
            raise ValueError(f"state is of a cache with {name}={found}, but this one has {name}={wanted}")
    seen, heads = integer("seen", state["seen"], at_least=0), integer("heads", state["heads"], at_least=0)
    if heads == seen == 0:
        return 0, None, []
    pattern.check_heads(heads, kv_heads)
    layout = _layout(state, heads, kv_heads)
    segments = open_segments(pattern, layout, rollback)
    parts = [state[name] for name in ("rows", "saved", "since", "latest")]
    if any(not isinstance(part, list) or len(part) != len(segments) for part in parts):
        raise ValueError(f"state: rows, saved, since and latest must have an entry for each of the {len(segments)} branches")
    for segment, rows, saved, since, latest in zip(segments, *parts, strict=True):
        _check_rows(segment, rows, saved, seen)
        with torch.inference_mode(False):
            segment.rows, segment.saved = rows.detach().clone(), saved.detach().clone()
        segment.since, segment.latest = integer("since", since), integer("latest", latest)
        begun = seen - segment.tokens(seen)
        if not seen <= segment.latest <= (begun + segment.kept.length if seen > begun else seen):
            raise ValueError(f"state: latest={latest} is not where a segment of {segment.kept.length} tokens can be after {seen}")
    return seen, layout, segments


def _layout(state: CacheState, heads: int, kv_heads: int) -> Layout:
    rows: Any = state["rows"][0] if isinstance(state["rows"], list) and state["rows"] else None
    if not isinstance(rows, Tensor) or rows.dim() != 5:
        raise TypeError("state: rows must be tensors (2, heads, batch, slots, head_dim)")
    if str(rows.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"state: rows are {rows.dtype}; one of {', '.join(DTYPES)} is needed")
    return Layout(rows.shape[2], heads, kv_heads, rows.shape[4], rows.dtype, rows.device)


def _check_rows(segment: OpenSegment, rows: Any, saved: Any, seen: int) -> None:
    """Raise TypeError or ValueError unless these tensors hold what is kept of a segment after `seen` tokens."""
    empty, kept, tokens = segment.rows, segment.kept, segment.tokens(seen)
    needed = max(kept.slots(offset, tokens) for offset in kept.classes)
    for name, x, least in (("rows", rows, needed), ("saved", saved, 0)):
        if not isinstance(x, Tensor) or (x.dtype, x.device) != (empty.dtype, empty.device):
            raise TypeError(f"state: {name} must be tensors of one dtype on one device")
        shape = torch.Size((*empty.shape[:3], x.shape[3] if x.dim() == 5 else 0, empty.shape[4]))
        if x.shape != shape or not least <= x.shape[3] <= -(-kept.length // kept.rate):
            raise ValueError(f"state: {name} has shape {tuple(x.shape)}, which is not what the branch keeps after {seen} tokens")
