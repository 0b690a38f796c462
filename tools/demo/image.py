"""`dilkit demo --image`: models that differ in the order of their tokens alone fill in hidden patches of a photograph."""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dilkit
from dilkit import DilatedAttention, Pattern, Problem, files
from dilkit.device import probe
from dilkit.tools.console.text import error_line
from dilkit.tools.demo.trainer import Demo, Task, Trainer, clock, counted, judgements, rows_by_name, run_table
from dilkit.tools.demo.transformer import TransformerBlock, scale_updates
from dilkit.tools.report.document import Axis, Plot, Point, Series, Table
from dilkit.tools.report.picture import INK, new_figure, save
from dilkit.tools.report.points import plain
from dilkit.tools.report.views import RunReport
from dilkit.tools.results.rows import Row, RowsResult

ORDERS = ("row-major", "hilbert")
PATTERN = Pattern([64, 256, 1024], [1, 2, 4])
"""Each token sees 64 tokens whole, 1 in 2 of 256, 1 in 4 of all 1,024."""
SAMPLE = "grace_hopper.jpg"
"""A portrait in the public domain, of matplotlib's sample data."""
SIDE, BATCH, MASKS, JUDGEMENTS = 4, 2, 3, 4
"""Crops that a photograph is wide and high; crops in a step; times that each held-out crop is judged, other patches hidden."""


@dataclass(frozen=True)
class ImageConfig:
    """Sizes of the model and of its task: `grid` x `grid` patches of `patch` x `patch` pixels, a share of them `hidden`."""

    grid: int = 32
    patch: int = 4
    hidden: float = 0.75
    width: int = 64
    layers: int = 3
    heads: int = 4
    pattern: Pattern = PATTERN

    @property
    def crop(self) -> int:
        """Side of a crop in pixels."""
        return self.grid * self.patch

    @property
    def places(self) -> Tensor:
        """Row and column of each token, `(cells, 2)`."""
        return torch.cartesian_prod(torch.arange(self.grid), torch.arange(self.grid))


class AxialRotary(nn.Module):
    """An inner attention with rotary embeddings of the row in half of the pairs, of the column in the other half.

    Scores then depend on the distance in the picture, down and across, whatever the order of the tokens.
    """

    rotations: Tensor

    def __init__(self, config: ImageConfig, curve: str) -> None:
        super().__init__()
        self.inner = DilatedAttention(config.pattern, order=dilkit.order((config.grid, config.grid), curve))
        pairs = config.width // config.heads // 4
        speeds = torch.logspace(0, math.log10(math.pi / config.grid), pairs)  # radians a patch; the slowest: pi over the side
        angles = (config.places[..., None] * speeds).flatten(1)
        self.register_buffer("rotations", torch.polar(torch.ones_like(angles), angles)[:, None], persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        query, key = (
            torch.view_as_real(torch.view_as_complex(torch.unflatten(x, -1, (-1, 2))) * self.rotations).flatten(-2)
            for x in (query, key)
        )
        out: Tensor = self.inner(query, key, value, **options)
        return out


class PatchTransformer(nn.Module):
    """All patches of crops, from visible ones: `(n, cells, values)` and bool `(n, cells)`, True = hidden, which are not read.

    It predicts differences from the mean of the visible patches. The order of the tokens, along `curve`, is that of the
    attention alone. Queries and keys begin with a constant in common: rotated like them, it favours near patches.
    """

    def __init__(self, config: ImageConfig, curve: str) -> None:
        super().__init__()
        values = 3 * config.patch**2
        self.embedding = nn.Linear(values + 1, config.width)
        blocks = [TransformerBlock(config.width, config.heads, AxialRotary(config, curve)) for _ in range(config.layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, values)
        nn.init.zeros_(self.head.weight)
        scale_updates(blocks, 1.0)
        for block in blocks:
            if block.attention.in_proj_bias is not None:
                nn.init.ones_(block.attention.in_proj_bias[: 2 * config.width])

    def forward(self, patches: Tensor, hidden: Tensor) -> Tensor:
        seen = ~hidden[..., None]
        base = (patches * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        x = self.embedding(torch.cat([(patches - base) * seen, seen], dim=-1))
        for block in self.blocks:
            x = block(x)
        predicted: Tensor = base + self.head(self.norm(x))
        return predicted


def load_photograph(path: str | None, side: int) -> Tensor:
    """Return the picture in the file `path`, or the sample, cut to a square and scaled: `(side, side, 3)`, 0 to 1.

    Raises ValueError for an unreadable picture, or where a package is missing.
    """
    try:
        from matplotlib.cbook import get_sample_data
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ValueError(f"--image: needs matplotlib and Pillow (pip install 'dilkit[plot]'): {error}") from None
    try:
        content = files.read_bytes(Path(get_sample_data(SAMPLE, asfileobj=False) if path is None else path))
        with Image.open(io.BytesIO(content)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:
        raise ValueError(f"--image: {path or SAMPLE!r} is no picture that Pillow can read: {error_line(error)}") from None
    return torch.from_numpy(np.array(ImageOps.fit(picture, (side, side)), dtype=np.float32) / 255)


class Crops:
    """Crops of a photograph as patches `(n, cells, values)`, and hidden ones as bool `(n, cells)`.

    Crops in a strip down its middle are held out, those beside it are trained on. Values are standardised by the latter: a
    loss of 1 is their variance.
    """

    def __init__(self, photo: Tensor, config: ImageConfig) -> None:
        self.config = config
        self.start = (len(photo) - config.crop) // 2
        self.stop = self.start + config.crop
        sides = torch.cat([photo[:, : self.start], photo[:, self.stop :]], 1)
        self.mean = sides.mean((0, 1))
        self.deviation = (sides - self.mean).square().mean().sqrt()
        if self.deviation == 0:
            raise ValueError("--image: the picture is all of one colour beside its middle; give another")
        self.photo = (photo - self.mean) / self.deviation
        strip = self.photo[:, self.start : self.stop]
        self.held_out = self._patches(torch.unflatten(strip, 0, (-1, config.crop))).repeat(MASKS, 1, 1)
        self.hidden = self._hide(len(self.held_out), torch.Generator().manual_seed(0))

    def _patches(self, crops: Tensor) -> Tensor:
        grid, patch = self.config.grid, self.config.patch
        return crops.reshape(-1, grid, patch, grid, patch, 3).transpose(2, 3).reshape(-1, grid**2, 3 * patch**2)

    def picture(self, patches: Tensor) -> Tensor:
        """Return crops one below the other, `(n * crop, crop, 3)`, 0 to 1."""
        grid, patch = self.config.grid, self.config.patch
        pixels = patches.reshape(-1, grid, grid, patch, patch, 3).transpose(2, 3).reshape(-1, self.config.crop, 3)
        return (pixels * self.deviation + self.mean).clamp(0, 1)

    def _hide(self, crops: int, generator: torch.Generator) -> Tensor:
        """Return as many hidden patches in each crop, anywhere."""
        order = torch.rand(crops, self.config.grid**2, generator=generator).argsort(1)
        return order < round(self.config.hidden * self.config.grid**2)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random crops to train on, turned, mirrored and their colours permuted, and their hidden patches."""

        def draw(below: int) -> int:
            return int(torch.randint(below, (), generator=generator))

        crops, size = [], self.config.crop
        for _ in range(BATCH):
            row, column = draw(len(self.photo) - size + 1), draw(self.start - size + 1) + draw(2) * self.stop
            crop = torch.rot90(self.photo[row : row + size, column : column + size], draw(4))
            mirrored = crop.flip(0) if draw(2) else crop
            crops.append(mirrored[..., torch.randperm(3, generator=generator)])
        return self._patches(torch.stack(crops)), self._hide(BATCH, generator)

    def guess(self) -> float:
        """Return the held-out loss of the mean of the visible patches, weighted by 1 / distance^4."""
        places = self.config.places
        squares = (places[:, None] - places).square().sum(-1).float().fill_diagonal_(torch.inf)
        weights = squares**-2 * ~self.hidden[:, None]
        return hidden_loss(weights @ self.held_out / weights.sum(-1, keepdim=True), self.held_out, self.hidden).item()


def hidden_loss(predicted: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Return the mean squared error over the hidden patches."""
    return (predicted - patches)[hidden].square().mean()


class FillIn(Task):
    """The hidden patches of crops. Two tasks of the same seed differ in the order of the tokens alone."""

    def __init__(self, crops: Crops, order: str, seed: int) -> None:
        self.crops = crops
        torch.manual_seed(seed)
        self.model = PatchTransformer(crops.config, order)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, spent: float) -> tuple[Tensor, int]:
        patches, hidden = self.crops.batch(self._generator)
        return hidden_loss(self.model(patches, hidden), patches, hidden), hidden.numel()

    def judge(self) -> float:
        return hidden_loss(self.filled_in(), self.crops.held_out, self.crops.hidden).item()

    @torch.no_grad()
    def filled_in(self) -> Tensor:
        """Return the model's held-out crops, computed a few at a time."""
        parts = zip(torch.split(self.crops.held_out, 4), torch.split(self.crops.hidden, 4), strict=True)
        return torch.cat([self.model(patches, hidden) for patches, hidden in parts])


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0, or 130 when interrupted."""
    config = ImageConfig()
    path = None if args.image is True else args.image
    return ImageDemo(args, Crops(load_photograph(path, SIDE * config.crop), config)).run()


class ImageDemo(Demo):
    """For each seed, train two models that differ in nothing but the order of their tokens, and compare them."""

    KIND, TITLE = "demo-image", "dilkit demo --image"

    def __init__(self, args: argparse.Namespace, crops: Crops) -> None:
        config = crops.config
        sizes: Any = dict(seq=config.grid**2, heads=config.heads, head_dim=config.width // config.heads, batch=BATCH)
        problem = Problem(pattern=config.pattern, device=probe("cpu"), requires_grad=True, **sizes)
        super().__init__(args, PatchTransformer(config, ORDERS[0]), config.layers, problem)
        self.crops, self.trainers = crops, dict[tuple[int, str], Trainer]()
        self.facts |= dict(grid=config.grid, patch=config.patch, hidden=config.hidden, guess=crops.guess())
        self.facts |= dict(photo=SAMPLE if args.image is True else args.image, judged=len(crops.held_out))

    def work(self) -> None:
        self.stage, args = "training", self.args
        minutes = args.minutes and args.minutes / (args.seeds * len(ORDERS))
        for seed in range(args.seed, args.seed + args.seeds):
            tasks = {order: FillIn(self.crops, order, seed) for order in ORDERS}
            for order, task in tasks.items():
                self.trainers[seed, order] = Trainer(task, args.steps, minutes)
                self.train(self.trainers[seed, order], JUDGEMENTS, f"seed {seed}, {order}: ")
            if seed == args.seed:
                self._draw(tasks)

    def rows(self) -> list[Row]:
        trainers = self.trainers.items()
        return [row for (seed, order), one in trainers for row in one.rows(f"{order}, seed {seed}", seed=seed, order=order)]

    def _draw(self, tasks: dict[str, FillIn]) -> None:
        """Draw the strip with its hidden patches, filled in under each order, and the original."""
        patches, hidden = self.crops.held_out[:SIDE], self.crops.hidden[:SIDE, :, None]
        strips = {"what the models see": patches.masked_fill(hidden, 0.0)}
        strips |= {order: torch.where(hidden, task.filled_in()[:SIDE], patches) for order, task in tasks.items()}
        strips["as it is"] = patches
        with new_figure(8, 8) as figure:
            for axis, (title, strip) in zip(figure.subplots(1, len(strips)), strips.items(), strict=True):
                axis.imshow(self.crops.picture(strip).numpy())
                axis.set_title(title, color=INK)
                axis.set_axis_off()
            save(figure, self.args.out / "reconstruction.png", dpi=150)


def losses(result: RowsResult) -> dict[int, tuple[float, ...]]:
    """Return by seed the last held-out losses in either order, for seeds whose trainings are both finished."""
    last: dict[int, dict[str, float]] = {}
    for name, row in rows_by_name(result, "training").items():
        if row.values["finished"]:
            last.setdefault(row.values["seed"], {})[row.values["order"]] = judgements(result, name)[-1]["loss"]
    return {seed: tuple(by_order[order] for order in ORDERS) for seed, by_order in last.items() if len(by_order) == len(ORDERS)}


def outcome(result: RowsResult) -> str:
    """Return the order of the lower loss; its difference stands out if all seeds agree and the median exceeds their spread."""
    by_seed = losses(result)
    if not by_seed:
        return "No seed was trained to its end: nothing to compare"
    by_order = dict(zip(ORDERS, zip(*by_seed.values(), strict=True), strict=True))
    lower, higher = sorted(ORDERS, key=lambda order: median(by_order[order]))
    differences = [x - y for x, y in zip(by_order[higher], by_order[lower], strict=True)]
    spread = max(max(values) - min(values) for values in by_order.values())
    stands_out = len(by_seed) > 1 and min(differences) > 0 and median(differences) > spread
    medians = ", ".join(f"{order} {median(by_order[order]):.4f}" for order in (lower, higher))
    return (
        f"Held-out loss, median of {counted(len(by_seed), 'seed')}: {medians}. The difference, {median(differences):.4f} in the "
        f"median, {'stands out' if stands_out else 'does not stand out'} from the spread over seeds, {spread:.4f}"
    )


def made_tables(result: RowsResult) -> Iterable[Table]:
    """Yield the losses by seed with their medians, and the facts of the run."""
    rows = {str(seed): (first, second, second - first) for seed, (first, second) in losses(result).items()}
    if rows:
        rows["median"] = tuple(median(column) for column in zip(*rows.values(), strict=True))
    shown = ((name, f"{first:.4f}", f"{second:.4f}", f"{less:+.4f}") for name, (first, second, less) in rows.items())
    header = ("seed", *(f"{order} loss" for order in ORDERS), f"{ORDERS[1]} less {ORDERS[0]}")
    yield Table("Losses", header, tuple(shown))
    facts = result.facts
    patches = "{grid} x {grid} patches of {patch} x {patch} pixels; {hidden:.0%} of the patches are hidden".format(**facts)
    before = (
        ("picture", f"{facts['photo']}; the strip down its middle is held out"),
        ("task", f"crops of {patches}, and predicted from the rest"),
    )
    after = []
    for order in ORDERS:
        runs = _of_order(result, order)
        steps, seconds = (sum(run.values[name] for run in runs) for name in ("steps", "seconds"))
        after.append((order, f"{counted(len(runs), 'training')}: {counted(steps, 'step')} in {clock(seconds)}"))
    after.append(("guess", f"loses {facts['guess']:.4f} without any training"))
    yield run_table(result, f"{facts['context']:,} tokens", before=before, after=after)


def _of_order(result: RowsResult, order: str) -> list[Row]:
    return [row for row in rows_by_name(result, "training").values() if row.values["order"] == order]


def loss_plot(result: RowsResult) -> Plot:
    """Draw for each order the median over the seeds, with the least and the largest; and the loss of the guess."""
    series, guess, last = [], result.facts["guess"], 0
    for order in ORDERS:
        points = []
        for judged in zip_longest(*(judgements(result, row.who) for row in _of_order(result, order))):
            tokens, values = zip(*((point["tokens"], point["loss"]) for point in judged if point), strict=True)
            points.append(Point(median(tokens), median(values), min(values), max(values)))
            last = max(last, *tokens)
        series.append(Series(order, tuple(points)))
    series.append(Series("guess", (plain(0, guess), plain(last, guess)), dashed=True))
    axes = Axis("patches in training", "number", log=False), Axis("held-out loss", "number")
    return Plot("Held-out loss: median and range over the seeds", "lines", tuple(series), axes)


REPORT = RunReport(
    "dilkit demo --image", outcome, made_tables, lambda result: [loss_plot(result)],
    "The loss is the mean squared error of the hidden pixels, in units of the variance of the pixels that were trained on. It is "
    "taken on the held-out strip, of which nothing was trained on: {judged} squares, being every crop of it with several choices "
    "of what is hidden, the same for all models. For one seed both models start from the same weights, and in each step see the "
    "same crops with the same patches hidden. A difference stands out if it has the same sign for all seeds and its median "
    "exceeds the spread, which is the largest less the smallest loss of one order over the seeds. The guess without any training "
    "is the mean of the visible patches, weighted by 1 / distance^4. An order does not change how many patches are seen, but "
    "where they lie. This is one photograph, one model and one pattern: it shows what an order can do, not what it does "
    "elsewhere. The attention alone is given the order, `DilatedAttention(pattern, order=dilkit.order((rows, columns)))`; all "
    "else stays row-major. Aligned segments of such a grid are squares along a Hilbert curve, but in plain tiles as well: "
    "`dilkit order` compares them.",
)  # fmt: skip
