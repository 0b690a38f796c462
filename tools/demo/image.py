"""`dilkit demo --image`: models that differ in the order of their tokens alone fill in hidden patches of a photograph."""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dilkit
from dilkit import DilatedAttention, Pattern, Problem, files
from dilkit.device import probe
from dilkit.rotary import rotate
from dilkit.tools.console.text import error_line
from dilkit.tools.demo.trainer import Run, Task, Trainer, clock, judgements, rows_by_name, run_table
from dilkit.tools.demo.transformer import TransformerBlock, scale_updates
from dilkit.tools.report.document import Axis, Table
from dilkit.tools.report.views import PlotView, Report, stored
from dilkit.tools.results.rows import RowsResult

TITLE, ORDERS, JUDGEMENTS, SEEDS = "dilkit demo --image", ("row-major", "hilbert"), 4, 3
GRID, PATCH, HIDDEN, BATCH = 32, 4, 0.75, 2
"""Patches along a crop, pixels along a patch, share of hidden patches, crops in a step."""
WIDTH, LAYERS, HEADS, PATTERN = 64, 3, 4, Pattern([64, 256, 1024], [1, 2, 4])


class AxialRotary(nn.Module):
    """An inner attention with rotary embeddings of row and column: scores depend on distances in the picture."""

    def __init__(self, curve: str) -> None:
        super().__init__()
        self.inner = DilatedAttention(PATTERN, order=dilkit.order((GRID, GRID), curve))
        places = torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID))
        speeds = torch.logspace(0, math.log10(math.pi / GRID), WIDTH // HEADS // 4)  # radians a patch; the slowest: pi a side
        angles = (places[..., None] * speeds).flatten(1)[:, None]
        self.tables = angles.cos(), angles.sin()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out: Tensor = self.inner(rotate(query, *self.tables), rotate(key, *self.tables), value, **options)
        return out


class PatchTransformer(nn.Module):
    """All patches of crops, from visible ones: `(n, cells, values)` and bool `(n, cells)`, True = hidden, which are not read."""

    def __init__(self, curve: str) -> None:
        super().__init__()
        self.embedding = nn.Linear(3 * PATCH**2 + 1, WIDTH)
        blocks = [TransformerBlock(WIDTH, HEADS, AxialRotary(curve)) for _ in range(LAYERS)]
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * PATCH**2)
        nn.init.zeros_(self.head.weight)
        scale_updates(blocks, 1.0)
        for block in blocks:  # a constant in common of queries and keys favours near patches
            nn.init.ones_(block.get_parameter("attention.in_proj_bias")[: 2 * WIDTH])

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        seen = ~hidden[..., None]
        base = (patches * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        x = self.blocks(self.embedding(torch.cat([(patches - base) * seen, seen], dim=-1)))
        predicted: Tensor = base + self.head(self.norm(x))
        return predicted


def load_photograph(path: Path) -> Tensor:
    """Return the picture in a file, cut to a square of 4 x 4 crops: `(side, side, 3)`, with mean 0 and deviation 1."""
    from PIL import Image, ImageOps

    try:
        files.check_regular(path, path.stat())
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # whatever Pillow raises for a file that is no picture
        raise ValueError(f"--image: {str(path)!r} cannot be read: {error_line(error)}") from None
    pixels = torch.from_numpy(np.array(ImageOps.fit(picture, (4 * GRID * PATCH,) * 2), dtype=np.float32))
    if (deviation := pixels.std()) == 0:
        raise ValueError(f"--image: {str(path)!r} is all of one colour; give another")
    return (pixels - pixels.mean((0, 1))) / deviation


class FillIn(Task):
    """The hidden patches of crops. A strip down the photograph's middle is judged on, what is beside it is learnt from."""

    def __init__(self, photo: Tensor, order: str, seed: int) -> None:
        self.size, start = GRID * PATCH, (len(photo) - GRID * PATCH) // 2
        self.sides = torch.stack([photo[:, :start], photo[:, start + self.size :]])
        held_out = torch.unflatten(photo[:, start : start + self.size], 0, (-1, self.size))
        self.held_out = patches_of(held_out), hide(len(held_out), torch.Generator().manual_seed(0))
        torch.manual_seed(seed)
        self.model = PatchTransformer(order)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return random crops to train on, turned, mirrored and their colours permuted, and their hidden patches."""
        crops = []
        for _ in range(BATCH):
            room = (2, self.sides.shape[1] - self.size + 1, self.sides.shape[2] - self.size + 1, 4, 2)
            side, row, column, turns, mirrored = (int(torch.randint(below, (), generator=self._generator)) for below in room)
            crop = torch.rot90(self.sides[side, row : row + self.size, column : column + self.size], turns)
            crops.append((crop.flip(0) if mirrored else crop)[..., torch.randperm(3, generator=self._generator)])
        return patches_of(torch.stack(crops)), hide(BATCH, self._generator)

    def loss(self, patches: Tensor, hidden: Tensor) -> Tensor:
        return F.mse_loss(self.model(patches, hidden)[hidden], patches[hidden])

    def batch(self, spent: float) -> tuple[Tensor, int]:
        return self.loss(*self.draw()), BATCH * GRID**2

    @torch.no_grad()
    def judge(self) -> float:
        return self.loss(*self.held_out).item()


def patches_of(crops: Tensor) -> Tensor:
    """Return crops `(n, size, size, 3)` as patches `(n, cells, values)`."""
    return crops.reshape(-1, GRID, PATCH, GRID, PATCH, 3).transpose(2, 3).reshape(-1, GRID**2, 3 * PATCH**2)


def hide(crops: int, generator: torch.Generator) -> Tensor:
    """Return as many hidden patches in each crop, anywhere: bool `(crops, cells)`."""
    return torch.rand(crops, GRID**2, generator=generator).argsort(1) < round(HIDDEN * GRID**2)


def run(args: argparse.Namespace) -> int:
    """For each seed, train two models that differ in the order of their tokens; 0, or 130 when interrupted."""
    from matplotlib.cbook import get_sample_data

    path = Path(get_sample_data("grace_hopper.jpg", asfileobj=False) if args.image is True else args.image)
    photo, seeds = load_photograph(path), [*range(args.seed, args.seed + SEEDS)]
    sizes: Any = dict(seq=GRID**2, heads=HEADS, head_dim=WIDTH // HEADS, batch=BATCH)
    problem = Problem(pattern=PATTERN, device=probe("cpu"), requires_grad=True, **sizes)
    facts = dict(photo=path.name, layers=LAYERS, grid=GRID, patch=PATCH, hidden=HIDDEN, seeds=seeds)
    minutes = args.minutes and args.minutes / (SEEDS * len(ORDERS))
    with Run(TITLE, args, PatchTransformer(ORDERS[0]), problem, facts) as demo:
        for seed in seeds:
            for order in ORDERS:
                demo.train(f"{order}, seed {seed}", Trainer(FillIn(photo, order, seed), args.steps, minutes), JUDGEMENTS)
    return demo.code


def outcome(result: RowsResult) -> str:
    if result.interrupted:
        return "not trained to its end: nothing to compare"
    first, second = zip(*losses(result).values(), strict=True)
    signs = {x < y for x, y in zip(first, second, strict=True)}
    lower = "neither" if len(signs) > 1 else ORDERS[0] if True in signs else ORDERS[1]
    medians = ", ".join(f"{order} {median(values):.4f}" for order, values in zip(ORDERS, (first, second), strict=True))
    return f"held-out loss, median of {len(first)} seeds: {medians}; {lower} loses less with every seed"


def losses(result: RowsResult) -> dict[int, list[float]]:
    seeds = () if result.interrupted else result.facts["seeds"]
    return {seed: [judgements(result, f"{order}, seed {seed}")[-1]["loss"] for order in ORDERS] for seed in seeds}


def made_tables(result: RowsResult) -> Iterable[Table]:
    rows = tuple((f"{seed}", *map("{:.4f}".format, pair)) for seed, pair in losses(result).items())
    yield Table("Losses", ("seed", *ORDERS), rows)
    task = "{photo}: crops of {grid} x {grid} patches of {patch} x {patch} pixels, {hidden:.0%} of them hidden"
    trained = rows_by_name(result, "training").items()
    after = [(who, f"{row.values['steps']:,} steps in {clock(row.values['seconds'])}") for who, row in trained]
    yield run_table(result, after, about=("picture", task.format(**result.facts)))


AXES = Axis("patches in training", "number", log=False), Axis("held-out loss", "number")
REPORT = Report(
    command=TITLE,
    summary=outcome,
    tables=(made_tables,),
    plots=(PlotView("Held-out loss", "held out", "tokens", stored("loss"), AXES, "lines"),),
    method="The loss is the mean squared error of the hidden pixels, in units of the picture's variance, on a strip down its "
    "middle, of which nothing was trained on. For one seed both models start from the same weights, and in each step see the "
    "same crops with the same patches hidden. The attention alone is given the order.",
)
