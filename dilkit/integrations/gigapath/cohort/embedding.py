"""The embeddings of a pack of slides: computed together, each with its own warnings, and written whole or not at all."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dilkit import files
from dilkit.integrations.gigapath import attention_map
from dilkit.integrations.gigapath.cohort.heatmap import write_heatmap
from dilkit.integrations.gigapath.cohort.job import Job
from dilkit.integrations.gigapath.cohort.listing import Refusal, Slide, refusal
from dilkit.integrations.gigapath.cohort.manifest import SlideRecord, record_of
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.features import read_features

Given = tuple[Tensor, Tensor]
"""The tiles of a slide and their coordinates."""


def embed_pack(model: SlideEncoder, pack: Sequence[Slide], job: Job) -> Iterator[SlideRecord | Refusal]:
    """Embed slides of one tile size and write their files: what became of each, when its files are there."""
    model.tile_size = pack[0].tile_size
    slides, given = [], []
    for slide in pack:
        try:
            given.append(_read(model, slide, job))
            slides.append(slide)
        except Exception as error:
            yield refusal(slide.path, error)
    try:
        embeddings, texts = _embed(model, given, job.model.layers) if slides else ([], [])
    except Exception as error:
        if len(slides) == 1:
            yield refusal(slides[0].path, error)
        else:
            for slide in slides:  # one of them will not do
                yield from embed_pack(model, [slide], job)
        return
    for slide, of_slide, embedding, warned in zip(slides, given, embeddings, texts, strict=True):
        try:
            _write(model, slide, of_slide, embedding, job)
            yield record_of(slide, job.maps_of(slide), warned)
        except Exception as error:
            yield refusal(slide.path, error)


def _read(model: SlideEncoder, slide: Slide, job: Job) -> Given:
    weights = model.cls_token
    tiles, coords, *_ = read_features(slide.path, **job.reading.reading)
    if tiles.shape != (slide.tiles, slide.in_chans):
        raise ValueError(f"{slide.path} has changed since it was listed; start again")
    return tiles.to(weights), coords.to(weights.device)


def _embed(model: SlideEncoder, given: Sequence[Given], layers: bool) -> tuple[list[Tensor], list[list[str]]]:
    """The embeddings of each slide, `(1 or layers, embed_dim)` in float32, and what is warned of it."""
    tiles, coords = (pad_sequence(list(one), batch_first=True) for one in zip(*given, strict=True))
    lengths = torch.tensor([len(one) for one, _ in given], device=tiles.device)
    missing = torch.arange(tiles.shape[1], device=tiles.device) >= lengths[:, None]
    with warnings.catch_warnings(record=True) as warned, torch.no_grad():
        warnings.simplefilter("always")
        embeddings = torch.stack(model(tiles, coords, missing, all_layer_embed=layers), dim=1).float().cpu()
    texts: list[list[str]] = [[] for _ in given]
    for text in (str(one.message) for one in warned):
        of_slide = re.match(r"coords of slide (\d+):", text)
        for i in [int(of_slide[1])] if of_slide else range(len(given)):
            texts[i].append(re.sub(r"^coords of slide \d+:", "coords:", text))
    return list(embeddings), texts


def _write(model: SlideEncoder, slide: Slide, given: Given, embedding: Tensor, job: Job) -> None:
    """Write the maps of a slide, then its embedding."""
    if not bool(embedding.isfinite().all()):
        raise ValueError(f"the embedding in {job.model.dtype} is not finite; features may be too large: try --dtype float32")
    if maps := job.maps_of(slide):
        weights = attention_map(model, given[0][None], given[1][None])[0].float().mean(dim=0).cpu()
        image, shapes = maps
        write_heatmap(image, weights, given[1].cpu(), slide.tile_size)
        write_geojson(shapes, weights, given[1].cpu(), slide.tile_size, job.level0_pixels(slide))
    with files.replacing(slide.output) as file:
        torch.save({"layers": embedding.clone()} if job.model.layers else {"embedding": embedding[0].clone()}, file)


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
