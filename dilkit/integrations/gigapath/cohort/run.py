"""A run over a cohort: planned once, then computed by one process or by several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit.integrations.gigapath.cohort.embedding import embed_pack
from dilkit.integrations.gigapath.cohort.heatmap import check_matplotlib
from dilkit.integrations.gigapath.cohort.listing import ListedSlide, RefusedFile, list_slides
from dilkit.integrations.gigapath.cohort.manifest import Manifest, SlideRecord, read_manifest
from dilkit.integrations.gigapath.cohort.settings import CohortJob
from dilkit.integrations.gigapath.encoder import SlideEncoder

Progress = Callable[[int], object]
"""Is given the tiles of a slide when it is done."""


@dataclass(frozen=True)
class Plan:
    """A run before it begins: all slides, the records of those that are kept, packs for each rank, refused files."""

    slides: tuple[ListedSlide, ...]
    kept: tuple[SlideRecord, ...]
    shares: tuple[list[list[ListedSlide]], ...]
    refused: tuple[RefusedFile, ...]

    @property
    def tiles(self) -> int:
        """Tiles that are to be computed."""
        return sum(slide.tiles for share in self.shares for pack in share for slide in pack)


def plan_cohort(paths: Iterable[Path], job: CohortJob, ranks: int = 1) -> Plan:
    """List the slides, and divide those that are not there yet over ranks, with the manifests of ranks put together.

    Raises ImportError where a library is missing, ValueError where nothing can begin.
    """
    if job.heatmaps:
        check_matplotlib()
    manifest = read_manifest(job.out, job.model)
    slides, refused = list_slides(paths, job.out, job.reading, manifest.slides)
    slides, undrawn = _drawable(slides, job) if job.heatmaps else (slides, [])
    records = [manifest.keeps(slide, job.maps_of(slide)) for slide in slides]
    left = [slide for slide, record in zip(slides, records, strict=True) if record is None]
    manifest.forget(left)
    done = tuple(record for record in records if record is not None)
    return Plan(tuple(slides), done, tuple(shares_of(packs_of(left), ranks)), (*refused, *undrawn))


def _drawable(slides: Sequence[ListedSlide], job: CohortJob) -> tuple[list[ListedSlide], list[RefusedFile]]:
    """Return the slides whose maps can be drawn, and those where something is missing for it."""
    drawable, undrawn = [], []
    for slide in slides:
        try:
            job.level0_pixels(slide)
            drawable.append(slide)
        except ValueError as error:
            undrawn.append(RefusedFile(slide.path, str(error)))
    return drawable, undrawn


def embed_share(
    model: SlideEncoder, plan: Plan, job: CohortJob, rank: int = 0, progress: Progress = lambda tiles: None
) -> tuple[list[SlideRecord], list[RefusedFile]]:
    """Embed the slides of a rank: the records of those embedded, and those that would not do.

    A record is in the manifest as soon as its files are there; `finish` puts those of all ranks together.
    """
    manifest = read_manifest(job.out, job.model) if rank == 0 else Manifest(job.out, job.model, rank)
    refused: list[RefusedFile] = []
    records: list[SlideRecord] = []
    for pack in plan.shares[rank]:
        tiles = {slide.output.name: slide.tiles for slide in pack}
        for one in embed_pack(model, pack, job):
            if isinstance(one, RefusedFile):
                refused.append(one)
                progress(tiles[f"{one.path.stem}.pt"])
            else:
                records.append(one)
                manifest.add(one)
                progress(one.tiles)
    return records, refused


def finish(plan: Plan, job: CohortJob, refused: Sequence[RefusedFile]) -> None:
    """Write the manifest of all ranks, with all that would not do; nothing where the folder holds no embedding of the model."""
    manifest = read_manifest(job.out, job.model)
    manifest.refused = list(refused)
    if manifest.slides or refused:
        manifest.write()
        manifest.drop_parts()


PACK_TILES = 1024
"""Tiles that are computed together at most, padded to the longest slide of them: beyond, one slide after the other is as fast. A
longer slide is a pack of its own, so that a process holds the features of so many tiles, or of its longest slide."""


def packs_of(slides: Iterable[ListedSlide], tiles: int = PACK_TILES) -> list[list[ListedSlide]]:
    """Return slides in packs of at most `tiles` tiles, each counted as the longest of the pack, or of one slide that has more.

    Slides of a pack have one tile size and as many numbers a tile. The longest come first, so that what memory does not hold
    shows at once.
    """
    packs: list[list[ListedSlide]] = []
    for slide in sorted(slides, key=lambda slide: (slide.tile_size, slide.in_chans, -slide.tiles)):
        last = packs[-1] if packs else []
        alike = bool(last) and (last[0].tile_size, last[0].in_chans) == (slide.tile_size, slide.in_chans)
        if alike and last[0].tiles * (len(last) + 1) <= tiles:
            last.append(slide)
        else:
            packs.append([slide])
    return sorted(packs, key=lambda pack: -sum(slide.tiles for slide in pack))


def shares_of(packs: Sequence[list[ListedSlide]], ranks: int) -> list[list[list[ListedSlide]]]:
    """Return the packs of each rank: one after the other, the largest first, goes to the rank that has the fewest tiles."""
    shares: list[list[list[ListedSlide]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pack in packs:
        rank = loads.index(min(loads))
        shares[rank].append(pack)
        loads[rank] += sum(slide.tiles for slide in pack)
    return shares
