"""Keys of value 0 that rows see beside those of the count: what they change in the results of a forward pass.

    lse' = log(exp(lse) + exp(logit))        out' = out * exp(lse - lse')

`logit` is the log of how many keys of score 0 there are, or the sink of a head; with both, the logits merge like `lse`. A
backward pass that is given out' and lse' needs no further step: weights of the other keys stay `exp(score - lse')`, and a key of
value 0 adds nothing to `rowsum(dout * out')`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit.device import capturing
from dilkit.op.boundary import TORCH_DTYPES, check_device, check_tensor, lse_dtype
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES


@dataclass(frozen=True)
class ZeroKeys:
    """The zero keys of the rows from `first` on: `logits` `(heads, rows)`, in the dtype of `lse`; -inf where there are none."""

    first: int
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.logits.nbytes


def zero_keys_of(pattern: Pattern, seq: int, heads: int, kv_heads: int, like: Tensor, rows: range) -> ZeroKeys:
    """Return the zero keys that the padding of `pattern.tail` gives to `rows`, on the device of `like`."""
    positions = torch.arange(rows.start, rows.stop, device=like.device)
    with torch.inference_mode(False):  # a tensor made in inference mode could not be used for training later
        count = pattern.zero_keys(seq, heads, kv_heads=kv_heads, rows=positions)
        concerned = count.any(0).nonzero()
        first = int(concerned[0]) if len(concerned) else len(rows)
        return ZeroKeys(first, count[:, first:].to(lse_dtype(like.dtype)).log())


def add_zero_keys(out: Tensor, lse: Tensor, zero_keys: ZeroKeys | None, sink: Tensor | None = None) -> None:
    """Change `out` and `lse` `(batch, heads, seq)` in place, as if rows saw these keys and the sink."""
    first, logits = _logits(lse, zero_keys, sink)
    if zero_keys is not None and capturing(lse.device):
        _CAPTURED[id(zero_keys)] = zero_keys
    part = lse[:, :, first:]
    whole = _merged(part, logits)
    # Of a row that sees no key at all lse is -inf before and after. Where nothing is added the factor is 1, to the bit.
    factor = torch.exp(part - whole).masked_fill_(part == -torch.inf, 0.0)
    out[:, first:] *= factor.transpose(1, 2).unsqueeze(-1)
    part.copy_(whole)


def _logits(lse: Tensor, zero_keys: ZeroKeys | None, sink: Tensor | None) -> tuple[int, Tensor]:
    """Return the first row that sees any of these keys, and the log of their summed weights from there on."""
    if sink is None:
        assert zero_keys is not None
        return zero_keys.first, zero_keys.logits
    logits = sink.detach().to(lse.dtype)[:, None]
    if zero_keys is None:
        return 0, logits
    logits = logits.repeat(1, lse.shape[2])
    tail = logits[:, zero_keys.first :]
    tail.copy_(_merged(tail, zero_keys.logits))
    return 0, logits


def _merged(lse: Tensor, logits: Tensor) -> Tensor:
    """Return `log(exp(lse) + exp(logits))`; -inf where both are.

    The last bit of `torch.logaddexp` depends on a number's place in a thread; that of these functions does not.
    """
    larger, smaller = torch.maximum(lse, logits), torch.minimum(lse, logits)
    return larger + (smaller - larger).nan_to_num_(nan=-torch.inf).exp_().log1p_()


def check_sink(sink: object, query: Tensor) -> None:
    """Raise TypeError or ValueError unless `sink` has a logit for each head of `query`."""
    heads = query.shape[2]
    sink = check_tensor("sink", sink, f"a torch.Tensor of one logit for each head (torch.zeros({heads}))")
    if sink.dtype not in TORCH_DTYPES or sink.layout is not torch.strided:
        raise TypeError(f"sink is {sink.dtype}, {sink.layout}; a plain tensor of {', '.join(DTYPES)} is needed (sink.float())")
    if sink.shape != (heads,):
        raise ValueError(f"sink has shape {tuple(sink.shape)}; (heads,) = ({heads},) is needed, one logit for each head of query")
    check_device("sink", sink, query)


def sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> Tensor:
    """Compute the gradient of a sink `(heads,)`, given `out` and `lse` with it, and their gradients if any.

        dsink[h] = sum over the rows i of exp(sink[h] - lse'[h, i]) * (dlse[h, i] - dout[i, h] . out'[i, h])

    Head by head, so that no copy of `out` in a wider dtype is needed.
    """
    # The views come first: torch makes none of a tensor whose memory is gone, but would read such a tensor itself.
    weight = torch.exp(sink[:, None].to(lse.dtype) - lse).masked_fill(lse == -torch.inf, 0.0)
    rows = torch.zeros_like(lse) if dlse is None else dlse
    if dout is not None:
        heads = zip(dout.unbind(2), out.unbind(2), strict=True)
        rows = rows - torch.stack([(mine.to(lse.dtype) * its.to(lse.dtype)).sum(-1) for mine, its in heads], 1)
    return (weight * rows).sum((0, 2)).to(sink.dtype)


_CAPTURED: dict[int, ZeroKeys] = {}
"""Tables that CUDA graphs read. They are kept for ever, because the end of a graph cannot be observed."""
