"""Keys of value 0 that rows see beside those of the count: what they change in the results of a forward pass.

    lse' = log(exp(lse) + exp(logit))        out' = out * exp(lse - lse')

`logit` is the log of how many keys of score 0 there are. A backward pass that is given out' and lse' needs no further step:
`P = exp(score - lse')` are the weights of the keys that there are, and a key of value 0 adds nothing to `rowsum(dout * out')`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.op.boundary import lse_dtype
from dilkit.pattern import Pattern


@dataclass(frozen=True)
class ZeroKeys:
    """The zero keys of the rows from `first` on: `logits` `(heads, rows)`, in the dtype of `lse`; -inf where there are none."""

    first: int
    logits: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the logits."""
        return self.logits.nbytes


def zero_keys_of(pattern: Pattern, seq: int, heads: int, kv_heads: int, like: Tensor, rows: range) -> ZeroKeys:
    """The zero keys that the padding of `pattern.tail` gives to `rows`, on the device of `like`."""
    positions = torch.arange(rows.start, rows.stop, device=like.device)
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used for training later
        count = pattern.zero_keys(seq, heads, kv_heads=kv_heads, rows=positions)
        concerned = count.any(0).nonzero()
        first = int(concerned[0]) if len(concerned) else len(rows)
        return ZeroKeys(first, count[:, first:].to(lse_dtype(like.dtype)).log())


def add_zero_keys(out: Tensor, lse: Tensor, zero_keys: ZeroKeys) -> None:
    """Change `out` `(batch, seq, heads, head_dim)` and `lse` `(batch, heads, seq)` in place, as if rows saw these keys too."""
    rows, logits = slice(zero_keys.first, None), zero_keys.logits
    if logits.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _CAPTURED[id(logits)] = logits
    part = lse[:, :, rows]
    whole = torch.logaddexp(part, logits)
    # Of a row that sees no key at all lse is -inf before and after. Where nothing is added the factor is 1, to the bit.
    factor = torch.exp(part - whole).masked_fill_(part == -torch.inf, 0.0)
    out[:, rows] *= factor.transpose(1, 2).unsqueeze(-1)
    part.copy_(whole)


_CAPTURED: dict[int, Tensor] = {}
"""Logits that CUDA graphs read. They are kept for ever, because the end of a graph cannot be observed."""
