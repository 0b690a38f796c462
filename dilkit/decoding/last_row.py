"""What the last row of a sequence sees of a cache of all its keys, as spans: by the forms of a pattern.

Segments    the kept keys of its segment, of the heads that keep the row     a span, `rate` rows apart
Band        every `rate`-th key of the window                                a span, `rate` rows apart
Global      the global columns before it; all keys, if it sees all           a span for each run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from dilkit.decoding.step import Span, Write
from dilkit.pattern.lowering import Band, Form, Global, Segments


class Keys(NamedTuple):
    """`seen` keys from token `first` on, `step` apart, of some key/value heads."""

    heads: range
    first: int
    step: int
    seen: int


def has_spans(forms: Sequence[Form], group: int) -> bool:
    """Whether each form shows whole key/value heads, of `group` query heads, the same keys, and leaves out none one by one."""
    return all(_is_plain(form) and _of_whole_heads(form, group) for form in forms)


def spans_of(forms: Sequence[Form], group: int, lengths: Sequence[int], k_cache: Tensor, v_cache: Tensor) -> list[Span]:
    """Of caches `(batch, capacity, kv_heads, head_dim)`, which are the stored tensors 0 and 1, for sequences so long."""
    together = len(set(lengths)) == 1
    spans = []
    for b, length in enumerate(lengths[:1] if together else lengths):
        for form in forms:
            for keys in _seen(form, length - 1, group):
                served = b, len(lengths) if together else 1, keys.heads.start, keys.heads.step, len(keys.heads)
                places = 0, *_place(k_cache, b, keys), 1, *_place(v_cache, b, keys)
                spans.append(Span(*served, keys.seen, *places, length - 1, keys.first, keys.step))
    return spans


def writes_of(lengths: Sequence[int], k_cache: Tensor, v_cache: Tensor) -> list[Write]:
    """Where the new row of each sequence goes, which then is so long: behind the others."""
    kv_heads, writes = k_cache.shape[2], []
    for b, length in enumerate(lengths):
        keys = Keys(range(kv_heads), length - 1, 1, 1)
        places = 0, *_place(k_cache, b, keys)[:3], 1, *_place(v_cache, b, keys)[:3]
        writes.append(Write(b, 1, 0, 1, kv_heads, *places))
    return writes


def _place(cache: Tensor, b: int, keys: Keys) -> tuple[int, int, int, int]:
    """The offset, and the strides of sequence, head and row."""
    sequence, row, head = cache.stride()[:3]
    return b * sequence + keys.first * row + keys.heads.start * head, sequence, keys.heads.step * head, keys.step * row


def _is_plain(form: Form) -> bool:
    return (
        isinstance(form, (Segments, Band, Global))
        and form.without_rows is None
        and form.without_columns is None
        and not form.without
    )


def _of_whole_heads(form: Form, group: int) -> bool:
    served = form.heads[0] % group == form.heads[1] % group == 0
    return served and (not isinstance(form, Segments) or form.shares_offsets(group))


def _seen(form: Form, row: int, group: int) -> Iterator[Keys]:
    heads = range(form.heads[0] // group, form.heads[1] // group)
    if isinstance(form, Segments):
        slot, offset = divmod(row % form.length, form.rate)
        kept = [head for head in heads if form.offsets[head * group - form.heads[0]] == offset]
        if kept:  # a rate apart, or side by side, by the pattern's offset
            step = kept[1] - kept[0] if len(kept) > 1 else 1
            yield Keys(range(kept[0], kept[-1] + 1, step), row - slot * form.rate, form.rate, slot + 1)
    elif isinstance(form, Band):
        nearest, farthest = -(-form.first // form.rate), min(form.back, row) // form.rate
        if nearest <= farthest:
            yield Keys(heads, row - farthest * form.rate, form.rate, farthest - nearest + 1)
    elif isinstance(form, Global):
        sees_all = any(start <= row < stop for start, stop in form.rows.tolist())
        for start, stop in [(0, row + 1)] if sees_all else form.columns.tolist():
            if start <= row:
                yield Keys(heads, start, 1, min(stop, row + 1) - start)
