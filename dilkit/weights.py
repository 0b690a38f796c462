"""Attention weights: the sum of each key's, and those of single rows. No matrix of all weights is made.

P[h, i, j] = count[h, i, j] * exp(softcap(scale * q_i . k_j) + bias(h, i, j) - lse[i])        out[i] = sum_j P[h, i, j] v_j
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dilkit.bias.base import Bias
from dilkit.bias.evaluated import evaluate
from dilkit.checks import boolean, real
from dilkit.inputs import Inputs
from dilkit.op.arguments import check_inputs
from dilkit.op.autocast import without_autocast
from dilkit.op.boundary import lse_dtype
from dilkit.op.call_options import CallOptions
from dilkit.op.given import counted
from dilkit.op.operators import attend, differentiate
from dilkit.op.scores import Scores, scores_of
from dilkit.pattern import Pattern
from dilkit.selector import names_of

PARTS = 8
"""Parts of the heads, computed one after the other: gradients of queries and keys, which nobody wants, take less memory."""


def attention_mass(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    backend: str | Sequence[str] | None = None,
) -> Tensor:
    """Sum the attention that each key gets, `mass[h, j] = sum_i P[h, i, j]`: exact, in memory that is linear in `seq`.

    The arguments are those of `dilated_attention`, without values. `mass` is the gradient of the sum of all results with respect
    to the values: a forward and a backward pass of the same backend, without autograd, of an eighth of the key/value heads at a
    time.

    Returns `(batch, heads, seq)`, float32 (float64 for float64). It has no gradient. It sums to the number of rows that see a
    key, less what goes to sinks and padding. Raises as `dilated_attention` does.

        >>> import torch
        >>> from dilkit import Pattern, attention_mass
        >>> query, key = torch.randn(2, 1, 64, 4, 8).unbind()  # (batch, seq, heads, head_dim)
        >>> mass = attention_mass(query, key, Pattern([16, 64], [1, 4]))
        >>> mass.shape, round(mass[0, 0].sum().item(), 3)
        (torch.Size([1, 4, 64]), 64.0)
    """
    with torch.no_grad():
        inputs = Inputs(query, key, key, key_padding_mask, sink=sink)
        factor, wide, scores = _checked(inputs, pattern, is_causal, scale, bias, softcap)
    (batch, seq, heads, _), kv_heads = query.shape, key.shape[2]
    group, names = heads // kv_heads, () if backend is None else names_of(backend)
    mass = query.new_zeros((batch, heads, seq), dtype=wide, requires_grad=False)
    for start, stop in pairwise(round(part * kv_heads / PARTS) for part in range(PARTS + 1)):
        served = slice(start * group, stop * group)
        if some := pattern.of_kv_heads(start, stop, heads, kv_heads) if start < stop else None:
            options = CallOptions(some, is_causal, True, names, 0.0, scores.softcap, scores.form, factor)
            q, k = (x.detach().to(wide) for x in (query[:, :, served], key[:, :, start:stop]))
            value = q.new_zeros(q.shape[-1]).expand(k.shape)  # the results do not matter
            placed = None if scores.bias is None else scores.bias._replace(weights=scores.bias.weights[served])
            logits = None if sink is None else sink.detach()[served]
            with torch.no_grad(), without_autocast(query.device.type):
                mass[:, served] = _columns_summed(Inputs(q, k, value, key_padding_mask, bias=placed, sink=logits), options)
    return mass


def _columns_summed(inputs: Inputs, options: CallOptions) -> Tensor:
    query, value = inputs.query, inputs.value
    (batch, seq, heads, dim), group = query.shape, query.shape[2] // value.shape[2]
    out = value[..., :1, :].expand(query.shape)  # of values 0 the results are 0
    _, lse = attend(inputs, options)
    parts = []
    for start in range(0, group, dim):  # the query heads of a key/value head have a column each
        columns = torch.arange(heads, device=query.device) % group - start
        dout = (columns[:, None] == torch.arange(dim, device=query.device)).to(query.dtype).expand(query.shape)
        dvalue = differentiate(dout, inputs, out, lse, options)[2]
        parts.append(dvalue[..., : group - start])
    return torch.cat(parts, dim=-1).permute(0, 2, 3, 1).reshape(batch, heads, seq)


def attention_rows(
    query: Tensor,
    key: Tensor,
    pattern: Pattern,
    rows: Tensor | Sequence[int],
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    intervals: Tensor | None = None,
) -> Tensor:
    """Compute the weights of some rows, `P[h, i, j]` for i in `rows`: exact, in plain torch.

    The arguments are those of `dilated_attention`, without values; `rows` are integers, positions in the sequence.

    Returns `(batch, heads, len(rows), seq)`, float32 (float64 for float64), and is differentiable. A row sums to 1 less what
    goes to sinks and padding, and to 0 where it sees no key. Raises as `dilated_attention` does, and IndexError for
    rows outside the sequence.

        >>> import torch
        >>> from dilkit import Pattern, attention_rows
        >>> query = key = torch.zeros(1, 8, 2, 4)  # (batch, seq, heads, head_dim)
        >>> attention_rows(query, key, Pattern([4], [2]), [0])[0, 0]
        tensor([[0.5000, 0.0000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000]])
    """
    inputs = Inputs(query, key, key, key_padding_mask, sink=sink, intervals=intervals)
    factor, wide, changed = _checked(inputs, pattern, is_causal, scale, bias, softcap)
    (batch, seq, heads, dim), kv_heads = query.shape, key.shape[2]
    which = _positions(rows, seq).to(query.device)
    query, key = (x.to(wide) for x in (query[:, which], key))
    grouped = query.view(batch, len(which), kv_heads, heads // kv_heads, dim)
    with without_autocast(query.device.type):
        scores = factor * torch.einsum("bmkgd,bskd->bkgms", grouped, key).flatten(1, 2)
        if changed.softcap:
            scores = changed.softcap * torch.tanh(scores / changed.softcap)
        if changed.bias is not None:
            scores = scores + evaluate(changed.bias, which, torch.arange(seq, device=which.device))
    count = counted(inputs, pattern, which, kv_heads=kv_heads, is_causal=is_causal)
    unseen = (count == 0).expand(scores.shape)
    if key_padding_mask is not None:
        unseen = unseen | key_padding_mask[:, None, None, :]
    scores = (scores + count.clamp(min=1).to(scores.dtype).log()).masked_fill(unseen, -torch.inf)
    extra = pattern.zero_keys(seq, heads, kv_heads=kv_heads, is_causal=is_causal, rows=which).to(scores.dtype).log()
    if sink is not None:
        extra = torch.logaddexp(extra, sink.to(scores.dtype)[:, None])
    lowest = torch.finfo(scores.dtype).min  # for rows that see nothing
    lse = torch.logaddexp(scores.logsumexp(-1), extra).clamp(min=lowest)
    return (scores - lse[..., None]).exp()


def _checked(
    inputs: Inputs, pattern: Pattern, is_causal: bool, scale: float | None, bias: Bias | None, softcap: float | None
) -> tuple[float, torch.dtype, Scores]:
    check_inputs(inputs, pattern)
    boolean("is_causal", is_causal)
    query, key = inputs.query, inputs.key
    pattern.check_heads(query.shape[2], key.shape[2])
    factor = float(query.shape[-1] ** -0.5) if scale is None else real("scale", scale)
    wide = torch.promote_types(lse_dtype(query.dtype), lse_dtype(key.dtype))  # under autocast they may differ
    like = query.new_empty((), dtype=wide, requires_grad=False).expand(query.shape)
    return factor, wide, scores_of(bias, softcap, like, pattern, key.shape[2])


def _positions(rows: Tensor | Sequence[int], seq: int) -> Tensor:
    which = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")  # whatever the default device
    if which.dim() != 1 or which.is_floating_point() or which.is_complex() or which.dtype == torch.bool:
        raise TypeError(f"rows is {which.dtype} {tuple(which.shape)}; integers (m,) are needed")
    if bool(((which < 0) | (which >= seq)).any()):
        raise IndexError(f"rows={which.tolist()} must be at least 0 and less than seq={seq}")
    return which.long()
