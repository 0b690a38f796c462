"""The result of `dilkit bench --suite slides`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dilkit.testing.accuracy import Check
from dilkit.tools.results.record import Case, Measurement, Samples, SuiteResult, of_case

PUBLISHED, OURS, BATCH, ALONE = "published procedure", "dilkit", "one batch", "one by one"


@dataclass(frozen=True, kw_only=True)
class SlideCase(Case):
    """The encoder, of `depth` layers, on slides of so many `tiles`: `PUBLISHED` and `OURS`, or `BATCH` and `ALONE`."""

    tiles: tuple[int, ...]
    depth: int


@dataclass(frozen=True, kw_only=True)
class LongSlide:
    """One call on a long slide, forward, or with gradients and activation checkpointing.

    `held_bytes` are weights and inputs, `peak_bytes` what the call held beside them; None where `why` that is not known.
    """

    tiles: int
    gradients: bool
    time: Samples
    held_bytes: int
    peak_bytes: int | None
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mass:
    """One call of `attention_mass`: its bytes beyond queries and keys, and those of a tensor of their size."""

    tiles: int
    check: Check
    time: Samples
    peak_bytes: int | None
    output_bytes: int
    why: str | None = None


@dataclass(frozen=True, kw_only=True)
class HeadDim(Case):
    """Backends on the attention of one layer, with heads of another size too."""

    head_dim: int
    tiles: int


@dataclass(frozen=True, kw_only=True)
class SlidesResult(SuiteResult):
    """GigaPath's slide encoder with random weights, beside its published procedure."""

    KIND: ClassVar[str] = "suite-slides"

    architecture: str
    isa: str
    thread_count: int
    head_dims: tuple[HeadDim, ...] = ()
    encoder: tuple[SlideCase, ...] = ()
    several: tuple[SlideCase, ...] = ()
    mass: tuple[Mass, ...] = ()
    long: tuple[LongSlide, ...] = ()

    def measurements(self) -> Iterator[Measurement]:
        for case in self.head_dims:
            yield from of_case(f"attention of a layer, head_dim {case.head_dim}", case)
        for name, cases in (("encoder", self.encoder), ("several slides", self.several)):
            for slides in cases:
                yield from of_case(f"{name}, {listed(slides.tiles)}", slides)
        for mass in self.mass:
            yield Measurement(f"attention_mass, {listed([mass.tiles])}", mass.time.samples_s)
        for long in self.long:
            yield Measurement(f"{what(long)}, {listed([long.tiles])}", long.time.samples_s)


def listed(tiles: tuple[int, ...] | list[int]) -> str:
    """How many tiles the slides have, in words."""
    return f"{', '.join(f'{n:,}' for n in tiles)} tiles"


def what(long: LongSlide) -> str:
    """Which passes were computed."""
    return "forward and backward" if long.gradients else "forward"
