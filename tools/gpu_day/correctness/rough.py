"""Rough times, for who has no more than the first stage: a layer forward and with gradients, each backend that is able."""

from __future__ import annotations

from collections.abc import Iterator

from dilkit.device import device_named
from dilkit.tools.console.text import in_seconds
from dilkit.tools.gpu_day.preferences.sweep import REHEARSED, measured, problems
from dilkit.tools.gpu_day.step import Context, Item, noted


def times(context: Context) -> Iterator[Item]:
    """The first pattern of the sweep at head_dim 64, not causal."""
    posed = problems(device_named(context.device), REHEARSED if context.rehearse else 1)[:16]
    for problem in (one for one in posed if one.head_dim == 64 and not one.is_causal):
        choice = measured(problem, context)
        text = ", ".join(f"{name} {in_seconds(seconds)}" for name, seconds in choice.seconds.items())
        yield noted(choice.problem, f"{text}; picked: {choice.picked}", **choice.seconds)
