"""What a cache is saved as."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilkit.checks import integer, one_of
from dilkit.decoding.branch_rows import BranchRows
from dilkit.decoding.layout import Layout
from dilkit.decoding.stored import name_of, width_of
from dilkit.decoding.stores import open_stores
from dilkit.op.boundary import check_memory
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES, STORED


class Kept(TypedDict):
    """What every cache is saved as.

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


class CacheState(Kept, total=False):
    """A cache as plain values and tensors, which `torch.save` writes and `torch.load(..., weights_only=True)` reads.

    `stored`: the dtype of the rows, where that of the queries, `dtype`, is another; without both they are the same.
    """

    stored: str
    dtype: str


def state_of(
    pattern: Pattern, kv_heads: int, layout: Layout | None, rollback: int, stored: str | None, seen: int, stores: list[BranchRows]
) -> CacheState:
    """The state of a cache; its tensors are copies."""
    state = CacheState(
        pattern=pattern.to_json(),
        kv_heads=kv_heads,
        heads=0 if layout is None else layout.heads,
        rollback=rollback,
        seen=seen,
        rows=[store.rows.clone() for store in stores],
        saved=[store.saved.clone() for store in stores],
        since=[store.since for store in stores],
        latest=[store.latest for store in stores],
    )
    if stored is not None and layout is not None:
        state["stored"], state["dtype"] = stored, name_of(layout.dtype)
    return state


def loaded(
    state: CacheState, pattern: Pattern, kv_heads: int, rollback: int, stored: str | None
) -> tuple[int, Layout | None, list[BranchRows]]:
    """Tokens seen, layout and the stores of a cache. Raises TypeError or ValueError for what is no state of such a cache."""
    _check_names(state)
    _check_same(state, pattern, kv_heads, rollback, stored)
    seen, heads = integer("state: seen", state["seen"], at_least=0), integer("state: heads", state["heads"], at_least=0)
    layout, stores = None, list[BranchRows]()
    if seen or heads:
        layout = _layout(state, integer("state: heads", heads, at_least=1), kv_heads, stored)
        pattern.check_heads(heads, kv_heads)
        pattern.check_seq(seen)
        stores = open_stores(pattern, layout, rollback)
    parts = [state[name] for name in ("rows", "saved", "since", "latest")]
    if any(not isinstance(part, list) or len(part) != len(stores) for part in parts):
        raise ValueError(f"state: rows, saved, since and latest must have an entry for each of the {len(stores)} branches")
    for store, *kept in zip(stores, *parts, strict=True):
        _load(store, seen, *kept)
    return seen, layout, stores


def _check_names(state: object) -> None:
    wanted, optional = CacheState.__required_keys__, CacheState.__optional_keys__
    if not isinstance(state, Mapping):
        raise TypeError(f"state is a {type(state).__name__}, not what DilatedCache.state_dict() returns")
    if state.keys() - optional != wanted:
        lacking, unknown = (
            ", ".join(sorted(map(str, names))) for names in (wanted - state.keys(), state.keys() - wanted - optional)
        )
        raise TypeError(f"state is not what DilatedCache.state_dict() returns; missing: {lacking}; unknown: {unknown}")


def _check_same(state: CacheState, pattern: Pattern, kv_heads: int, rollback: int, stored: str | None) -> None:
    """Raise TypeError or ValueError unless it is of a cache of the same pattern, heads, rollback and dtype of stored rows."""
    text = state["pattern"]
    if not isinstance(text, str):
        raise TypeError(f"state: pattern is a {type(text).__name__}; the JSON text of a pattern is needed")
    own = dict(pattern=(text, pattern.to_json()), kv_heads=(integer("state: kv_heads", state["kv_heads"]), kv_heads))
    own |= dict(rollback=(integer("state: rollback", state["rollback"]), rollback))
    if state["heads"]:
        own |= dict(stored=(state.get("stored"), stored))
    for name, (given, wanted) in own.items():
        if given != wanted:
            raise ValueError(f"state is of a cache with {name}={given}, but this one has {name}={wanted}")


def _layout(state: CacheState, heads: int, kv_heads: int, stored: str | None) -> Layout:
    rows: Any = state["rows"][0] if isinstance(state["rows"], list) and state["rows"] else None
    if not _is_plain(rows) or rows.dim() != 5:
        raise TypeError("state: rows must be plain tensors (2, heads, batch, slots, head_dim)")
    if (name_of(rows.dtype) not in DTYPES) if stored is None else (name_of(rows.dtype) != stored):
        raise TypeError(f"state: rows are {rows.dtype}; {stored or 'one of ' + ', '.join(DTYPES)} is needed")
    dtype: Any = name_of(rows.dtype) if stored is None else state.get("dtype")
    one_of("state: dtype", dtype, tuple(name for name in DTYPES if stored in (None, *STORED[name])))
    head_dim = rows.shape[4] - width_of(0, rows.dtype)
    return Layout(rows.shape[2], heads, kv_heads, head_dim, getattr(torch, dtype), rows.device, rows.dtype)


def _load(store: BranchRows, seen: int, rows: Any, saved: Any, since: Any, latest: Any) -> None:
    """Put a copy of what was kept for a branch into its store, which has nothing in it."""
    empty = store.rows
    for name, x in (("rows", rows), ("saved", saved)):
        if not _is_plain(x) or (x.dtype, x.device) != (empty.dtype, empty.device):
            raise TypeError(f"state: {name} must be plain tensors of one dtype on one device")
        if x.dim() != 5 or x.shape != (*empty.shape[:3], x.shape[3], empty.shape[4]):
            raise ValueError(f"state: {name} has shape {tuple(x.shape)}, which is not what the branch keeps after {seen} tokens")
        check_memory((f"state: {name}",), (x,))
    store.since, store.latest = integer("state: since", since, at_least=0), integer("state: latest", latest)
    if not store.fits(seen, rows.shape[3], saved.shape[3]):
        raise ValueError(
            f"state: rows has shape {tuple(rows.shape)}, saved {tuple(saved.shape)}, since={since}, latest={latest}, which "
            f"is not what the branch keeps after {seen} tokens"
        )
    with torch.inference_mode(False):
        store.rows, store.saved = rows.detach().clone(), saved.detach().clone()


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided
