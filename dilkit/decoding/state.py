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
from dilkit.op.boundary import check_memory
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
    _check_names(state)
    _check_same(state, pattern, kv_heads, rollback)
    seen, heads = integer("state: seen", state["seen"], at_least=0), integer("state: heads", state["heads"], at_least=0)
    layout, stores = None, list[BranchRows]()
    if seen or heads:
        layout = _layout(state, integer("state: heads", heads, at_least=1), kv_heads)
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
    wanted = CacheState.__required_keys__
    if not isinstance(state, Mapping):
        raise TypeError(f"state is a {type(state).__name__}, not what DilatedCache.state_dict() returns")
    if state.keys() != wanted:
        lacking, unknown = (", ".join(sorted(map(str, names))) for names in (wanted - state.keys(), state.keys() - wanted))
        raise TypeError(f"state is not what DilatedCache.state_dict() returns; missing: {lacking}; unknown: {unknown}")


def _check_same(state: CacheState, pattern: Pattern, kv_heads: int, rollback: int) -> None:
    """Raise TypeError or ValueError unless it is of a cache of the same pattern, heads and rollback."""
    text = state["pattern"]
    if not isinstance(text, str):
        raise TypeError(f"state: pattern is a {type(text).__name__}; the JSON text of a pattern is needed")
    own = dict(pattern=(text, pattern.to_json()), kv_heads=(integer("state: kv_heads", state["kv_heads"]), kv_heads))
    for name, (given, wanted) in {**own, "rollback": (integer("state: rollback", state["rollback"]), rollback)}.items():
        if given != wanted:
            raise ValueError(f"state is of a cache with {name}={given}, but this one has {name}={wanted}")


def _layout(state: CacheState, heads: int, kv_heads: int) -> Layout:
    rows: Any = state["rows"][0] if isinstance(state["rows"], list) and state["rows"] else None
    if not _is_plain(rows) or rows.dim() != 5:
        raise TypeError("state: rows must be plain tensors (2, heads, batch, slots, head_dim)")
    if str(rows.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(f"state: rows are {rows.dtype}; one of {', '.join(DTYPES)} is needed")
    return Layout(rows.shape[2], heads, kv_heads, rows.shape[4], rows.dtype, rows.device)


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
