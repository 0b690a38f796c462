"""The patterns of published models, by name: classmethods of `Pattern`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dilkit.checks import integer
from dilkit.pattern.checks import PatternError
from dilkit.pattern.kinds.bands import SlidingWindow, Strided
from dilkit.pattern.kinds.block_sparse import BlockSparse
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.kinds.global_tokens import GlobalTokens
from dilkit.pattern.kinds.neighborhood import Neighborhood

if TYPE_CHECKING:
    from typing_extensions import Self


class Presets:
    """The presets that `Pattern` inherits."""

    @classmethod
    def of(cls, *branches: Branch, overlap: str = "count", tail: str = "exact") -> Self:
        """Make the pattern of these branches."""
        raise NotImplementedError

    @classmethod
    def mistral(cls, window: int) -> Self:
        """Make causal sliding windows: `0 <= i - j < window` with `is_causal=True` (Mistral 7B, arXiv 2310.06825).

        >>> from dilkit import Pattern
        >>> Pattern.mistral(3).count(6, 1, is_causal=True)[0, 5].tolist()
        [0, 0, 0, 1, 1, 1]
        """
        return cls.of(SlidingWindow(window))

    @classmethod
    def streaming_llm(cls, window: int, sinks: int = 4) -> Self:
        """Make causal windows, and the first tokens for ever: `i - j < window or j < sinks` (arXiv 2309.17453).

        >>> from dilkit import Pattern
        >>> Pattern.streaming_llm(2, sinks=1).count(6, 1, is_causal=True)[0, 5].tolist()
        [1, 0, 0, 0, 1, 1]
        """
        return cls.of(SlidingWindow(window), GlobalTokens(sinks, "read"), overlap="once")

    @classmethod
    def longformer(cls, window: int, global_tokens: int) -> Self:
        """Make windows of `window / 2` tokens on each side, and first tokens that see all and are seen by all.

            i sees j  if  |i - j| <= window / 2  or  i < global_tokens  or  j < global_tokens

        `window` is even, as `attention_window` is (Longformer, arXiv 2004.05150, which projects global tokens by weights of their
        own).

            >>> from dilkit import Pattern
            >>> Pattern.longformer(2, global_tokens=1).count(6, 1)[0, 3].tolist()
            [1, 0, 1, 1, 1, 0]
        """
        width = integer("window", window, at_least=2)
        if width % 2:
            raise PatternError(f"window={width} is odd, but half of it lies on each side of a token; give an even number")
        return cls.of(SlidingWindow(width // 2 + 1), GlobalTokens(global_tokens), overlap="once")

    @classmethod
    def bigbird(cls, seq: int, block_size: int = 64, *, random_blocks: int = 3, seed: int = 0, heads: int = 1) -> Self:
        """Make blocks that see three around them, the first and the last block, and `random_blocks` others, drawn by `seed`.

        For up to `seq` tokens; with `heads`, each head draws its own (BigBird, arXiv 2007.14062;
        `BlockSparse.bigbird` has more arguments).

            >>> from dilkit import Pattern
            >>> Pattern.bigbird(80, block_size=8).count(80, 1)[0, 40].sum().item()  # 8 blocks of 8 tokens
            64
        """
        blocks = -(-integer("seq", seq, at_least=1) // integer("block_size", block_size, at_least=1))
        return cls.of(BlockSparse.bigbird(blocks, block_size, random_blocks=random_blocks, seed=seed, heads=heads))

    @classmethod
    def natten(
        cls,
        shape: Sequence[int],
        kernel_size: int | Sequence[int],
        dilation: int | Sequence[int] = 1,
        *,
        stride: int | Sequence[int] = 1,
        causal: bool | Sequence[bool] = False,
    ) -> Self:
        """Make the neighborhood of each cell of a row-major grid (arXiv 2204.07143; `Neighborhood`).

        >>> from dilkit import Pattern
        >>> Pattern.natten((3, 4), kernel_size=3).count(12, 1)[0, 0].view(3, 4).tolist()
        [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
        """
        return cls.of(Neighborhood(shape, kernel_size, dilation, stride=stride, causal=causal))

    @classmethod
    def dilateformer(
        cls, shape: Sequence[int], heads: int, kernel_size: int | Sequence[int] = 3, dilations: Sequence[int] = (1, 2, 3)
    ) -> Self:
        """Make windows around each cell of a row-major grid, with zeros beyond its edges (DilateFormer, arXiv 2302.01791).

        The `heads` are as many equal groups as there are `dilations`, one for each group, in this order.

            >>> from dilkit import Pattern
            >>> pattern = Pattern.dilateformer((4, 4), heads=2, dilations=(1, 2))
            >>> pattern.count(16, 2)[1, 0].view(4, 4).tolist()
            [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
            >>> pattern.zero_keys(16, 2)[1, 0].item()  # of the 9 cells of its window
            5
        """
        if not dilations or integer("heads", heads, at_least=1) % len(dilations):
            raise PatternError(f"heads={heads} cannot be divided into equal groups, one for each of dilations={tuple(dilations)}")
        group = heads // len(dilations)
        groups = [(first, first + group) for first in range(0, heads, group)]
        branches = [
            Neighborhood(shape, kernel_size, d, served, border="cut") for d, served in zip(dilations, groups, strict=True)
        ]
        for width in (sizes := branches[0].kernel_size):
            if width % 2 == 0:
                raise PatternError(f"kernel_size={sizes}: {width} is even and has no middle token; give odd sizes")
        return cls.of(*branches, tail="zeros")

    @classmethod
    def sparse_transformer(cls, stride: int) -> Self:
        """Make the strided pattern: `i - j <= stride or (i - j) mod stride == 0`, causal (arXiv 1904.10509).

        Both parts in every head. With a stride near the root of the length, two layers see all.

            >>> from dilkit import Pattern
            >>> Pattern.sparse_transformer(3).count(10, 1, is_causal=True)[0, 9].tolist()
            [1, 0, 0, 1, 0, 0, 1, 1, 1, 1]
        """
        return cls.of(SlidingWindow(stride), Strided(stride), overlap="once")
