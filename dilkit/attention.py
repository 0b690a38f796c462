"""`dilated_attention`: the one public call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dilkit.op import encode_call, forward_op
from dilkit.pattern import Pattern
from dilkit.problem import DTYPES

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def dilated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    scale: float | None = None,
    backend: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Dilated attention, exact (LongNet, arXiv 2307.02486, eq. 4-15).

        out[i] = softmax_j(scale * q_i . k_j + log count[h, i, j]) . v        lse[i] = logsumexp of the same row

    `count` is the pattern's (`dilkit.Pattern`); it is 0 for j > i if `is_causal`, and for keys where `key_padding_mask`
    (bool, `(batch, seq)`) is True. A row that sees no key has `out = 0`, `lse = -inf` and zero gradients.

    `query` is `(batch, seq, heads, head_dim)`, `key` and `value` `(batch, seq, kv_heads, head_dim)` with `kv_heads` a divisor of
    `heads`; fp64, fp32, bf16 or fp16; any strides with a contiguous last dimension. `scale` defaults to `head_dim ** -0.5`.
    `backend` is a name or an order of names (default: `dilkit.use_backend`, `DILKIT_BACKEND`, else by capability).

    Returns `out`, shaped and typed like `query`, and with `return_lse` also `lse` `(batch, heads, seq)`, fp32 (fp64 for fp64);
    both are differentiable, once. Raises ValueError or TypeError for input that does not fit, `NoBackendError` (a ValueError)
    when no backend, or none of those asked for, can compute the call.
    """
    check_inputs(query, key, value, pattern, key_padding_mask)
    names = "" if backend is None else _joined(backend)
    requires_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    call = encode_call(pattern, bool(is_causal), requires_grad, names)
    out, lse = forward_op(query, key, value, key_padding_mask, query.shape[-1] ** -0.5 if scale is None else float(scale), call)
    return (out, lse) if return_lse else out


def _joined(backend: str | Sequence[str]) -> str:
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"backend={backend!r} must be a name, an order of names, or None for the automatic choice")
    return ",".join(names)


def check_inputs(query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, key_padding_mask: Tensor | None = None) -> None:
    """Raise TypeError or ValueError, naming the argument and the limit, unless these tensors pose a problem that can be."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern={pattern!r} is a {type(pattern).__name__}; a dilkit.Pattern is needed, such as Pattern([2048], [1])")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
    mixed_dtypes = torch.is_autocast_enabled(query.device.type)  # autocast makes them equal
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, seq, heads, head_dim) is needed")
        if (x.dtype != query.dtype and not mixed_dtypes) or x.device != query.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device} but query {query.dtype} on {query.device}; make them equal with {name}.to(query)")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension; 1 is needed ({name}.contiguous())")
    if query.dtype not in _DTYPES:
        raise TypeError(f"query is {query.dtype}; one of {', '.join(DTYPES)} is needed")
    if key.shape != value.shape:
        raise ValueError(f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; they must be equal")
    batch, seq, heads, head_dim = query.shape
    for name, at, size in (("batch", 0, batch), ("seq", 1, seq), ("head_dim", 3, head_dim)):
        if key.shape[at] != size:
            raise ValueError(f"key has {name} {key.shape[at]} and query {size}; they must be equal")
    if heads < 1 or head_dim < 1:
        raise ValueError(f"query has shape {tuple(query.shape)}; at least one head and head_dim 1 are needed")
    if key.shape[2] < 1 or heads % key.shape[2]:
        raise ValueError(f"key has {key.shape[2]} heads, which does not divide the {heads} heads of query")
    pattern.check_heads(heads)
    if key_padding_mask is not None:
        _check_mask(key_padding_mask, query)


def _check_mask(mask: Tensor, query: Tensor) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"key_padding_mask is a {type(mask).__name__}; a bool torch.Tensor is needed")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {mask.dtype}; torch.bool is needed, True = ignored (mask.bool())")
    if mask.dim() != 2 or mask.shape[0] != query.shape[0] or mask.shape[1] != query.shape[1]:
        raise ValueError(f"key_padding_mask has shape {tuple(mask.shape)}; (batch, seq) = {tuple(query.shape[:2])} is needed")
    if mask.device != query.device:
        raise ValueError(f"key_padding_mask is on {mask.device} but query on {query.device}; move it with .to(query.device)")
