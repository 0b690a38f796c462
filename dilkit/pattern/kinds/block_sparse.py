"""`BlockSparse`: blocks of tokens that see blocks of tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dilkit.checks import integer
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.block_layout import BlockLayout
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Form, GivenBlocks, Runs
from dilkit.pattern.lowering.tables import RunTable, turned
from dilkit.pattern.runs import UNBOUNDED

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BlockSparse(Branch):
    """The sequence is cut into blocks of `block_size` tokens, and a layout says which blocks see which.

        i sees j  if  layout[h, i // block_size, j // block_size]

    - `layout`: bools `(heads or 1, blocks, blocks)` or `(blocks, blocks)`, an array, a tensor or nested lists; kept as a
      `BlockLayout`, which is compared and hashed by its content. With several heads, h is the query head's number in the whole
      model, of which the layout has all. None: it is given at each call, `block_layout=` of `dilkit.dilated_attention`, as
      models do that choose their blocks.
    - `heads`: the range (start, stop) of query heads that the branch serves; None means all of them.

    The last block of a sequence may be short, and of a shorter sequence the first blocks count; one of more tokens than the
    layout has blocks for is refused (`PatternError`). Under causality no query sees a key after itself, within a block either.

        >>> from dilkit import BlockSparse, Pattern
        >>> Pattern.of(BlockSparse([[True, False], [True, True]], block_size=2)).count(3, 1)[0].tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        >>> print(BlockSparse.bigbird(blocks=64, block_size=64))
        blocks of 64 tokens: 1 x 64 x 64 blocks, 622 of 4,096 seen
    """

    kind: ClassVar[str] = "block_sparse"

    layout: BlockLayout | None
    block_size: int
    heads: tuple[int, int] | None = None

    def __init__(self, layout: Any, block_size: int, heads: range | tuple[int, int] | None = None) -> None:
        checked = layout if layout is None or isinstance(layout, BlockLayout) else BlockLayout.of(layout)
        for name, value in dict(layout=checked, block_size=block_size, heads=heads).items():
            object.__setattr__(self, name, value)
        self._settle(block_size=block_size)

    @classmethod
    def local_global(cls, blocks: int, block_size: int, *, window: int = 3, global_blocks: int = 1) -> BlockSparse:
        """Make blocks see `window` blocks around them, and `global_blocks` first ones, which see all and are seen by all.

        >>> from dilkit import BlockSparse
        >>> BlockSparse.local_global(5, 16).layout.array()[0, 3].tolist()
        [True, False, True, True, True]
        """
        return cls(_local_global(blocks, window, global_blocks), block_size)

    @classmethod
    def bigbird(
        cls,
        blocks: int,
        block_size: int,
        *,
        window: int = 3,
        global_blocks: int = 2,
        random_blocks: int = 3,
        seed: int = 0,
        heads: int = 1,
    ) -> BlockSparse:
        """Make BigBird's blocks (arXiv 2007.14062): a window, global ones, and `random_blocks` others a row, drawn by `seed`.

        Half of the global blocks are the first ones and half the last. With `heads`, each head of the model draws its own.

            >>> from dilkit import BlockSparse
            >>> row = BlockSparse.bigbird(16, 64, seed=1).layout.array()[0, 8]
            >>> int(row.sum()), row[[0, 7, 8, 9, 15]].all()  # 2 global blocks, 3 of the window, 3 random ones
            (8, np.True_)
        """
        import numpy as np

        count, number = integer("random_blocks", random_blocks, at_least=0), integer("heads", heads, at_least=1)
        BlockLayout.check_size(number, integer("blocks", blocks, at_least=1))
        layout = np.repeat(_local_global(blocks, window, global_blocks, both_ends=True), number, axis=0)
        draws = np.random.RandomState(integer("seed", seed, at_least=0))  # whose numbers never change, in any version
        for matrix in layout:
            for _ in range(min(count, len(matrix))):
                rows = np.flatnonzero(~matrix.all(axis=1))
                while rows.size:  # what a row sees already is drawn again
                    columns = draws.randint(len(matrix), size=rows.size)
                    free = ~matrix[rows, columns]
                    matrix[rows[free], columns[free]] = True
                    rows = rows[~free]
        return cls(layout, block_size)

    @property
    def differs_by_head(self) -> bool:
        return self.heads is not None or (self.layout is not None and self.layout.heads > 1)

    @property
    def is_given_by_call(self) -> bool:
        return self.layout is None

    def with_layout(self, layout: Any) -> BlockSparse:
        return BlockSparse(layout, self.block_size, self.heads)

    @property
    def own_layout(self) -> BlockLayout:
        """The layout. Raises `PatternError` where it is given at each call."""
        if self.layout is None:
            raise PatternError(
                f"{self.call()} has no layout of its own, which dilated_attention takes as block_layout= of each call and "
                "nothing else does; give the branch one (dilkit.BlockSparse(layout, block_size))"
            )
        return self.layout

    def check_heads(self, in_model: int) -> None:
        if self.layout is not None and self.layout.heads not in (1, in_model):
            raise PatternError(
                f"layout has {self.layout.heads} heads, but the model has {in_model} query heads; give one for all, or {in_model}"
            )

    @property
    def max_seq(self) -> int:
        return WHOLE_SEQUENCE if self.layout is None else self.layout.blocks * self.block_size

    @property
    def is_of_whole_sequences(self) -> bool:
        return self.layout is None

    @property
    def unit(self) -> int:
        return self.block_size

    def check_seq(self, seq: int) -> None:
        if self.layout is not None and seq > self.max_seq:
            blocks, size = self.layout.blocks, self.block_size
            raise PatternError(
                f"seq={seq}: layout has {blocks} blocks of {size} tokens, for {self.max_seq} tokens at most; give it more blocks"
            )

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        chosen = self._layouts(heads)
        layouts = torch.from_numpy(self.own_layout.array()[chosen.start : chosen.stop].copy()).to(rows.device)
        return layouts[:, rows // self.block_size][:, :, keys // self.block_size]

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
        import numpy as np

        if self.layout is None:  # as many as a layout can have
            return len(self.served(heads)) * (seq * (seq + 1) // 2 if is_causal else seq * seq)
        edges = np.minimum(np.arange(self.layout.blocks + 1, dtype=np.int64) * self.block_size, seq)
        _, row, start, stop = self.layout.runs(self._layouts(heads), self.layout.blocks).T
        rows, before = np.diff(edges).astype(object), np.minimum(stop, row) if is_causal else stop  # sums are of any size
        total = (rows[row] * (edges[np.maximum(before, start)] - edges[start])).sum()
        if is_causal:
            diagonal = rows[row[(start <= row) & (row < stop)]]
            total += (diagonal * (diagonal + 1) // 2).sum()
        return int(total) * (len(self.served(heads)) if self.layout.heads == 1 else 1)

    def forms(self, heads: Heads, seq: int) -> Iterable[Form]:
        block = min(self.block_size, UNBOUNDED)
        if self.layout is None:
            yield GivenBlocks(heads=self.range_served(heads), block=block)
            return
        ranges = [self.range_served(heads)] if self.layout.heads == 1 else [(head, head + 1) for head in self.served(heads)]
        for served, number in zip(ranges, self._layouts(heads), strict=True):
            blocks, runs = self.layout.blocks, self.layout.runs(range(number, number + 1), self.layout.blocks)[:, 1:]
            queries, keys = (RunTable.of_blocks(of_rows, blocks, self.block_size) for of_rows in (runs, turned(runs)))
            yield Runs(heads=served, queries=queries, keys=keys, block=block)

    def _layouts(self, heads: Heads) -> range:
        """Return the numbers of the layouts of the heads that the branch serves."""
        served = self.served(heads)
        return range(1) if self.own_layout.heads == 1 else heads.in_model[served.start : served.stop]

    def to_fields(self) -> dict[str, Any]:
        if self.layout is None:
            return dict(kind=self.kind, block_size=self.block_size, heads=self.heads)
        layout = dict(layout=self.layout.text(), layout_heads=self.layout.heads, blocks=self.layout.blocks)
        return dict(kind=self.kind, **layout, block_size=self.block_size, heads=self.heads)

    @classmethod
    def arguments(cls) -> dict[str, bool]:
        return dict(layout=False, layout_heads=False, blocks=False, block_size=True, heads=False)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> BlockSparse:
        sizes = [values.get(name) for name in ("layout_heads", "blocks", "layout")]
        if all(value is None for value in sizes):
            return cls(None, values["block_size"], values.get("heads"))
        if any(value is None for value in sizes):
            raise PatternError("layout, layout_heads and blocks belong together; give all three or none")
        layout = BlockLayout.from_text(*sizes)
        return cls(layout, values["block_size"], values.get("heads"))

    def call(self) -> str:
        if self.layout is None:
            heads = "" if self.heads is None else f", heads={self.heads!r}"
            return f"BlockSparse(None, {self.block_size}{heads})"
        digest = hashlib.sha256(self.layout.bits).hexdigest()[:8]
        heads = "" if self.heads is None else f", heads={self.heads!r}"
        return f"BlockSparse(<{self.layout}, {digest}>, {self.block_size}{heads})"

    def __str__(self) -> str:
        layout = "chosen at each call" if self.layout is None else str(self.layout)
        return f"blocks of {self.block_size:,} tokens: {layout}{self.heads_text()}"


def _local_global(blocks: int, window: int, global_blocks: int, both_ends: bool = False) -> Any:
    """Return bools `(1, blocks, blocks)`: `window` blocks around each, and global ones, first or half of them last."""
    import numpy as np

    BlockLayout.check_size(1, blocks := integer("blocks", blocks, at_least=1))
    window, count = integer("window", window, at_least=1), integer("global_blocks", global_blocks, at_least=0)
    if window % 2 == 0:
        raise PatternError(f"window={window} blocks cannot lie evenly around one; an odd number is needed")
    number = np.arange(blocks)
    first = count - count // 2 if both_ends else count
    chosen = (number < first) | (number >= blocks - (count - first))
    layout = np.zeros((1, blocks, blocks), np.bool_)
    layout[:, chosen], layout[:, :, chosen] = True, True
    for apart in range(min(window // 2 + 1, blocks)):
        near = number[apart:]
        layout[:, near, near - apart] = layout[:, near - apart, near] = True
    return layout
