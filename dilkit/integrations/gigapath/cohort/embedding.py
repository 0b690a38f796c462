"""The embeddings of a pack of slides: computed together, each with its own warnings, and written whole or not at all."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dilkit import files
from dilkit.integrations.gigapath import attention_map
from dilkit.integrations.gigapath.cohort.listing import CohortJob, ListedSlide, RefusedFile, refusal
from dilkit.integrations.gigapath.cohort.manifest import SlideRecord, record_of
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.features import read_features

Tiles = tuple[Tensor, Tensor]


def embed_pack(
    model: SlideEncoder, pack: Sequence[ListedSlide], job: CohortJob
) -> Iterator[tuple[ListedSlide, SlideRecord | RefusedFile]]:
    """Embed slides of one tile size and write their files. Yields the record or refusal of each, once its files are written."""
    model.tile_size = pack[0].tile_size
    slides, inputs = [], []
    for slide in pack:
        try:
            inputs.append(_read(model, slide, job))
            slides.append(slide)
        except Exception as error:
            yield slide, refusal(slide.path, error)
    try:
        embeddings, texts = _embed(model, inputs, job.model.layers) if slides else ([], [])
    except Exception as error:
        if len(slides) == 1:
            yield slides[0], refusal(slides[0].path, error)
        else:
            for slide in slides:  # one of them will not do
                yield from embed_pack(model, [slide], job)
        return
    for slide, of_slide, embedding, warned in zip(slides, inputs, embeddings, texts, strict=True):
        try:
            _write(model, slide, of_slide, embedding, job)
            yield slide, record_of(slide, job.maps_of(slide), warned)
        except Exception as error:
            yield slide, refusal(slide.path, error)


def _read(model: SlideEncoder, slide: ListedSlide, job: CohortJob) -> Tiles:
    weights = model.cls_token
    tiles, coords, *_ = read_features(slide.path, **job.reading.reading)
    if tiles.shape != (slide.tiles, slide.in_chans):
        raise ValueError(f"{slide.path} has changed since it was listed; start again")
    return tiles.to(weights), coords.to(weights.device)


def _embed(model: SlideEncoder, slides: Sequence[Tiles], layers: bool) -> tuple[list[Tensor], list[list[str]]]:
    tiles, coords = (pad_sequence(list(one), batch_first=True) for one in zip(*slides, strict=True))
    lengths = torch.tensor([len(one) for one, _ in slides], device=tiles.device)
    missing = torch.arange(tiles.shape[1], device=tiles.device) >= lengths[:, None]
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        embeddings = torch.stack(model(tiles, coords, missing, all_layer_embed=layers), dim=1).float().cpu()
    texts: list[list[str]] = [[] for _ in slides]
    for text in (str(one.message) for one in warned):
        of_slide = re.match(r"coords of slide (\d+):", text)
        for i in [int(of_slide[1])] if of_slide else range(len(slides)):
            texts[i].append(re.sub(r"^coords of slide \d+:", "coords:", text))
    return list(embeddings), texts


def _write(model: SlideEncoder, slide: ListedSlide, of_slide: Tiles, embedding: Tensor, job: CohortJob) -> None:
    if not bool(embedding.isfinite().all()):
        raise ValueError(f"the embedding in {job.model.dtype} is not finite; features may be too large: try --dtype float32")
    if maps := job.maps_of(slide):
        tiles, coords = of_slide
        weights = attention_map(model, tiles[None], coords[None], of_tiles=model.global_pool)[0].float().mean(dim=0).cpu()
        image, shapes = maps
        write_heatmap(image, weights, coords.cpu(), slide.tile_size, "all tiles" if model.global_pool else "the class token")
        write_geojson(shapes, weights, coords.cpu(), slide.tile_size, job.level0_pixels(slide))
    with files.replacing(slide.output) as file:
        torch.save({"layers": embedding.clone()} if job.model.layers else {"embedding": embedding[0].clone()}, file)


def write_geojson(path: Path, weights: Tensor, coords: Tensor, tile_size: int, scale: float = 1.0) -> None:
    """Write a FeatureCollection of tiles, squares in pixels of level 0, for QuPath, whole or not at all.

    `weights` `(n,)`; `coords` `(n, 2)` and `tile_size` in pixels that have `scale` pixels of level 0 a side. Measurements are
    `attention`, the weight; `relative`, a multiple of the mean; `percentile`, the percentage of tiles with a smaller weight.
    """
    ranks = weights.argsort().argsort() if len(weights) else weights
    mean = float(weights.mean()) or 1.0
    origins, side = (coords.double() * scale).tolist(), tile_size * scale
    with files.replacing(path) as file:
        file.write(b'{"type": "FeatureCollection", "features": [')
        for tile, ((x, y), weight, rank) in enumerate(zip(origins, weights.tolist(), ranks.tolist(), strict=True)):
            measurements = dict(attention=weight, relative=weight / mean, percentile=100.0 * rank / len(weights))
            ring = [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
            square = dict(type="Polygon", coordinates=[ring])
            properties = dict(objectType="tile", name=f"tile {tile}", measurements=measurements)
            file.write((",\n" if tile else "\n").encode())
            file.write(json.dumps(dict(type="Feature", geometry=square, properties=properties), allow_nan=False).encode())
        file.write(b"\n]}\n")


LARGEST = 8.0
"""Inches of the longer side of a slide."""


def check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f"--heatmap needs matplotlib, which cannot be imported ({error}): pip install 'dilkit[plot]'") from None


def write_heatmap(path: Path, weights: Tensor, coords: Tensor, tile_size: int, whose: str) -> None:
    """Write a PNG of the attention of `whose`, `weights` `(n,)` as multiples of their mean, at `coords` `(n, 2)`.

    The scale ends at the 99th percentile.
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
    figure.colorbar(image, ax=axes, label=f"attention of {whose}, in multiples of the mean", extend="max")
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
