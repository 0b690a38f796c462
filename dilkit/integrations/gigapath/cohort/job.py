"""What a run over a cohort is to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dilkit.integrations.gigapath.cohort.listing import Slide
from dilkit.integrations.gigapath.cohort.settings import ModelRecord, ReadSettings


@dataclass(frozen=True)
class Job:
    """The folder of the outputs, the model, how files are read, and whether maps of attention are drawn."""

    out: Path
    model: ModelRecord
    reading: ReadSettings = field(default_factory=ReadSettings)
    heatmaps: bool = False

    def maps_of(self, slide: Slide) -> tuple[Path, ...]:
        """The image and the GeoJSON of a slide; none where they are not asked for."""
        return tuple(slide.output.with_suffix(end) for end in (".png", ".geojson")) if self.heatmaps else ()

    def level0_pixels(self, slide: Slide) -> float:
        """Pixels of level 0 that a pixel of the slide's coordinates has a side.

        Raises ValueError where coordinates come from micrometres and nobody says how many of these a pixel of level 0 has.
        """
        if slide.microns is None:
            return 1.0
        if self.reading.microns_per_pixel is None:
            raise ValueError(
                f"{slide.path}: coords are in micrometres, and the squares of a GeoJSON are pixels of level 0; "
                "give --microns-per-pixel, as the scan says, or leave out --heatmap"
            )
        return slide.microns / self.reading.microns_per_pixel
