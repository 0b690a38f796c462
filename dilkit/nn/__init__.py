"""The torch modules: dilated attention alone, and multi-head dilated attention with its projections.

head_parallel.py is loaded at first use, for it loads torch.distributed.tensor.
"""

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names
from dilkit.nn.attention import DilatedAttention as DilatedAttention
from dilkit.nn.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention

if TYPE_CHECKING:
    from dilkit.nn.head_parallel import HeadParallel as HeadParallel

__all__ = ["DilatedAttention", "HeadParallel", "MultiheadDilatedAttention"]

__getattr__, __dir__ = lazy_names(__name__, {"head_parallel": "HeadParallel"})
