"""`Inputs`: the tensors of a call, from the public function to a backend and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from dilkit.bias.form import LoweredBias
    from dilkit.op.dropout import Dropout


LEARNED = ("bias",)
"""The tensors beside query, key and value of which a backend may return gradients, in this order."""


class Inputs(NamedTuple):
    """Query, key and value `(batch, seq, heads or kv_heads, head_dim)`, and what belongs to them; checked already.

    The last dimension is contiguous, the other strides are arbitrary, and no tensor is empty. What a call does not have is None;
    a backend gets no more than its `limits` take.

        >>> import torch
        >>> from dilkit import Inputs, Pattern, Problem
        >>> from dilkit.backends.reference import Reference
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8).unbind()
        >>> out, lse = Reference().forward(Inputs(q, k, v), Problem.of(q, k, Pattern([8], [2])))
        >>> out.shape, lse.shape
        (torch.Size([1, 16, 2, 8]), torch.Size([1, 2, 16]))
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    """Bool `(batch, seq)`, any strides: True = ignored."""
    cu_seqlens: Tensor | None = None
    """Packed rows (`problem.varlen`), tensors `(1, total, heads, head_dim)`: sequence b has the rows `cu_seqlens[b]` to
    `cu_seqlens[b + 1] - 1`, for which the pattern restarts. int32 `(sequences + 1,)`, contiguous, on the tensors' device; it
    begins with 0, does not decrease and ends with `total`: on a CPU that is checked. `problem.seq` is at least the longest
    length.
    """
    cache_seqlens: Tensor | None = None
    """A cache (`problem.kv_cache`): `key` and `value` are `(batch, capacity, kv_heads, head_dim)`, sequence b is their first
    `cache_seqlens[b]` rows, and `query` its last, causal; what lies beyond is not read. int32 `(batch,)`, contiguous, on the
    tensors' device, from the rows of `query` to the capacity, which is `problem.seq`.
    """
    dropout: Dropout | None = None
    """The weights to drop: `dropout.kept(heads, rows, keys, batch)`, and `dropout.factor` multiplies the others."""
    bias: LoweredBias | None = None
    """Tensors added to the scores: `weights` `(heads, entries)`, or by query `(heads, batch, seq, entries)`, and, if
    `problem.bias.placed`, `positions` of the keys' rows.
    """
    block_layout: Tensor | None = None
    """Blocks that see each other, for a form `GivenBlocks`: as `dilkit.op.given` says, on the tensors' device, any strides."""
    sink: Tensor | None = None
    """A logit a head, `(heads,)`: it is added to the results of a backend, which need not look at it."""

    cu_seqlens_k: Tensor | None = None
    """Starts of the keys of packed sequences, if they are others than the queries, which begin at `cu_seqlens`."""
    query_offset: Tensor | None = None
    """The position among the keys of the first query of each element of a batch or packed sequence, int32 `(batch,)`."""
    intervals: Tensor | None = None
    """The keys of each query, for a form `GivenIntervals`: as `dilkit.op.given` says, on the tensors' device, any strides."""

    @property
    def given(self) -> Tensor | None:
        """The tensor that gives what a branch of the pattern shows, if the call has one."""
        return self.block_layout if self.intervals is None else self.intervals

    @property
    def learned(self) -> tuple[str, ...]:
        """Names of `LEARNED` of which a backward pass returns gradients."""
        return ("bias",) if self.bias is not None and self.bias.form.learned else ()
