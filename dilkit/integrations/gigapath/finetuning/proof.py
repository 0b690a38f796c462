"""A comparison on synthetic slides: a small encoder, fine-tuned, against a linear model on the mean of their tiles.

    python -m dilkit.integrations.gigapath.finetuning.proof --seeds 0 1 2

One line of JSON a seed. It takes a few minutes each on two cores.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from dilkit import files
from dilkit.integrations.gigapath.config import SlideEncoderConfig
from dilkit.integrations.gigapath.encoder import SlideEncoder
from dilkit.integrations.gigapath.finetuning.labels import read_labels
from dilkit.integrations.gigapath.finetuning.metrics import auroc_interval
from dilkit.integrations.gigapath.finetuning.model import seeded
from dilkit.integrations.gigapath.finetuning.objectives import objective_of
from dilkit.integrations.gigapath.finetuning.record import Interval
from dilkit.integrations.gigapath.finetuning.run import finetune
from dilkit.integrations.gigapath.finetuning.settings import Settings
from dilkit.integrations.gigapath.finetuning.slides import look_through, slide_reader
from dilkit.threads import torch_threads

SLIDES = 2000
WIDTH = 16
"""Features of a tile."""
ENCODER = SlideEncoderConfig(embed_dim=48, depth=2, num_heads=4, in_chans=WIDTH, ngrids=16, dropout=0.0, drop_path=0.0)
EPOCHS = 6


@dataclass(frozen=True, kw_only=True)
class LearntBySeed:
    """The AUROC on held-out patients of the encoder and of the mean of tiles, and the seconds that training took."""

    seed: int
    patients: int
    encoder: Interval
    mean_of_tiles: Interval
    seconds: float


def prove(folder: Path, seed: int, slides: int = SLIDES, epochs: int = EPOCHS) -> LearntBySeed:
    """Write synthetic slides into `folder`, and train both models on them."""
    labels = read_labels(write_made_up(folder, slides, seed))
    settings = Settings(epochs=epochs, accumulate=4, base_rate=0.064, seed=seed)
    with seeded(seed, torch.device("cpu")):
        encoder = SlideEncoder(ENCODER)
    with torch_threads(1):  # slides of a hundred tiles: more threads wait for one another
        record = finetune(labels, look_through(labels, folder), encoder, folder / "out", settings)
    held_out = record.judged["test"]
    if held_out.auroc is None:
        raise ValueError(f"slides={slides} are too few: all that are held out are of one class")
    linear = mean_of_tiles(folder, settings)
    return LearntBySeed(
        seed=seed, patients=held_out.patients, encoder=held_out.auroc, mean_of_tiles=linear, seconds=record.seconds
    )


def mean_of_tiles(folder: Path, settings: Settings) -> Interval:
    """Return the AUROC on held-out patients of a logistic regression on the mean of each slide's tiles."""
    labels = read_labels(folder / "labels.csv")
    read = slide_reader(look_through(labels, folder), torch.empty(0))
    x = torch.stack([read(i).tiles[0].mean(dim=0) for i in range(len(labels.examples))]).double()
    train, test = ([i for i, one in enumerate(labels.examples) if one.split == name] for name in ("train", "test"))
    objective, targets = objective_of(labels), torch.tensor([labels.classes.index(str(one.label)) for one in labels.examples])
    x = (x - x[train].mean(dim=0)) / x[train].std(dim=0)
    weights = torch.zeros(len(labels.classes), x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        penalty = weights[:, :-1].square().sum() / (2 * len(train))
        value = objective.loss(F.linear(x[train], weights[:, :-1], weights[:, -1]), train) + penalty
        value.backward()  # type: ignore[no-untyped-call]
        return value.item()

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    scores = F.linear(x[test], weights[:, :-1], weights[:, -1]).detach()
    patients = [labels.examples[i].patient for i in test]
    interval = auroc_interval(scores, targets[test], [1], patients, settings.resamples, settings.seed)
    if interval is None:
        raise ValueError(f"{folder}: all slides that are held out are of one class; make more up")
    return interval


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what each seed gives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="default 0 1 2")
    for seed in parser.parse_args(arguments).seeds:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asdict(prove(Path(folder), seed))), flush=True)
    return 0


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

    Seven of ten patients are to learn from, one is to watch, two are to judge.
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
    """Make features `(n, WIDTH)` and coordinates `(n, 2)` of a slide, its marked tiles in a block or anywhere."""

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


if __name__ == "__main__":
    raise SystemExit(main())
