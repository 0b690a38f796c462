"""The demo's report: report.json, report.md and the pictures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dilkit.tools import demo_words
from dilkit.tools.results import save, write_text

_TEMPLATE = """\
# dilkit demo
{interrupted}
A byte-level language model of dilated attention, trained on text and judged on files that it has never seen.

{outcome}

```text
{facts}
```

{device_name}, {threads} threads; Python {python}, torch {torch}, dilkit {dilkit}; {date}.
Held-out bits per byte are the mean over {held_out_windows} windows of {window_bytes:,} bytes of the held-out files.

## Training

Windows: {curriculum}.

{loss}| seconds | bytes trained on | training, bits per byte | held out, bits per byte |
|---:|---:|---:|---:|
{points}

## Dilated against dense attention

{scaling_head}

{scaling}
{notes}"""

_SCALING = """\
{picture}| tokens | dilated, ms | dense, ms | speedup | dilated, MiB | dense, MiB | |
|---:|---:|---:|---:|---:|---:|:---|
{rows}

Time is the median of 5 calls taken in turns (of one where it is long), memory the peak beyond what was held before the call.
Neither holds a score matrix; the dilated one merges its branches, and holds one branch's result and gradients beside the sum."""

_INTERRUPTED = "\n**Interrupted while {}: this is what there was by then.**\n"


def write(results: dict[str, Any], out: Path) -> list[str]:
    """Write report.json, report.md and, where matplotlib can be imported, loss.png and scaling.png. Returns what was not done."""
    undrawn = _why_undrawn()
    save(results, out / "report.json")
    write_text(out / "report.md", markdown(results, drawn=not undrawn))
    if undrawn:
        return [f"no pictures: {undrawn} (pip install 'dilkit[plot]')"]
    from dilkit.tools import demo_plots

    demo_plots.draw_loss(results, out / "loss.png")
    if results["scaling"]["rows"]:
        demo_plots.draw_scaling(results, out / "scaling.png")
    else:  # an earlier run's picture would not belong to this report
        (out / "scaling.png").unlink(missing_ok=True)
    return []


def _why_undrawn() -> str:
    """What keeps matplotlib from being imported; empty when nothing does."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        return str(error)
    return ""


def markdown(results: dict[str, Any], drawn: bool) -> str:
    """The report as Markdown, with the pictures if they are `drawn`."""
    training, scaling = results["training"], results["scaling"]
    notes = [scaling["memory_note"]] if scaling["memory_note"] else []
    return _TEMPLATE.format(
        **results["environment"],
        date=results["date"],
        interrupted=_INTERRUPTED.format(results["interrupted"]) if results["interrupted"] else "",
        outcome=f"**{demo_words.outcome(results)}**",
        facts="\n".join(demo_words.facts(results)),
        curriculum=demo_words.curriculum(results),
        held_out_windows=training["held_out_windows"],
        window_bytes=training["window_bytes"],
        loss="![bits per byte against time](loss.png)\n\n" if drawn else "",
        points="\n".join(map(demo_words.markdown_point, training["points"])),
        scaling_head="\n".join(demo_words.scaling_subject(scaling)),
        scaling=_scaling(scaling["rows"], drawn),
        notes="".join(f"\nMemory was not measured: {note}\n" for note in notes),
    )


def _scaling(rows: list[dict[str, Any]], drawn: bool) -> str:
    """The table of times and memory, after its picture if that is `drawn`."""
    if not rows:
        return "Nothing was measured."
    picture = "![time and memory against length](scaling.png)\n\n" if drawn else ""
    return _SCALING.format(picture=picture, rows="\n".join(map(demo_words.markdown_row, rows)))
