"""The attention of a slide over its tiles as a GeoJSON for QuPath: a square a tile, with measurements."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from dilkit import files


def write_geojson(path: Path, weights: Tensor, coords: Tensor, tile_size: int, scale: float = 1.0) -> None:
    """Write a FeatureCollection of squares in pixels of level 0, whole or not at all.

    `weights` `(n,)` is the attention to each tile; `coords` `(n, 2)` its x and y and `tile_size` its side, both in pixels that
    have `scale` pixels of level 0 a side. Each square is a tile of QuPath with three measurements: `attention`, its weight;
    `relative`, the weight as a multiple of the mean; `percentile`, the percentage of tiles with a smaller weight.
    """
    ranks = weights.argsort().argsort() if len(weights) else weights
    mean = float(weights.mean()) or 1.0
    corners = (coords.double() * scale).tolist()
    with files.replacing(path) as file:
        file.write(b'{"type": "FeatureCollection", "features": [')
        for tile, ((x, y), weight, rank) in enumerate(zip(corners, weights.tolist(), ranks.tolist(), strict=True)):
            measurements = dict(attention=weight, relative=weight / mean, percentile=100.0 * rank / len(weights))
            square = dict(type="Polygon", coordinates=[_corners(x, y, tile_size * scale)])
            properties = dict(objectType="tile", name=f"tile {tile}", measurements=measurements)
            file.write((",\n" if tile else "\n").encode())
            file.write(json.dumps(dict(type="Feature", geometry=square, properties=properties), allow_nan=False).encode())
        file.write(b"\n]}\n")


def _corners(x: float, y: float, side: float) -> list[list[float]]:
    """The corners of a square, the first once more at the end, as GeoJSON has them."""
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
