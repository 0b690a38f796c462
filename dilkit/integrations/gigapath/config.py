"""The sizes of GigaPath's slide encoders (Xu et al., Nature 630, 2024). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dilkit.checks import boolean, integer, real
from dilkit.pattern import Pattern

RATES = (1, 2, 4, 8, 16)
SIZES = ("embed_dim", "depth", "num_heads", "in_chans")


def segment_lengths_of(slide_pixels: int = 262144, tile_size: int = 256) -> tuple[int, ...]:
    """Return the five segment lengths for slides of up to `slide_pixels` squared: powers of 2, evenly spaced, cut to integers.

    Raises TypeError or ValueError unless `slide_pixels` is an integer of at least one tile.

    >>> segment_lengths_of()
    (1024, 5792, 32768, 185363, 1048576)
    """
    integer("slide_pixels", slide_pixels, at_least=integer("tile_size", tile_size, at_least=1))
    top = int(math.log2((slide_pixels // tile_size) ** 2))
    return tuple(int(2 ** (10 + (top - 10) * step / 4)) for step in range(5))


@dataclass(frozen=True)
class SlideEncoderConfig:
    """The sizes and options of a slide encoder; the defaults are those of `gigapath_slide_enc12l768d`.

    - `embed_dim` (a multiple of 4), `depth`, `num_heads`, `in_chans`: the sizes; the feed-forward network is 4 times as wide.
    - `segment_lengths`, `dilation_rates`: the pattern, with `offset="block"`.
    - `tail`: "zeros" as the weights were trained, "exact" without padding (`dilkit.Pattern`).
    - `ngrids`: a slide has `ngrids` x `ngrids` cells of `tile_size` pixels.
    - `tile_size`: pixels a side of the tiles, in the units of coordinates. Segment lengths stay as they are:
      `segment_lengths_of(slide_pixels, tile_size)` are those that GigaPath derives from it.
    - `global_pool`: the mean of the tiles instead of the class token, which GigaPath's pretraining does not train.
    - `dropout`, `drop_path`: in training; the layers' own rates of `drop_path` rise from 0 to this.

    Raises TypeError or ValueError naming the field.

        >>> from dilkit.integrations.gigapath import SlideEncoderConfig
        >>> SlideEncoderConfig(embed_dim=48, depth=2).pattern.segment_lengths
        (1024, 5792, 32768, 185363, 1048576)
    """

    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 16
    in_chans: int = 1536
    segment_lengths: tuple[int, ...] = segment_lengths_of()
    dilation_rates: tuple[int, ...] = RATES
    tail: str = "zeros"
    ngrids: int = 1000
    tile_size: int = 256
    global_pool: bool = False
    dropout: float = 0.25
    drop_path: float = 0.1

    def __post_init__(self) -> None:
        for name in ("embed_dim", "depth", "num_heads", "in_chans", "ngrids", "tile_size"):
            object.__setattr__(self, name, integer(name, getattr(self, name), at_least=1))
        for name in ("segment_lengths", "dilation_rates"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # a list could change, and the attention would not
        if self.embed_dim % self.num_heads or self.embed_dim % 4:
            raise ValueError(
                f"embed_dim={self.embed_dim} must be a multiple of 4, for the positions, and of num_heads={self.num_heads}"
            )
        boolean("global_pool", self.global_pool)
        for name in ("dropout", "drop_path"):
            check_share(name, getattr(self, name))
        self.pattern  # noqa: B018  raises for what is no pattern

    @property
    def pattern(self) -> Pattern:
        """The attention pattern of a sequence that begins with the class token."""
        return Pattern(self.segment_lengths, self.dilation_rates, offset="block", tail=self.tail)


def check_share(name: str, value: float) -> None:
    if not 0 <= real(name, value) < 1:
        raise ValueError(f"{name}={value} must be at least 0 and less than 1")


ARCHITECTURES = {
    "gigapath_slide_enc12l768d": SlideEncoderConfig(),
    "gigapath_slide_enc24l1024d": SlideEncoderConfig(embed_dim=1024, depth=24),
    "gigapath_slide_enc12l1536d": SlideEncoderConfig(embed_dim=1536),
    "gigapath_slide_enc12l384d": SlideEncoderConfig(embed_dim=384, in_chans=384),
}
"""The published architectures, by name; the last is GigaPath-Flash's."""


def known_as(config: SlideEncoderConfig) -> str:
    sizes = [name for name, known in ARCHITECTURES.items() if all(getattr(known, one) == getattr(config, one) for one in SIZES)]
    return sizes[0] if sizes else "other sizes"
