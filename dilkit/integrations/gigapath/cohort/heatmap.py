"""The attention of a slide over its tiles as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dilkit import files

LARGEST = 8.0
"""Inches of the longer side of a slide."""


def check_matplotlib() -> None:
    """Raise ImportError, saying what to install, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--heatmap needs matplotlib, which cannot be imported ({error}): pip install 'dilkit[plot]'") from None


def write_heatmap(path: Path, weights: Tensor, coords: Tensor, tile_size: int) -> None:
    """Write a PNG of the tiles where they lie, in the colour of `weights` `(n,)` as multiples of their mean, whole or not at all.

    `coords` `(n, 2)` are x and y in pixels, of which `tile_size` are the side of a tile. The scale ends at the 99th percentile,
    so that a single tile does not leave all others dark.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells, values = _grid(weights, coords, tile_size)
    rows, columns = cells.shape
    scale = LARGEST / max(rows, columns)
    figure = Figure(figsize=(max(2.0, columns * scale) + 1.2, max(1.5, rows * scale) + 0.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(cells, cmap="viridis", vmin=0.0, vmax=max(float(np.percentile(values, 99)), 1e-12), interpolation="none")
    axes.set_axis_off()
    figure.colorbar(image, ax=axes, label="attention of the class token, in multiples of the mean", extend="max")
    with files.replacing(path) as file:
        FigureCanvasAgg(figure).print_png(file)  # type: ignore[no-untyped-call]


def _grid(weights: Tensor, coords: Tensor, tile_size: int) -> tuple[Any, Any]:
    """Return the values of the tiles in cells of one tile, NaN without tissue; tiles that share a cell are averaged."""
    places = np.floor_divide(coords.double().numpy(), tile_size).astype(np.int64)
    columns, rows = (places - places.min(axis=0)).T
    values = weights.double().numpy() / (float(weights.double().mean()) or 1.0)
    sums, counts = np.zeros((2, rows.max() + 1, columns.max() + 1))
    np.add.at(sums, (rows, columns), values)
    np.add.at(counts, (rows, columns), 1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan), values
