"""The picture of docs/gigapath.md: a slide that was made up, and what the class token of an encoder looks at in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dilkit.integrations.gigapath import SlideEncoder, SlideEncoderConfig, attention_map
from dilkit.tools.report.picture import INK, new_figure, save

ROWS, COLUMNS, TILE = 30, 46, 256
TISSUE = ("#f3dbe6", "#e3a3c3", "#b06aa8", "#5b3a86")
"""The colours of fat, stroma, glands and tumour: those of a stained section."""
SEED, CHANNELS = 8, 16


def draw_slide(path: Path) -> None:
    """Draw it: on the left the kinds of tissue, on the right the tiles by the weight that the class token gives them."""
    cells, kinds = _tissue()
    tiles, coords = _tiles(cells, kinds)
    torch.manual_seed(SEED)
    config = SlideEncoderConfig(
        embed_dim=64, depth=2, num_heads=4, in_chans=CHANNELS, segment_lengths=(1024,), dilation_rates=(1,), tail="exact"
    )
    weights = attention_map(SlideEncoder(config).eval(), tiles, coords)[0].mean(dim=0).numpy()
    with new_figure(9.2, 2.95) as figure:
        left, right = figure.subplots(1, 2)
        colours = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in TISSUE])[kinds]
        stained = np.clip(colours + np.random.default_rng(SEED).normal(0, 0.025, (len(cells), 1)), 0, 1)
        _show(left, cells, stained, f"A made-up slide of {len(cells):,} tiles")
        picture = _show(right, cells, weights * len(weights), "Attention of the class token, with random weights")
        bar = figure.colorbar(picture, ax=right, shrink=0.82, pad=0.02)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0, labelsize=8, labelcolor=INK)
        bar.set_label("weight, in units of the mean", fontsize=8, color=INK)
        save(figure, path, dpi=150)


def _tissue() -> tuple[np.ndarray, np.ndarray]:
    """Return the cells that hold tissue, `(n, 2)`, row and column, and the kind of each."""
    rows, columns = np.mgrid[:ROWS, :COLUMNS]
    y, x = (rows - ROWS / 2) / ROWS, (columns - COLUMNS / 2) / COLUMNS
    ragged = 0.12 * np.sin(11 * x + 5 * y + 1) + 0.1 * np.cos(15 * y - 13 * x) + 0.06 * np.sin(31 * x - 17 * y)
    inside = (x / 0.48) ** 2 + ((y - 0.3 * x**2 + 0.04) / 0.46) ** 2 + ragged < 0.92
    tumour = _hill(x, y, 0.17, -0.06, 0.14) + 0.8 * _hill(x, y, 0.02, 0.22, 0.09)
    glands = _hill(x, y, -0.22, -0.05, 0.16) + 0.5 * _hill(x, y, -0.02, -0.3, 0.1)
    fat = 1.1 * _hill(x, y, -0.4, 0.3, 0.16) + _hill(x, y, 0.36, 0.28, 0.12)
    kinds = np.argmax([fat, 0.45 + 0 * x, glands, tumour], axis=0)
    return np.argwhere(inside), kinds[inside]


def _hill(x: Any, y: Any, at_x: float, at_y: float, width: float) -> np.ndarray:
    """Return a hill of height 1, twice as wide in y, whose unit is the shorter side of the grid."""
    return np.asarray(np.exp(-((x - at_x) ** 2 + ((y - at_y) / 1.6) ** 2) / width**2))


def _tiles(cells: np.ndarray, kinds: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return features `(1, n, CHANNELS)`, those of a kind alike, and coordinates `(1, n, 2)` in pixels."""
    generator = np.random.default_rng(SEED)
    alike = generator.normal(size=(len(TISSUE), CHANNELS))[kinds]
    features = 4 * alike + generator.normal(size=alike.shape)
    coords = TILE * cells[:, ::-1].copy()
    return torch.tensor(features, dtype=torch.float32)[None], torch.tensor(coords)[None]


def _show(axes: Any, cells: np.ndarray, values: np.ndarray, title: str) -> Any:
    """Show tiles at their places, in colours `(n, 3)` or by weights `(n,)`."""
    picture = np.full((ROWS, COLUMNS, *values.shape[1:]), 1.0 if values.ndim > 1 else np.nan)
    picture[tuple(cells.T)] = values
    shown = axes.imshow(picture, cmap="magma")
    axes.set_xticks(np.arange(COLUMNS + 1) - 0.5, [])
    axes.set_yticks(np.arange(ROWS + 1) - 0.5, [])
    axes.grid(color="white", linewidth=0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    return shown
