"""What the image demo's trainings say together: medians over the seeds, their spread, and whether a difference exceeds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from dilkit.tools.demo.image.model import CURVES


def compare(trainings: Sequence[dict[str, Any]], decibels: Callable[[float], float]) -> dict[str, Any] | None:
    """The last judgement of all finished trainings; None where there is none.

    A difference is the loss under `CURVES[1]` less that under `CURVES[0]` of the same seed. It stands out if it has the same
    sign for all of at least two seeds, and its median exceeds the spread (largest less smallest) of either order over the seeds.
    """
    finished = [training for training in trainings if training["finished"]]
    if not finished:
        return None
    losses = {curve: [training["points"][-1]["held_out"][curve] for training in finished] for curve in CURVES}
    differences = [b - a for a, b in zip(*losses.values(), strict=True)]
    spread = max(max(values) - min(values) for values in losses.values())
    alike = len({difference > 0 for difference in differences}) == 1 and len(differences) > 1
    return dict(
        seeds=[training["seed"] for training in finished],
        losses=losses,
        medians={curve: median(values) for curve, values in losses.items()},
        decibels={curve: decibels(median(values)) for curve, values in losses.items()},
        differences=differences,
        median_difference=median(differences),
        spread=spread,
        stands_out=alike and abs(median(differences)) > spread,
    )
