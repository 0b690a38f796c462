"""`BlockSparse`: blocks of tokens that see blocks of tokens, by a `BlockLayout`, an immutable value."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dilkit import plan
from dilkit.checks import integer
from dilkit.pattern.checks import WHOLE_SEQUENCE, PatternError
from dilkit.pattern.heads import Heads
from dilkit.pattern.kinds.branch import Branch
from dilkit.pattern.lowering.forms import Form, GivenBlocks, Runs
from dilkit.pattern.lowering.tables import RunTable, turned
from dilkit.pattern.runs import UNBOUNDED, Positions

if TYPE_CHECKING:
    from torch import Tensor


MOST_BITS = 2**31
"""The most blocks that see or do not see one another, over all heads: beyond that a layout takes more than 256 MiB."""

CHUNK = 2**20


@dataclass(frozen=True)
class BlockLayout:
    """A bool matrix `(heads, blocks, blocks)` as `bits`: packed, row by row, eight to a byte. Equal matrices are equal values.

    `BlockLayout.of` makes one of any bools, `array` gives them back. Raises `PatternError` for bits that do not fit the sizes.

        >>> from dilkit.pattern import BlockLayout
        >>> layout = BlockLayout.of([[True, False], [True, True]])
        >>> layout
        BlockLayout(heads=1, blocks=2, bits=b'\\xb0')
        >>> layout.array().tolist()
        [[[True, False], [True, True]]]
    """

    heads: int
    blocks: int
    bits: bytes

    @staticmethod
    def check_size(heads: int, blocks: int) -> None:
        """Raise `PatternError` for more than `MOST_BITS`, before anything of that size is made."""
        if (count := heads * blocks**2) > MOST_BITS:
            bits = f"{heads:,} x {blocks:,} x {blocks:,} = {count:,} bits"
            raise PatternError(f"blocks={blocks} would be {bits}; at most {MOST_BITS:,} are possible: give fewer, larger blocks")

    def __post_init__(self) -> None:
        count = self.heads * self.blocks**2
        if not (self.heads >= 1 and self.blocks >= 1 and count <= MOST_BITS and len(self.bits) == -(-count // 8)):
            sizes = f"{self.heads} x {self.blocks} x {self.blocks} blocks in {len(self.bits)} bytes"
            raise PatternError(
                f"layout of {sizes}: one block at least, at most {MOST_BITS:,} bits, and a byte for eight of them are needed"
            )
        if count % 8 and self.bits[-1] & (255 >> count % 8):
            raise PatternError("layout has bits beyond its last block; write it with Pattern.to_json()")

    @classmethod
    def of(cls, layout: Any) -> BlockLayout:
        """Make the layout of bools: an array, tensor or nested lists, `(heads or 1, blocks, blocks)` or `(blocks, blocks)`."""
        try:
            array = np.asarray(layout.detach().cpu() if hasattr(layout, "detach") else layout)
        except ValueError as error:
            raise PatternError(f"layout is no matrix of bools: {error}; all rows need one length") from None
        if array.dtype != np.bool_:
            raise TypeError(f"layout is an array of {array.dtype}; bools are needed, True = seen (layout.astype(bool))")
        array = array[None] if array.ndim == 2 else array
        if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
            raise PatternError(f"layout has shape {array.shape}; (heads or 1, blocks, blocks) is needed, one block at least")
        return cls(array.shape[0], array.shape[1], np.packbits(array).tobytes())

    def array(self) -> NDArray[np.bool_]:
        """Return the bools, `(heads, blocks, blocks)`, read-only; kept in the pattern cache, as far as they fit it."""
        bools: NDArray[np.bool_] = plan.cached(("layout", self), _unpacked, self)
        return bools

    def runs(self, heads: range, blocks: int) -> Positions:
        """Return the runs seen, int64 `(n, 4)`, ascending: head from `heads.start` on, row, first column, one after the last.

        They are those of the first `blocks` rows and columns.

            >>> from dilkit.pattern import BlockLayout
            >>> BlockLayout.of([[True, True, False], [False, False, False], [True, False, True]]).runs(range(1), 3).tolist()
            [[0, 0, 0, 2], [0, 2, 0, 1], [0, 2, 2, 3]]
        """
        return self._runs(heads.start * self.blocks, heads.stop * self.blocks, range(blocks), heads.start)

    def _runs(self, first_row: int, last_row: int, within: range, first_head: int = 0) -> Positions:
        """Return the runs of rows `first_row .. last_row - 1` of all matrices in turn, limited to rows and columns `within`."""
        packed, last = np.frombuffer(self.bits, np.uint8), -(-last_row * self.blocks // 8)
        parts = [np.zeros((0, 4), np.int64)]
        for first in range(first_row * self.blocks // 8, last, CHUNK):
            some = packed[first : min(first + CHUNK, last)]
            used = np.flatnonzero(some)
            byte, bit = np.nonzero(np.unpackbits(some[used, None], axis=1))
            places = (first + used[byte]) * 8 + bit
            inside = (places >= first_row * self.blocks) & (places < last_row * self.blocks)
            parts.append(_runs_of_places(places[inside], self.blocks))
        runs = np.concatenate(parts)
        runs[:, 0] -= first_head
        runs[:, 2:] = runs[:, 2:].clip(within.start, within.stop)
        chosen: Positions = runs[(runs[:, 1] >= within.start) & (runs[:, 1] < within.stop) & (runs[:, 2] < runs[:, 3])]
        return chosen

    @classmethod
    def of_runs(cls, runs: Positions, heads: int, blocks: int) -> BlockLayout:
        """Return the layout in which these runs are seen, as `runs` gives them; those of a row are apart, or touch."""
        steps = np.zeros((heads, blocks, blocks + 1), np.int8)
        head, row, start, stop = runs.T
        np.add.at(steps, (head, row, start), 1)
        np.add.at(steps, (head, row, stop), -1)
        return cls.of(np.cumsum(steps, 2, np.int8)[:, :, :-1] > 0)

    def part(self, first: int, last: int) -> BlockLayout:
        """Return the layout of the blocks `first .. last - 1` by themselves."""
        starts = range(0, self.heads * self.blocks, self.blocks)
        runs = np.concatenate([self._runs(start + first, start + last, range(first, last)) for start in starts])
        runs[:, 1:] -= first
        return self.of_runs(runs, self.heads, last - first)

    def text(self) -> str:
        """Return `bits` in base64."""
        return base64.b64encode(self.bits).decode()

    @classmethod
    def from_text(cls, heads: Any, blocks: Any, text: Any) -> BlockLayout:
        """Return the layout whose `text` this is. Raises `PatternError` or TypeError."""
        sizes = integer("layout_heads", heads), integer("blocks", blocks)
        if not isinstance(text, str):
            raise TypeError(f"layout is a {type(text).__name__}; a text in base64 is needed, as Pattern.to_json() writes it")
        try:
            bits = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise PatternError(f"layout is not base64 ({error}); write it with Pattern.to_json()") from None
        return cls(*sizes, bits)

    def __str__(self) -> str:
        seen = f"{int(self.array().sum()):,} of {self.heads * self.blocks**2:,}"
        return f"{self.heads} x {self.blocks} x {self.blocks} blocks, {seen} seen"


def _runs_of_places(places: Positions, blocks: int) -> Positions:
    """Join ascending places in all matrices, row after row, to runs: head, row, first column and the one after the last."""
    column = places % blocks
    first = np.flatnonzero(np.diff(places, prepend=-2) > 1) if len(places) else np.zeros(0, np.int64)
    first = np.union1d(first, np.flatnonzero(column == 0))
    count = np.diff(first, append=len(places))
    head, row = np.divmod(places[first] // blocks, blocks)
    return np.stack((head, row, column[first], column[first] + count), axis=1)


def _unpacked(layout: BlockLayout) -> NDArray[np.bool_]:
    count = layout.heads * layout.blocks**2
    bools = np.unpackbits(np.frombuffer(layout.bits, np.uint8), count=count).astype(np.bool_)
    array: NDArray[np.bool_] = bools.reshape(layout.heads, layout.blocks, layout.blocks)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class BlockSparse(Branch):
    """The sequence is cut into blocks of `block_size` tokens, and a layout says which blocks see which.

        i sees j  if  layout[h, i // block_size, j // block_size]

    - `layout`: bools `(heads or 1, blocks, blocks)` or `(blocks, blocks)`, an array, a tensor or nested lists; kept as a
      `BlockLayout`, which is compared and hashed by its content. With several heads, h is the query head's number in the whole
      model. None: each call gives it, `block_layout=` of `dilkit.dilated_attention`.
    - `heads`: the query heads (start, stop) that it serves; None means all.

    The last block of a sequence may be short, and of a shorter sequence the first blocks count; one of more tokens than the
    layout has blocks for is refused (`PatternError`). Under causality no query sees a key after itself, within a block either.

        >>> from dilkit import BlockSparse, Pattern
        >>> Pattern.of(BlockSparse([[True, False], [True, True]], block_size=2)).count(3, 1)[0].tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
        >>> print(BlockSparse.bigbird(blocks=64, block_size=64))
        blocks of 64 tokens: 1 x 64 x 64 blocks, 622 of 4,096 seen
    """

    kind: ClassVar[str] = "block_sparse"
    argument: ClassVar[str] = "block_layout"

    layout: BlockLayout | None
    block_size: int
    heads: tuple[int, int] | None = None

    def __init__(self, layout: Any, block_size: int, heads: range | tuple[int, int] | None = None) -> None:
        checked = layout if layout is None or isinstance(layout, BlockLayout) else BlockLayout.of(layout)
        self._set(layout=checked, block_size=block_size, heads=heads)
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

    def shown_by(self, given: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
        return given[:, rows // self.block_size][:, :, keys // self.block_size]

    @property
    def own_layout(self) -> BlockLayout:
        """The layout. Raises `PatternError` where it is given at each call."""
        if self.layout is None:
            way = "give it one, BlockSparse(layout, block_size), or block_layout= to dilated_attention"
            raise PatternError(f"{self.call()} has no layout of its own; {way}")
        return self.layout

    def check_heads(self, in_model: int) -> None:
        if self.layout is not None and self.layout.heads not in (1, in_model):
            raise PatternError(
                f"layout has {self.layout.heads} heads, but the model has {in_model} query heads; give as many or 1"
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

    def sees(self, rows: Tensor, keys: Tensor, heads: Heads) -> Tensor:
        import torch

        chosen = self._layouts(heads)
        layouts = torch.from_numpy(self.own_layout.array()[chosen.start : chosen.stop].copy()).to(rows.device)
        return self.shown_by(layouts, rows, keys)

    def pairs(self, seq: int, heads: Heads, is_causal: bool) -> int:
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
        layout = None if self.layout is None else f"<{self.layout}, {hashlib.sha256(self.layout.bits).hexdigest()[:8]}>"
        return f"BlockSparse({layout}, {self.block_size}{'' if self.heads is None else f', heads={self.heads!r}'})"

    def __str__(self) -> str:
        layout = "chosen at each call" if self.layout is None else str(self.layout)
        return f"blocks of {self.block_size:,} tokens: {layout}{self.heads_text()}"


def _local_global(blocks: int, window: int, global_blocks: int, both_ends: bool = False) -> Any:
    """Return bools `(1, blocks, blocks)`: `window` blocks around each, and global ones, first or half of them last."""
    BlockLayout.check_size(1, blocks := integer("blocks", blocks, at_least=1))
    window, count = integer("window", window, at_least=1), integer("global_blocks", global_blocks, at_least=0)
    if window % 2 == 0:
        raise PatternError(f"window={window} blocks is even and has no middle block; an odd number is needed")
    number = np.arange(blocks)
    first = count - count // 2 if both_ends else count
    chosen = (number < first) | (number >= blocks - (count - first))
    layout = np.zeros((1, blocks, blocks), np.bool_)
    layout[:, chosen], layout[:, :, chosen] = True, True
    for apart in range(min(window // 2 + 1, blocks)):
        near = number[apart:]
        layout[:, near, near - apart] = layout[:, near - apart, near] = True
    return layout
