"""Partial results: attention over some of the keys, merged with attention over others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dilkit.comm.passes._rows import merge


class PartialResults:
    """The accumulator of partial results: `out` `(rows, head_dim)` and `lse` `(rows,)`, in fp32 (fp64 for fp64).

        lse' = log(exp(lse) + exp(lse_b))      out' = exp(lse - lse') out + exp(lse_b - lse') out_b

    A row that has seen no key has `out = 0`, `lse = -inf`; merging the first keys into it is exact.
    """

    def __init__(self, out: Tensor, lse: Tensor) -> None:
        self.out, self.lse = out.to(lse.dtype), lse

    @classmethod
    def empty(cls, rows: int, head_dim: int, like: Tensor) -> PartialResults:
        """Rows that have seen nothing, on the device of `like`, for results of its dtype."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return cls(like.new_zeros(rows, head_dim, dtype=dtype), like.new_full((rows,), -math.inf, dtype=dtype))

    def merge(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        """Merge results over further keys, `out` `(n, head_dim)`, `lse` `(n,)`, into the rows `rows`, each at most once."""
        out = out.to(self.out.dtype)
        if out.is_cuda:
            self._merge_on_device(rows, out, lse)
        else:
            merge(*[x.detach().contiguous().numpy() for x in (self.out, self.lse, rows, out, lse)])

    def _merge_on_device(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        before = self.lse[rows]
        after = torch.logaddexp(before, lse)
        shift = after.masked_fill(after == -math.inf, 0.0)  # -inf - -inf is no number, exp(-inf - 0) is 0
        old, new = torch.exp(before - shift), torch.exp(lse - shift)
        self.out[rows] = old[:, None] * self.out[rows] + new[:, None] * out
        self.lse[rows] = after


def merge_rows(out: Tensor, lse: Tensor, rows: Tensor, found: PartialResults) -> None:
    """Merge `found` into the rows `rows`, as `(batch * seq * heads)` numbers, of `out` and `lse`, contiguous."""
    flat, flat_lse = out.view(-1, out.shape[-1]), lse.view(-1)
    merged = PartialResults(flat[rows], flat_lse[rows])
    merged.merge(torch.arange(len(rows), device=rows.device), found.out, found.lse)
    flat[rows], flat_lse[rows] = merged.out.to(out.dtype), merged.lse
