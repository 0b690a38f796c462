"""What a cache is saved as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilkit.checks import integer
from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.layout import Layout
from dilkit.decoding.stores import open_stores
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


def state_of(pattern: Pattern, kv_heads: int, heads: int, rollback: int, seen: int, stores: list[BranchRows]) -> CacheState:
    """The state of a cache; its tensors are copies."""
    return CacheState(
        pattern=pattern.to_json(),
        kv_heads=kv_heads,
        heads=heads,
        rollback=rollback,
        seen=seen,
        rows=[store.rows.clone() for store in stores],
        saved=[store.saved.clone() for store in stores],
        since=[store.since for store in stores],
        latest=[store.latest for store in stores],
    )


def loaded(state: CacheState, pattern: Pattern, kv_heads: int, rollback: int) -> tuple[int, Layout | None, list[BranchRows]]:
    """Tokens seen, layout and the stores of a cache. Raises TypeError or ValueError for what is no state of such a cache."""
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
    stores = open_stores(pattern, layout, rollback)
    parts = [state[name] for name in ("rows", "saved", "since", "latest")]
    if any(not isinstance(part, list) or len(part) != len(stores) for part in parts):
        raise ValueError(f"state: rows, saved, since and latest must have an entry for each of the {len(stores)} branches")
    for store, rows, saved, since, latest in zip(stores, *parts, strict=True):
        _check_rows(store, rows, saved, seen)
        store.since, store.latest = integer("since", since), integer("latest", latest)
        if not store.fits(seen, rows.shape[3], saved.shape[3]):
            raise ValueError(
                f"state: rows has shape {tuple(rows.shape)}, saved {tuple(saved.shape)}, since={since}, latest={latest}, which "
                f"is not what the branch keeps after {seen} tokens"
            )
        with torch.inference_mode(False):
            store.rows, store.saved = rows.detach().clone(), saved.detach().clone()
    return seen, layout, stores


def _layout(state: CacheState, heads: int, kv_heads: int) -> Layout:
    rows: Any = state["rows"][0] if isinstance(state["rows"], list) and state["rows"] else None
    if not isinstance(rows, Tensor) or rows.dim() != 5:
        raise TypeError("state: rows must be tensors (2, heads, batch, slots, head_dim)")
    if str(rows.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"state: rows are {rows.dtype}; one of {', '.join(DTYPES)} is needed")
    return Layout(rows.shape[2], heads, kv_heads, rows.shape[4], rows.dtype, rows.device)


def _check_rows(store: BranchRows, rows: Any, saved: Any, seen: int) -> None:
    """Raise TypeError or ValueError unless these are tensors of what the store of a branch has, but for the slots."""
    empty = store.rows
    for name, x in (("rows", rows), ("saved", saved)):
        if not isinstance(x, Tensor) or (x.dtype, x.device) != (empty.dtype, empty.device):
            raise TypeError(f"state: {name} must be tensors of one dtype on one device")
        shape = torch.Size((*empty.shape[:3], x.shape[3] if x.dim() == 5 else 0, empty.shape[4]))
        if x.shape != shape:
            raise ValueError(f"state: {name} has shape {tuple(x.shape)}, which is not what the branch keeps after {seen} tokens")
