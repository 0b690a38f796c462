"""The demo's report: report.json, report.md and the pictures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from dilkit.tools.demo.text import words as demo_words
from dilkit.tools.results.untyped import save, write_text

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

{measured}
{notes}"""

_ATTENTION = """\
## Dilated against dense attention

{scaling_head}

{scaling}"""

_RANKS = """\
## Over {world_size} ranks

Every window is cut into {world_size} parts, one a rank ({transport}); all ranks hold all of the text and of the model.
What is learnt is what one rank learns, up to rounding. Attention alone is measured without ranks: `dilkit demo` without `--comm`.

| rank | bytes of a window of {context:,} | {windows} | peak extra memory, MiB |
|---:|---:|{rule}---:|
{rows}

A step sends rows of queries, keys, values, results and their gradients for the attention, and sums of parameters' gradients.
Memory is that {memory_of}, at its peak, beyond what was held before the model was made."""

_SCALING = """\
{picture}| tokens | dilated, ms | dense, ms | speedup | dilated, MiB | dense, MiB | |
|---:|---:|---:|---:|---:|---:|:---|
{rows}

Time is the median of 5 calls taken in turns (of one where it is long), memory the peak beyond what was held before the call.
Neither holds a score matrix; the dilated one merges its branches, and holds one branch's result and gradients beside the sum."""

_INTERRUPTED = "\n**Interrupted while {}: this is what there was by then.**\n"


def write(results: dict[str, Any], out: Path, draw: bool = True) -> list[str]:
    """Write report.json, report.md and, where matplotlib can be imported, loss.png and scaling.png. Returns what was not done."""
    undrawn = why_undrawn() if draw else "not yet drawn"
    save(results, out / "report.json")
    write_text(out / "report.md", markdown(results, drawn=not undrawn))
    if undrawn:
        return [f"no pictures: {undrawn} (pip install 'dilkit[plot]')"]
    from dilkit.tools.demo.text import plots as demo_plots

    demo_plots.draw_loss(results, out / "loss.png")
    if results["scaling"]["rows"]:
        demo_plots.draw_scaling(results, out / "scaling.png")
    else:  # an earlier run's picture would not belong to this report
        (out / "scaling.png").unlink(missing_ok=True)
    return []


def why_undrawn() -> str:
    """What keeps matplotlib from being imported; empty when nothing does."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        return str(error)
    return ""


def markdown(results: dict[str, Any], drawn: bool) -> str:
    """The report as Markdown, with the pictures if they are `drawn`."""
    training, scaling = results["training"], results["scaling"]
    note = (results.get("ranks") or scaling)["memory_note"]
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
        measured=_ranks(results) if results.get("ranks") else _attention(scaling, drawn),
        notes=f"\nMemory was not measured: {note}\n" if note else "",
    )


def _ranks(results: dict[str, Any]) -> str:
    """Who holds and sends how much."""
    ranks, windows = results["ranks"], demo_words.rank_columns(results)
    return _RANKS.format(
        **ranks,
        context=results["model"]["context"],
        windows=" | ".join(f"sent in a step on {seq:,} bytes: attention + gradients, KiB" for seq in windows) or "sent",
        rule="---:|" * max(len(windows), 1),
        rows="\n".join(f"| {' | '.join(demo_words.rank_cells(results, fact))} |" for fact in ranks["by_rank"]),
        memory_of=demo_words.memory_of(results),
    )


def _attention(scaling: dict[str, Any], drawn: bool) -> str:
    head = "\n".join(demo_words.scaling_subject(scaling))
    return _ATTENTION.format(scaling_head=head, scaling=_scaling(scaling["rows"], drawn))


def _scaling(rows: list[dict[str, Any]], drawn: bool) -> str:
    """The table of times and memory, after its picture if that is `drawn`."""
    if not rows:
        return "Nothing was measured."
    picture = "![time and memory against length](scaling.png)\n\n" if drawn else ""
    return _SCALING.format(picture=picture, rows="\n".join(map(demo_words.markdown_row, rows)))
