"""Rows of a `DilatedCache`: what they are for any pattern, opened, saved and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from dilkit.checks import integer, one_of
from dilkit.decoding._kept_tokens import kept_tokens
from dilkit.decoding._streams import Ring
from dilkit.decoding.layout import Layout, name_of, width_of
from dilkit.decoding.sequence_rows import SequenceRows
from dilkit.op.boundary import check_memory
from dilkit.pattern import Pattern, PatternError
from dilkit.pattern.lowering import Band, Form, Global, Segments, forms_of
from dilkit.problem import DTYPES, STORED


def open_rows(pattern: Pattern, layout: Layout, rollback: int) -> SequenceRows[Ring]:
    """Return empty rows of a batch at one pace: a ring for the heads of a branch that keep the same tokens."""
    rings = []
    for kept in kept_tokens(pattern, pattern.among(layout.heads, layout.kv_heads)):
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
            size = 2, kept.heads, layout.batch, 0, layout.width
            rings.append(Ring(kept, torch.zeros(size, dtype=layout.stored, device=layout.device), rollback))
    return SequenceRows(rings, rollback)


def check_decodable(pattern: Pattern) -> None:
    """Raise `PatternError` for a branch that is defined for whole sequences alone."""
    for branch in pattern.branches:
        if branch.is_given_by_call:
            raise PatternError(
                f"{branch.call()}: each call chooses what it shows, for whole sequences; DilatedCache does not support it"
            )
        if branch.is_of_whole_sequences:
            raise PatternError(
                f"{branch.call()}: a {branch.kind} is defined on a whole grid, which a growing sequence is not; "
                "DilatedCache takes windows, segments, global tokens, strides and blocks"
            )


def kept_count(pattern: Pattern, seq: int, kv_heads: int) -> Tensor:
    """Count the branches in which some row after i sees key j <= i, from the definition alone; int32 `(kv_heads, seq, seq)`.

    Of blocks, all keys are. Raises `PatternError` as `check_decodable`, and for heads that do not fit.
    """
    check_decodable(pattern)
    pattern.check_heads(kv_heads, kv_heads)
    token = torch.arange(seq, device="cpu")
    total = torch.zeros(kv_heads, seq, seq, dtype=torch.int32, device="cpu")
    for branch in pattern.branches:
        for form in forms_of(branch.of_heads(None), pattern.among(kv_heads, kv_heads), seq):
            total += _seen_after(form, token) & (token <= token[:, None])
    return total


def _seen_after(form: Form, token: Tensor) -> Tensor:
    """True where a row after i sees j <= i: bool `(kv_heads or 1, seq, seq)`."""
    if isinstance(form, Segments):
        place, segment = token % form.length, token // form.length
        offset = torch.tensor(form.offsets, device="cpu")[:, None, None]
        last = form.length - 1 - (form.length - 1 - offset) % form.rate
        return (segment[:, None] == segment) & (place[:, None] < last) & (place % form.rate == offset)
    if isinstance(form, Band):
        return (token[:, None] + 1 - token <= form.back)[None]
    if not isinstance(form, Global):
        return torch.ones(1, len(token), len(token), dtype=torch.bool, device="cpu")
    rows, columns = (torch.from_numpy(runs) for runs in (form.rows, form.columns))
    is_global = ((columns[:, :1] <= token) & (token < columns[:, 1:])).any(0)
    seeing_all = (token < rows.max() - 1)[:, None] if len(rows) else torch.zeros(len(token), 1, dtype=torch.bool, device="cpu")
    return (is_global | seeing_all)[None]


class _RequiredState(TypedDict):
    pattern: str
    kv_heads: int
    heads: int
    rollback: int
    seen: int
    longest: int
    rows: list[Tensor]
    since: list[int]
    latest: list[int]


class CacheState(_RequiredState, total=False):
    """Cache as plain values and tensors, which `torch.save` writes and `torch.load(..., weights_only=True)` reads.

    `pattern` is JSON; lists have an entry for the heads of a branch that keep the same tokens: kept rows `since` to `latest - 1`.
    `stored` and `dtype`, that of the queries, are there where they differ.
    """

    stored: str
    dtype: str


def state_of(
    pattern: Pattern, kv_heads: int, layout: Layout | None, stored: str | None, sequence: SequenceRows[Ring]
) -> CacheState:
    rows = [ring.in_order() for ring in sequence.streams]
    state = CacheState(
        pattern=pattern.to_json(),
        kv_heads=kv_heads,
        heads=0 if layout is None else layout.heads,
        rollback=sequence.rollback,
        seen=sequence.seen,
        longest=sequence.longest,
        rows=rows,
        since=[ring.stop - x.shape[3] for ring, x in zip(sequence.streams, rows, strict=True)],
        latest=[ring.stop for ring in sequence.streams],
    )
    if stored is not None and layout is not None:
        state["stored"], state["dtype"] = stored, name_of(layout.dtype)
    return state


def loaded(
    state: CacheState, pattern: Pattern, kv_heads: int, rollback: int, stored: str | None
) -> tuple[Layout | None, SequenceRows[Ring]]:
    _check_names(state)
    _check_same(state, pattern, kv_heads, rollback, stored)
    seen, heads = integer("state: seen", state["seen"], at_least=0), integer("state: heads", state["heads"], at_least=0)
    longest = integer("state: longest", state["longest"])
    layout, sequence = None, SequenceRows[Ring]((), rollback)
    if seen or heads:
        layout = _layout(state, integer("state: heads", heads, at_least=1), kv_heads, stored)
        pattern.check_heads(heads, kv_heads)
        pattern.check_seq(seen)
        sequence = open_rows(pattern, layout, rollback)
    parts = [state[name] for name in ("rows", "since", "latest")]
    if any(not isinstance(part, list) or len(part) != len(sequence.streams) for part in parts):
        raise ValueError(
            f"state: rows, since and latest must have an entry for each of the {len(sequence.streams)} groups of heads that "
            "keep the same tokens of a branch"
        )
    sequence.seen, sequence.longest = seen, longest
    for ring, *saved in zip(sequence.streams, *parts, strict=True):
        _load(ring, sequence, *saved)
    return layout, sequence


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
    text = state["pattern"]
    if not isinstance(text, str):
        raise TypeError(f"state: pattern is a {type(text).__name__}; the JSON text of a pattern is needed")
    pairs = dict(pattern=(text, pattern.to_json()), kv_heads=(integer("state: kv_heads", state["kv_heads"]), kv_heads))
    pairs |= dict(rollback=(integer("state: rollback", state["rollback"]), rollback))
    if state["heads"]:
        pairs |= dict(stored=(state.get("stored"), stored))
    for name, (saved, wanted) in pairs.items():
        if saved != wanted:
            raise ValueError(f"state is of a cache with {name}={saved}, but this one has {name}={wanted}")


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


def _load(ring: Ring, sequence: SequenceRows[Ring], rows: Any, since: Any, latest: Any) -> None:
    empty, kept, seen = ring.rows, ring.kept, sequence.seen
    if not _is_plain(rows) or (rows.dtype, rows.device) != (empty.dtype, empty.device):
        raise TypeError("state: rows must be plain tensors of one dtype on one device")
    first, stop = integer("state: since", since, at_least=0), integer("state: latest", latest)
    fits = rows.shape == (*empty.shape[:3], stop - first, empty.shape[4]) and seen <= sequence.longest
    if not fits or stop != kept.before(seen) or first > min(stop, kept.needed(sequence.oldest(0))):
        raise ValueError(
            f"state: rows has shape {tuple(rows.shape)}, since={since}, latest={latest}, which is not what the branch keeps "
            f"after {seen} tokens"
        )
    check_memory(("state: rows",), (rows,))
    ring.restore(rows, stop)


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.layout is torch.strided
