"""What `dilkit encode-slide` prints: the slides before it starts, and what became of them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dilkit.integrations.gigapath.cohort.manifest import SlideRecord
from dilkit.integrations.gigapath.cohort.run import Plan
from dilkit.tools.commands.encode_slide.task import Outcome, Task
from dilkit.tools.console.text import print_json, table

UNSAID_POOLING = (
    "--global-pool is not given: the class token is pooled, which GigaPath's pretraining did not train; --global-pool takes "
    "the mean of the tiles, --no-global-pool suits weights that were tuned with the class token"
)


def show(args: argparse.Namespace, plan: Plan) -> None:
    """Print the slides with their tiles and tile sizes, and how much there is to do; nothing where programs read the output."""
    if args.json:
        return
    kept = {record.output for record in plan.kept}
    rows = [("slide", "tiles", "tile size", "")]
    for slide in plan.slides:
        size = f"{slide.tile_size} ({slide.tile_size_from})"
        rows.append((slide.path.name, f"{slide.tiles:,}", size, "kept" if slide.output.name in kept else "to embed"))
    print("\n".join(table(rows)))
    print(f"{len(plan.slides) - len(kept)} of {len(plan.slides)} slides to embed, {plan.tiles:,} tiles", flush=True)


def report(args: argparse.Namespace, task: Task, unread: Sequence[Path], plan: Plan, outcome: Outcome) -> int:
    """Print what became of all slides; the exit code, 1 where one would not do."""
    records = {one.output: (one, kept) for ones, kept in ((plan.kept, True), (outcome.records, False)) for one in ones}
    slides = [records[slide.output.name] for slide in plan.slides if slide.output.name in records]
    refused = sorted([*plan.refused, *outcome.refused], key=lambda one: str(one.path))
    if args.json:
        model = task.job.model
        facts = dict(arch=model.arch, device=args.device, dtype=model.dtype, pooling=model.pooling)
        reasons = [dict(features=str(one.path), reason=one.reason) for one in refused]
        shown = [_shown(args.out, *one) for one in slides]
        print_json("encode-slide", {**facts, "slides": shown, "refused": reasons, "not_read": list(map(str, unread))})
    else:
        new = len(outcome.records)
        kept = f", kept {len(plan.kept)}" if plan.kept else ""
        print(f"wrote {new} embedding{'s' * (new != 1)} to {args.out}{kept}{_sizes([record for record, _ in slides])}")
    notes = [UNSAID_POOLING] if task.is_pooling_open else []
    notes += [f"{path} is no file of features, and is not read" for path in unread]
    notes += [f"{record.file}: {text}" for record, _ in slides for text in record.warnings]
    for note in (*notes, *(one.reason for one in refused)):
        print(f"dilkit encode-slide: {note}", file=sys.stderr)
    return 1 if refused else 0


def _shown(out: Path, record: SlideRecord, kept: bool) -> dict[str, object]:
    """A slide for programs."""
    size = dict(tile_size=record.tile_size, tile_size_from=record.tile_size_from)
    maps = [str(out / name) for name in record.maps]
    where = dict(features=record.file, out=str(out / record.output), maps=maps, kept=kept)
    return {**where, "tiles": record.tiles, **size, "warnings": list(record.warnings)}


def _sizes(records: Sequence[SlideRecord]) -> str:
    """How large the tiles of the slides were taken to be, who says so, and of how many slides."""
    sizes = Counter((record.tile_size, record.tile_size_from) for record in records)
    return "".join(f"; {slides} with tiles of {size} pixels ({whence})" for (size, whence), slides in sizes.items())
