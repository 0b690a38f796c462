"""The image demo's results as lines for people. Every function reads the plain data that report.json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dilkit.tools.demo.image.model import CURVES
from dilkit.tools.demo.text.words import clock, counted, verdicts

Data = dict[str, Any]

NAMES = {"row-major": "row-major", "hilbert": "Hilbert"}
GUESSES = {
    "mean": "the mean of the visible patches",
    "nearest": "the nearest visible patch",
    "weighted": "all visible patches, weighted by 1 / distance^4",
}
CURVE_HEADER = """\
                      held-out loss
 seed   step    row-major    Hilbert     time"""


def facts(results: Data) -> list[str]:
    """What is trained, on what, and which backend computes it and why."""
    photo, model, training = results["photo"], results["model"], results["training"]
    first, last = photo["held_out_columns"]
    rows = [
        ("picture", f"{photo['source']}, {photo['columns']} x {photo['rows']} pixels; columns {first}-{last - 1} are held out"),
        (
            "task",
            f"crops of {model['grid']} x {model['grid']} patches of {model['patch']} x {model['patch']} pixels; "
            f"{model['hidden']:.0%} of the patches are hidden, and predicted from the rest",
        ),
        (
            "model",
            f"{model['parameters'] / 1e6:.2f} M parameters: "
            f"{model['layers']} layers, width {model['width']}, {model['heads']} heads, {model['cells']:,} tokens",
        ),
        ("attention", f"{model['pattern']}: {model['share_of_dense']:.1%} of the work of dense attention"),
        (
            "training",
            f"{counted(training['seeds'], 'seed')}, for each two models, alike in all but the order of their tokens: "
            f"{counted(training['steps'], 'step')} of {counted(training['batch'], 'crop')}",
        ),
        *verdicts(results["backend"]),
    ]
    return [f"{name:<11}{line}" for name, line in rows]


def curve_line(training: Data) -> str:
    """The last judgement in the course of a seed's two trainings."""
    point, losses = training["points"][-1], training["points"][-1]["held_out"]
    seconds = clock(sum(training["seconds"].values()))
    first, second = (f"{losses[curve]:.4f}" for curve in CURVES)
    return f"{training['seed']:>5}{point['step']:>7}{first:>13}{second:>11}{seconds:>9}"


def progress(seed: int, recent: dict[str, float]) -> str:
    """How training is going, for the progress bar."""
    losses = "  ".join(f"{NAMES[curve]} {loss:.3f}" for curve, loss in recent.items())
    return f"seed {seed}  {losses}"


def outcome(results: Data) -> str:
    """Which order has the lower loss, and whether that stands out from the spread over the seeds."""
    found = results["outcome"]
    if found is None:
        return "No seed was trained to its end: nothing to compare"
    lower, higher = sorted(CURVES, key=found["medians"].__getitem__)
    medians, seeds = found["medians"], counted(len(found["seeds"]), "seed")
    head = f"Held-out loss, median of {seeds}: {NAMES[lower]} {medians[lower]:.4f}, {NAMES[higher]} {medians[higher]:.4f}"
    return f"{head}. {_judgement(found, NAMES[lower])}"


def _judgement(found: Data, lower: str) -> str:
    difference, spread = abs(found["median_difference"]), f"the spread over seeds, {found['spread']:.4f}"
    if len(found["seeds"]) < 2:
        return "One seed says nothing of the spread"
    same, size = len({x > 0 for x in found["differences"]}) == 1, f"{difference:.4f} in the median"
    if found["stands_out"]:
        return f"{lower} order is better for every seed, by {size}, which exceeds {spread}"
    if not same:
        return f"Which is better depends on the seed: the difference, {size}, does not stand out from {spread}"
    return f"The difference, {size}, has the same sign for all seeds, but does not exceed {spread}"


def seed_rows(results: Data) -> list[list[str]]:
    """A table of the losses: a row a seed, then the medians; the first row is its head."""
    rows = [["seed", "steps", *(NAMES[curve] for curve in CURVES), "Hilbert less row-major"]]
    for training in results["training"]["twins"]:
        if not training["points"]:
            continue
        losses = training["points"][-1]["held_out"]
        step, mark = training["points"][-1]["step"], "" if training["finished"] else " (not finished)"
        rows.append([f"{training['seed']}", f"{step:,}{mark}", *_losses(losses), _difference(losses)])
    if found := results["outcome"]:
        difference = f"{found['median_difference']:+.4f}"
        rows.append(["median", "", *_losses(found["medians"]), difference])
        rows.append(["the same in dB", "", *(f"{found['decibels'][curve]:.2f}" for curve in CURVES), ""])
    return rows


def _losses(losses: Data) -> list[str]:
    return [f"{losses[curve]:.4f}" for curve in CURVES]


def _difference(losses: Data) -> str:
    return f"{losses[CURVES[1]] - losses[CURVES[0]]:+.4f}"


def guess_rows(results: Data) -> list[list[str]]:
    """A table of the guesses that need no training."""
    rows = [[GUESSES[name], f"{guess['loss']:.4f}", f"{guess['decibels']:.2f}"] for name, guess in results["baselines"].items()]
    return [["guess", "loss", "dB"], *rows]


def sight_rows(results: Data) -> list[list[str]]:
    """A table of how many of its neighbours a patch sees under each order."""
    sight = results["sight"]
    head = [f"of the {(2 * reach + 1) ** 2 - 1} patches within {counted(reach, 'step')}" for reach in sight["reaches"]]
    rows = [[NAMES[curve], *(f"{share:.1%}" for share in sight["neighbours_seen"][curve])] for curve in CURVES]
    return [["order", *head], *rows]


def speed(results: Data) -> str:
    """How long a step takes under each order, and with how many threads."""
    steps = sum(training["steps"] for training in results["training"]["twins"])
    if not steps:
        return "No step was made"
    totals = {curve: sum(training["seconds"][curve] for training in results["training"]["twins"]) for curve in CURVES}
    times = " and ".join(f"{1e3 * seconds / steps:.0f} ms in {NAMES[curve]} order" for curve, seconds in totals.items())
    return f"A step took {times}, on {counted(results['environment']['threads'], 'thread')}"


def closing(out: Path, notes: list[str]) -> list[str]:
    """What could not be done, and where the results are."""
    return ["", *notes, f"report     {out / 'report.md'}"]
