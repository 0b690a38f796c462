"""The image demo's report: report.json, report.md and the pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dilkit.tools.console.text import markdown_table
from dilkit.tools.demo.image import words
from dilkit.tools.demo.image.sight import Sight
from dilkit.tools.demo.image.train import Task, Twins
from dilkit.tools.demo.text.report import why_undrawn
from dilkit.tools.results.untyped import save, write_text

PICTURES = ("reconstruction.png", "loss.png", "sight.png")

_TEMPLATE = """\
# dilkit demo --image
{interrupted}
Two small models learn to fill in the hidden patches of a photograph. They are alike in all but the order of their tokens:
row-major, or along a Hilbert curve.

**{outcome}.**

{reconstruction}```text
{facts}
```

{device_name}; Python {python}, torch {torch}, dilkit {dilkit}; {date}.
{speed}.

## Losses

{loss}{seeds}

The loss is the mean squared error of the hidden pixels, in units of the variance of the pixels that were trained on. It is taken
on the held-out strip, of which nothing was trained on: {judged} squares, being every crop of it with {masks} choices of what is
hidden, the same for all models. For one seed both models start from the same weights, and in each step see the same crops with
the same patches hidden. A difference stands out if it has the same sign for all seeds and its median exceeds the spread, which
is the largest less the smallest loss of one order over the seeds.

What a guess without any training loses on the same squares:

{guesses}

## What a patch sees

{sight}An order does not change how many patches are seen, but where they lie. Of its neighbours a patch sees in one layer, in at
least one head, on average over all patches:

{neighbours}

This is one photograph, one model and one pattern: it shows what an order can do, not what it does elsewhere. The attention alone
is given the order, `DilatedAttention(pattern, order=dilkit.order((rows, columns)))`; all else stays row-major.
Aligned segments of such a grid are squares along a Hilbert curve, but in plain tiles as well: `dilkit order` compares them.
"""

_INTERRUPTED = "\n**Interrupted while {}: this is what there was by then.**\n"


def write(results: dict[str, Any], out: Path, task: Task, sight: Sight, twins: Sequence[Twins]) -> list[str]:
    """Write report.json, report.md and, where matplotlib can be imported, the pictures. Returns what was not done."""
    undrawn = why_undrawn()
    drawn = [] if undrawn else [name for name in PICTURES if name == "sight.png" or (twins and twins[0].points)]
    save(results, out / "report.json")
    write_text(out / "report.md", markdown(results, drawn))
    for name in PICTURES:  # an earlier run's picture would not belong to this report
        (out / name).unlink(missing_ok=True)
    if undrawn:
        return [f"no pictures: {undrawn} (pip install 'dilkit[plot]')"]
    from dilkit.tools.demo.image import plots as demo_image_plots

    for name in drawn:
        if name == "loss.png":
            demo_image_plots.draw_loss(results, out / name)
        elif name == "sight.png":
            demo_image_plots.draw_sight(task, sight, out / name)
        else:
            demo_image_plots.draw_reconstruction(task, _best_trained(twins), out / name)
    return []


def _best_trained(twins: Sequence[Twins]) -> Twins:
    """The first pair that was trained to its end, or else the first."""
    return next((pair for pair in twins if pair.finished), twins[0])


def markdown(results: dict[str, Any], drawn: Sequence[str]) -> str:
    """The report as Markdown, with the pictures that are `drawn`."""
    shown = {name: f"![{alt}]({name})\n\n" if name in drawn else "" for name, alt in _ALT.items()}
    return _TEMPLATE.format(
        **results["environment"],
        date=results["date"],
        interrupted=_INTERRUPTED.format(results["interrupted"]) if results["interrupted"] else "",
        outcome=words.outcome(results),
        facts="\n".join(words.facts(results)),
        speed=words.speed(results),
        reconstruction=shown["reconstruction.png"],
        loss=shown["loss.png"],
        sight=shown["sight.png"],
        seeds="\n".join(markdown_table(words.seed_rows(results))),
        judged=results["training"]["judged_crops"],
        masks=results["training"]["masks"],
        guesses="\n".join(markdown_table(words.guess_rows(results))),
        neighbours="\n".join(markdown_table(words.sight_rows(results))),
    )


_ALT = {
    "reconstruction.png": "the held-out strip with hidden patches, and what the models make of it",
    "loss.png": "held-out loss against steps",
    "sight.png": "what one patch sees under each order",
}
