"""`BlockLayout`: which blocks of a sequence see which, as an immutable value."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from dilkit.checks import integer
from dilkit.pattern.checks import PatternError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_BITS = 2**31
"""The most blocks that see or do not see one another, over all heads: beyond that a layout takes more than 256 MiB."""


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
        """The layout with these bools: an array, tensor or nested lists, `(heads or 1, blocks, blocks)` or `(blocks, blocks)`."""
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
        """The bools, `(heads, blocks, blocks)`, read-only."""
        return _unpacked(self)

    def text(self) -> str:
        """`bits` in base64."""
        return base64.b64encode(self.bits).decode()

    @classmethod
    def from_text(cls, heads: Any, blocks: Any, text: Any) -> BlockLayout:
        """The layout whose `text` this is. Raises `PatternError` or TypeError."""
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


@lru_cache(maxsize=16)
def _unpacked(layout: BlockLayout) -> NDArray[np.bool_]:
    import numpy as np

    count = layout.heads * layout.blocks**2
    bools = np.unpackbits(np.frombuffer(layout.bits, np.uint8), count=count).astype(np.bool_)
    array: NDArray[np.bool_] = bools.reshape(layout.heads, layout.blocks, layout.blocks)
    array.flags.writeable = False
    return array
