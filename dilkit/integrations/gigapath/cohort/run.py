"""A run over a cohort: planned once, then computed by one process or by several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit.integrations.gigapath.cohort.embedding import check_matplotlib, embed_pack
from dilkit.integrations.gigapath.cohort.listing import CohortJob, ListedSlide, RefusedFile, list_slides
from dilkit.integrations.gigapath.cohort.manifest import Manifest, SlideRecord, read_manifest
from dilkit.integrations.gigapath.encoder import SlideEncoder

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Plan:
    slides: tuple[ListedSlide, ...]
    kept: tuple[SlideRecord, ...]
    shares: tuple[list[list[ListedSlide]], ...]
    refused: tuple[RefusedFile, ...]

    @property
    def tiles(self) -> int:
        return sum(slide.tiles for share in self.shares for pack in share for slide in pack)


def plan_cohort(paths: Iterable[Path], job: CohortJob, ranks: int = 1) -> Plan:
    """List slides, and divide those to embed over ranks. Raises ImportError for a missing library, or ValueError."""
    if job.heatmaps:
        check_matplotlib()
    manifest = read_manifest(job.out, job.model)
    slides, refused = list_slides(paths, job, manifest.slides)
    records = [manifest.keeps(slide, job.maps_of(slide)) for slide in slides]
    left = [slide for slide, record in zip(slides, records, strict=True) if record is None]
    manifest.forget(left)
    done = tuple(record for record in records if record is not None)
    return Plan(tuple(slides), done, tuple(shares_of(packs_of(left), ranks)), tuple(refused))


def embed_share(
    model: SlideEncoder, plan: Plan, job: CohortJob, rank: int = 0, progress: Progress = lambda tiles: None
) -> tuple[list[SlideRecord], list[RefusedFile]]:
    """Embed a rank's slides; return records and refusals. A record is in the manifest as soon as its files are there.

    `progress` is called with the number of tiles so far.
    """
    manifest = read_manifest(job.out, job.model) if rank == 0 else Manifest(job.out, job.model, rank)
    refused: list[RefusedFile] = []
    records: list[SlideRecord] = []
    tiles = 0
    for pack in plan.shares[rank]:
        for slide, one in embed_pack(model, pack, job):
            if isinstance(one, RefusedFile):
                refused.append(one)
            else:
                records.append(one)
                manifest.add(one)
            tiles += slide.tiles
            progress(tiles)
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
    """Return slides in packs of at most `tiles` tiles, each counted as the longest of the pack, or of one longer slide.

    Slides of a pack have one tile size and width. The longest come first, so that want of memory shows at once.
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
    shares: list[list[list[ListedSlide]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pack in packs:
        rank = loads.index(min(loads))
        shares[rank].append(pack)
        loads[rank] += sum(slide.tiles for slide in pack)
    return shares
