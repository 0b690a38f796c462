"""`BlockLayout`: the pairs of blocks of a sequence that see each other, as an immutable value."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dilkit import plan
from dilkit.checks import integer
from dilkit.pattern.checks import PatternError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BITS = 2**31
"""The most blocks that see or do not see one another, over all heads: beyond that a layout takes more than 256 MiB."""

CHUNK = 2**20
"""Bytes of a layout that are looked at at once."""


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
            raise PatternError(
                f"blocks={blocks} would be a layout of {heads:,} x {blocks:,} x {blocks:,} = {count:,} bits; at most "
                f"{MOST_BITS:,} are possible: give fewer, larger blocks (block_size), or fewer heads"
            )

    def __post_init__(self) -> None:
        count = self.heads * self.blocks**2
        if not (self.heads >= 1 and self.blocks >= 1 and count <= MOST_BITS and len(self.bits) == -(-count // 8)):
            raise PatternError(
                f"layout of {self.heads} x {self.blocks} x {self.blocks} blocks in {len(self.bits)} bytes: at least one block, "
                f"at most {MOST_BITS:,} bits in all, and a byte for eight of them are needed"
            )
        if count % 8 and self.bits[-1] & (255 >> count % 8):
            raise PatternError("layout has bits beyond its last block; write it with Pattern.to_json()")

    @classmethod
    def of(cls, layout: Any) -> BlockLayout:
        """Make the layout of bools: an array, tensor or nested lists, `(heads or 1, blocks, blocks)` or `(blocks, blocks)`."""
        import numpy as np

        try:
            array = np.asarray(layout.detach().cpu() if hasattr(layout, "detach") else layout)
        except ValueError as error:
            raise PatternError(f"layout is no matrix of bools: {error}; rows must be equally long") from None
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

    def runs(self, heads: range, blocks: int) -> NDArray[np.int64]:
        """Return the runs seen, int64 `(n, 4)`: head, counted from `heads.start`, row, first column and the one after the last.

        They are those of the first `blocks` rows and columns, ascending. The time grows with their number alone.

            >>> from dilkit.pattern import BlockLayout
            >>> BlockLayout.of([[True, True, False], [False, False, False], [True, False, True]]).runs(range(1), 3).tolist()
            [[0, 0, 0, 2], [0, 2, 0, 1], [0, 2, 2, 3]]
        """
        return self._runs(heads.start * self.blocks, heads.stop * self.blocks, range(blocks), heads.start)

    def _runs(self, first_row: int, last_row: int, within: range, first_head: int = 0) -> NDArray[np.int64]:
        """Return the runs of rows `first_row .. last_row - 1` of all matrices in turn, limited to rows and columns `within`."""
        import numpy as np

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
        chosen: NDArray[np.int64] = runs[(runs[:, 1] >= within.start) & (runs[:, 1] < within.stop) & (runs[:, 2] < runs[:, 3])]
        return chosen

    @classmethod
    def of_runs(cls, runs: NDArray[np.int64], heads: int, blocks: int) -> BlockLayout:
        """Return the layout in which these runs are seen, as `runs` gives them; those of a row are apart, or touch.

        >>> from dilkit.pattern import BlockLayout
        >>> layout = BlockLayout.of([[True, True, False], [False, False, False], [True, False, True]])
        >>> BlockLayout.of_runs(layout.runs(range(1), 3), 1, 3) == layout
        True
        """
        import numpy as np

        steps = np.zeros((heads, blocks, blocks + 1), np.int8)
        head, row, start, stop = runs.T
        np.add.at(steps, (head, row, start), 1)
        np.add.at(steps, (head, row, stop), -1)
        return cls.of(np.cumsum(steps, 2, np.int8)[:, :, :-1] > 0)

    def part(self, first: int, last: int) -> BlockLayout:
        """Return the layout of the blocks `first .. last - 1` by themselves."""
        import numpy as np

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


def _runs_of_places(places: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """Join ascending places in all matrices, row after row, to runs: head, row, first column and the one after the last."""
    import numpy as np

    column = places % blocks
    first = np.flatnonzero(np.diff(places, prepend=-2) > 1) if len(places) else np.zeros(0, np.int64)
    first = np.union1d(first, np.flatnonzero(column == 0))
    count = np.diff(first, append=len(places))
    head, row = np.divmod(places[first] // blocks, blocks)
    return np.stack((head, row, column[first], column[first] + count), axis=1)


def _unpacked(layout: BlockLayout) -> NDArray[np.bool_]:
    import numpy as np

    count = layout.heads * layout.blocks**2
    bools = np.unpackbits(np.frombuffer(layout.bits, np.uint8), count=count).astype(np.bool_)
    array: NDArray[np.bool_] = bools.reshape(layout.heads, layout.blocks, layout.blocks)
    array.flags.writeable = False
    return array
