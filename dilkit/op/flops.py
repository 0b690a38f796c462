"""The FLOPs of the operators, as `torch.utils.flop_counter.FlopCounterMode` asks for them: nominal ones, see `Pattern.flops`.

forward   4 * head_dim * pairs       pairs: of query and key, a key seen by several branches counting each time
backward  10 * head_dim * pairs      five products of matrices where the forward pass has two

Only shapes are known here, not where packed sequences begin: they count as one sequence, which is at least their work. A
pattern for fewer tokens than that, such as one with a layout of blocks, counts for as many as it takes.
"""

from __future__ import annotations

from typing import Any

from dilkit.op.schema import decode_call


def forward_flops(query: Any, key: Any, value: Any, mask: Any, scale: float, call: str, *_: Any, **__: Any) -> int:
    """Of a call with tensors of these shapes."""
    pattern, is_causal, _requires_grad = decode_call(call)
    batch, seq, heads, head_dim = query
    seq = min(seq, pattern.max_seq)
    return pattern.flops(seq, heads, head_dim, batch=batch, kv_heads=key[2], is_causal=is_causal)


def backward_flops(
    dout: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, mask: Any, scale: float, call: str, *_: Any, **__: Any
) -> int:
    """Of the backward pass of such a call."""
    return forward_flops(query, key, value, mask, scale, call) * 5 // 2
