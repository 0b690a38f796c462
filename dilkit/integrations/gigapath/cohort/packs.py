"""Which slides are computed together, and which rank computes which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dilkit.integrations.gigapath.cohort.listing import Slide

PACK_TILES = 1024
"""Tiles that are computed together at most, padded to the longest slide of them: beyond, one slide after the other is as fast. A
longer slide is a pack of its own, so that a process holds the features of so many tiles, or of its longest slide."""


def packs_of(slides: Iterable[Slide], tiles: int = PACK_TILES) -> list[list[Slide]]:
    """Slides in packs of at most `tiles` tiles, each counted as the longest of the pack, or of one slide that has more.

    Slides of a pack have one tile size and as many numbers a tile. The longest come first, so that what memory does not hold
    shows at once.
    """
    packs: list[list[Slide]] = []
    for slide in sorted(slides, key=lambda slide: (slide.tile_size, slide.in_chans, -slide.tiles)):
        last = packs[-1] if packs else []
        alike = bool(last) and (last[0].tile_size, last[0].in_chans) == (slide.tile_size, slide.in_chans)
        if alike and last[0].tiles * (len(last) + 1) <= tiles:
            last.append(slide)
        else:
            packs.append([slide])
    return sorted(packs, key=lambda pack: -sum(slide.tiles for slide in pack))


def shares_of(packs: Sequence[list[Slide]], ranks: int) -> list[list[list[Slide]]]:
    """The packs of each rank: one after the other, the largest first, goes to the rank that has the fewest tiles."""
    shares: list[list[list[Slide]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pack in packs:
        rank = loads.index(min(loads))
        shares[rank].append(pack)
        loads[rank] += sum(slide.tiles for slide in pack)
    return shares
