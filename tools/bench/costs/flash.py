"""The same bounds of FlashAttention-2, as torch has it, on the strided views of each branch, with what merges the branches.

Counted by hand from its sources: tiles of `run_mha_fwd_hdim64` and `_hdim128` (aten/src/ATen/native/transformers/cuda/flash_attn/
flash_fwd_launch_template.h), four warps, each of which loads all keys and values of a tile, and its queries anew for each tile;
gradients in five products, those of queries summed in fp32 in global memory. Branches are merged, and gradients added, by a
launch each that reads and writes the rows of the branch (`dilkit.backends.sdpa.row_kernels`). Each branch scores all its keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.device import Capability
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.costs.bounds import Bound
from dilkit.tools.bench.costs.cards import SHARED_BYTES, SPECIAL, Card

OLDEST: Capability = (8, 0)
WARPS, HALF = 4, 2


def forward(asked: Configuration, head_dim: int, card: Card) -> Iterator[Bound]:
    """Of each launch: the branches, and all merges but that of the first."""
    rows_of_tile, keys_of_tile = tile(head_dim, card.capability)
    for branch, (length, problems) in enumerate(_branches(asked)):
        tiles = problems * -(-length // rows_of_tile) * -(-length // keys_of_tile)
        loaded = tiles * (WARPS * 2 * keys_of_tile + rows_of_tile) * head_dim * HALF
        rows, pairs = problems * length, problems * length * length
        yield Bound(
            tensor=4 * head_dim * pairs / card.tensor,
            shared=loaded / SHARED_BYTES / card.cycles,
            special=pairs / (SPECIAL * card.cycles),
            memory=rows * (4 * head_dim * HALF + 4) / card.memory,
        )
        if branch:
            yield Bound(memory=3 * rows * (head_dim * HALF + 4) / card.memory)


def backward(asked: Configuration, head_dim: int, card: Card) -> Iterator[Bound]:
    """The same of gradients. What they load from shared memory is not counted."""
    for branch, (length, problems) in enumerate(_branches(asked)):
        rows, pairs = problems * length, problems * length * length
        yield Bound(memory=rows * (2 * head_dim * HALF + 4) / card.memory)  # rowsum(dout * out)
        yield Bound(
            tensor=10 * head_dim * pairs / card.tensor,
            special=pairs / (SPECIAL * card.cycles),
            memory=rows * (6 * head_dim * HALF + 4 * head_dim + 8) / card.memory,
        )
        yield Bound(memory=rows * head_dim * (4 + HALF) / card.memory)  # from fp32 to halves
        if branch:
            yield Bound(memory=9 * rows * head_dim * HALF / card.memory)


def tile(head_dim: int, capability: Capability) -> tuple[int, int]:
    """Queries and keys, without causality and dropout."""
    if head_dim <= 64:
        return 128, 128
    return 128, 32 if capability[0] == 8 and capability[1] else 64


def _branches(asked: Configuration) -> Iterator[tuple[int, int]]:
    """Of each: rows of a segment that a head keeps, and how many segments there are over all heads."""
    for segment, rate in zip(asked.segment_lengths, asked.dilation_rates, strict=True):
        yield segment // rate, asked.seq // segment * asked.heads
