"""The torch modules: dilated attention alone, and multi-head dilated attention with its projections.

attention.py     DilatedAttention, without parameters
multihead.py     MultiheadDilatedAttention: projections, rotary positions, caches, packed sequences
checks.py        arguments and masks as those of nn.MultiheadAttention
head_parallel.py HeadParallel, a style of torch's tensor parallelism; loaded at first use, for it loads torch.distributed.tensor
rank_heads.py    the rows, parameters and norms of a layer on a rank with a part of its heads
"""

from typing import TYPE_CHECKING, Any

from dilkit.nn.attention import DilatedAttention as DilatedAttention
from dilkit.nn.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention

if TYPE_CHECKING:
    from dilkit.nn.head_parallel import HeadParallel as HeadParallel

__all__ = ["DilatedAttention", "HeadParallel", "MultiheadDilatedAttention"]


def __getattr__(name: str) -> Any:
    if name == "HeadParallel":
        from dilkit.nn.head_parallel import HeadParallel

        return HeadParallel
    raise AttributeError(f"module 'dilkit.nn' has no attribute {name!r}")
