"""What the image demo's result says, as tables and plots. Its words are imported when they are needed: torch comes with them."""

from __future__ import annotations

from typing import Any

from dilkit.tools.console.text import markdown_table
from dilkit.tools.report.document import Axis, Document, Plot, Point, Table, plots, tables
from dilkit.tools.report.kinds.told_bench import where
from dilkit.tools.report.points import plain, series_of

Result = dict[str, Any]


def told(result: Result) -> Document:
    """The result as a whole."""
    from dilkit.tools.demo.image import words

    facts = tuple((line[:11].strip(), line[11:].strip()) for line in words.facts(result))
    return Document(
        headline=(f"dilkit demo --image: {words.outcome(result)}", where(result)),
        tables=tables(
            Table.of("Losses", words.seed_rows(result)),
            Table("The run", ("", "what"), facts),
            Table.of("What a guess without any training loses", words.guess_rows(result)),
            Table.of("Neighbours that a patch sees in one layer", words.sight_rows(result)),
        ),
        plots=plots(_losses(result)),
        notes=(words.speed(result),),
    )


def _losses(result: Result) -> Plot:
    """A line for each order and seed."""
    lines: dict[str, list[Point]] = {}
    for twins in result["training"]["twins"]:
        for point in twins["points"]:
            for curve, loss in point["held_out"].items():
                lines.setdefault(f"{curve}, seed {twins['seed']}", []).append(plain(point["step"], loss))
    axes = Axis("steps", "number", log=False), Axis("held-out loss", "number", log=False)
    return Plot("Held-out loss in the course of training", "lines", series_of(lines), axes)


def whole(result: Result) -> str:
    """The outcome, and the losses by seed."""
    from dilkit.tools.demo.image import words

    outcome = f"`dilkit demo --image`: {words.outcome(result)} ({where(result)})."
    return "\n".join([outcome, "", *markdown_table(words.seed_rows(result))])
