"""A sliding window by torch's FlexAttention, compiled: a mask that says which keys are seen, and a list of the blocks to look at.

queries  [..############|##......]   blocks of `BLOCK` rows and columns: those that no pair of the window lies in are
         [.....#########|#####...]   left out, those that lie in it as a whole are computed without the mask
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dilkit.backends.flex.blocks import BLOCK, listed
from dilkit.tools.measure.flex import compiler


def no_compiler() -> tuple[str, ...]:
    """Why FlexAttention cannot be compiled on this machine; empty where it can."""
    path = shutil.which(compiler())
    return () if path else (f"C++ compiler {compiler()!r}: not found, and torch.compile needs one; name yours in CXX",)


def compiled_window(seq: int, window: int, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention of `(batch, seq, heads, head_dim)`; it is compiled at its first call, which takes many seconds."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        before = (i - j >= 0) if is_causal else (j - i < window)
        return before & (i - j < window)

    some, whole = _blocks(seq, window, is_causal)
    blocks = BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(seq, seq)
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Any = flex_attention(q, k, v, block_mask=blocks)
        return torch.as_tensor(out)

    fast = torch.compile(attend, fullgraph=True, dynamic=False)
    return lambda query, key, value: fast(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def _blocks(seq: int, window: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Which blocks hold a pair that is seen, and which hold nothing else: bool `(1, 1, blocks, blocks)`."""
    first = torch.arange(0, seq, BLOCK)
    apart = first[:, None] - first  # of the first row and the first column; within a block, up to BLOCK - 1 less and more
    least, most = apart - (BLOCK - 1), apart + (BLOCK - 1)
    if is_causal:
        some, whole = (most >= 0) & (least < window), (least >= 0) & (most < window)
    else:
        some, whole = (most > -window) & (least < window), (least > -window) & (most < window)
    filled = first + BLOCK <= seq  # a block at the end that is short has rows and columns that are not there
    return some[None, None], (whole & filled[:, None] & filled)[None, None]
