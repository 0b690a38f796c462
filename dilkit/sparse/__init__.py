"""Blocks that a model chooses at each step, for `block_layout=` of `dilkit.dilated_attention`."""

from dilkit.sparse.top_k import top_k_blocks

__all__ = ["top_k_blocks"]
