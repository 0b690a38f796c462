"""The torch modules: dilated attention alone, and multi-head dilated attention with its projections.

attention.py     DilatedAttention, without parameters
multihead.py     MultiheadDilatedAttention: projections, rotary positions, caches, packed sequences
checks.py        arguments and masks as those of nn.MultiheadAttention
in_projection.py the weights of the projections of a state dict, packed in one or apart
"""

from dilkit.nn.attention import DilatedAttention as DilatedAttention
from dilkit.nn.multihead import MultiheadDilatedAttention as MultiheadDilatedAttention

__all__ = ["DilatedAttention", "MultiheadDilatedAttention"]
