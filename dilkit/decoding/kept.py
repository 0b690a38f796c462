"""What a `DilatedCache` keeps, as a matrix, from the definition alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.decoding.stores import check_decodable
from dilkit.pattern import Pattern
from dilkit.pattern.lowering import Band, Form, Global, Segments, forms_of

if TYPE_CHECKING:
    from torch import Tensor


def kept_count(pattern: Pattern, seq: int, kv_heads: int) -> Tensor:
    """`kept[g, i, j]`: in how many branches some row after i sees key j <= i, for key/value head g; int32 `(kv_heads, seq, seq)`.

        kept[g, i, j] = number of branches in which a row i' > i of head g sees j <= i

    Of blocks, all keys are. For small `seq`, to be looked at. Ranges of heads are not taken into account. Raises `PatternError`
    for heads that do not fit, and for a neighborhood, which `DilatedCache` does not take.

        >>> from dilkit import Pattern
        >>> from dilkit.decoding.kept import kept_count
        >>> kept_count(Pattern([4], [2]), 6, 1)[0].tolist()  # token 2 is the last that a segment keeps
        [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 0]]
    """
    import torch

    check_decodable(pattern)
    pattern.check_heads(kv_heads, kv_heads)
    token = torch.arange(seq, device="cpu")
    total = torch.zeros(kv_heads, seq, seq, dtype=torch.int32, device="cpu")
    for branch in pattern.branches:
        for form in forms_of(branch.of_heads(None), pattern.among(kv_heads, kv_heads), seq):
            total += _seen_after(form, token) & (token <= token[:, None])
    return total


def _seen_after(form: Form, token: Tensor) -> Tensor:
    """Whether a row after i sees j <= i: bool `(kv_heads or 1, seq, seq)`."""
    import torch

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
