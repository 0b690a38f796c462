"""Made-up slides of two classes that differ only in where their marked tiles lie: close together, or anywhere.

The features of tiles are drawn alike in both classes, and as many tiles are marked. So whatever looks at features alone, in any
order, can only guess: the mean over tiles too.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import torch
from torch import Tensor

from dilkit import files

WIDTH = 16
"""Features of a tile."""
SIDES = (7, 8, 9)
"""Tiles a side of a slide, which is a square."""
BLOCK = 3
"""Tiles a side of the block that is marked in slides of one class; as many are marked in the other."""
CLASSES = ("scattered", "together")
ROUND = (*("train",) * 7, "val", *("test",) * 2)
"""The splits of patients, in turns."""
TILE = 256


def write_made_up(folder: Path, slides: int, seed: int = 0) -> Path:
    """Write so many slides into `folder`, two a patient, and the table of them, `labels.csv`: its path.

    Of ten patients seven are to learn from, one is to watch, two are to judge.
    """
    generator = torch.Generator().manual_seed(seed)
    table = io.StringIO()
    rows = csv.writer(table)
    rows.writerow(("slide", "patient", "label", "split"))
    for number in range(slides):
        patient, together = number // 2, number % 2
        tiles, coords = made_up_slide(bool(together), generator)
        with files.replacing(folder / f"slide-{number}.pt") as file:
            torch.save({"features": tiles, "coords": coords, "patch_size_level0": TILE}, file)
        rows.writerow((f"slide-{number}", f"patient-{patient}", CLASSES[together], ROUND[patient % len(ROUND)]))
    with files.replacing(folder / "labels.csv") as file:
        file.write(table.getvalue().encode())
    return folder / "labels.csv"


def made_up_slide(together: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features `(n, WIDTH)` and coordinates `(n, 2)` of a slide, its marked tiles in a block or anywhere."""

    def chance(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    side = SIDES[chance(len(SIDES))]
    cells = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    block = cells[:, 0] - chance(side - BLOCK + 1), cells[:, 1] - chance(side - BLOCK + 1)
    within = ((block[0] >= 0) & (block[0] < BLOCK) & (block[1] >= 0) & (block[1] < BLOCK)).nonzero()[:, 0]
    anywhere = torch.randperm(len(cells), generator=generator)[: BLOCK**2]
    tiles = 0.3 * torch.randn(len(cells), WIDTH, generator=generator)
    tiles[within if together else anywhere, 0] += 3
    return tiles, TILE * (cells + torch.tensor([chance(4), chance(4)]))
