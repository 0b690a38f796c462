"""`dilkit compare OLD NEW`: what got slower or faster between two result files, measurement by measurement."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from dilkit.checks import visible
from dilkit.tools.console.arguments import number
from dilkit.tools.console.text import aligned, in_seconds, print_json
from dilkit.tools.results.comparison import FASTER, FEW, SAME, Comparison, Measured
from dilkit.tools.results.comparison import compare as compared
from dilkit.tools.results.file import ResultError

HELP = "compare two result files: exit code 1 if something got slower beyond noise"
MARGIN = 0.05
"""What runs of the same code differ by on the same machine, beyond what the samples of one run show."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD", help="the JSON file of the earlier run")
    parser.add_argument("new", type=Path, metavar="NEW", help="the JSON file of the later run, of the same kind")
    parser.add_argument(
        "--margin",
        type=number("a share from 0 to 10, such as 0.05 for 5%", lambda value: 0 <= value <= 10),
        default=MARGIN,
        metavar="SHARE",
        help="a change counts where all of the ratio's 95%% interval is beyond 1 + SHARE, or below 1 / (1 + SHARE) "
        "(default %(default)s: what runs of the same code differ by)",
    )
    parser.add_argument("--all", action="store_true", help="also the measurements that did not change")


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 where something got slower beyond noise, else 0. Raises `ResultError`."""
    new = load(args.new)
    old = load(args.old)
    _check_alike(args, old, new)
    comparison = compared(old, new, args.margin)
    if args.json:
        report = asdict(comparison) | dict(regressions=len(comparison.regressions), margin=args.margin)
        print_json("compare", dict(old=visible(str(args.old)), new=visible(str(args.new)), **report))
    else:
        print("\n".join(_lines(comparison, args)))
    return 1 if comparison.regressions else 0


def load(path: Path) -> Measured:
    """The measurements of a file. Raises `ResultError`."""
    from dilkit.tools.report import registry  # as in `dilkit report`

    measured = Measured.of(registry.read(path))
    if not measured.found:
        raise ResultError(path, f"a result of kind {measured.kind!r} without samples: nothing in it can be compared")
    return measured


def _check_alike(args: argparse.Namespace, old: Measured, new: Measured) -> None:
    if old.kind != new.kind:
        raise ResultError(args.new, f"a result of kind {new.kind!r}, {args.old} is of {old.kind!r}; compare two of a kind")
    if old.quick != new.quick:
        how = "with another --quick" if old.quick and new.quick else "with --quick" if new.quick else "without --quick"
        raise ResultError(args.new, f"made {how}, unlike {args.old}: other lengths; run the same command for both")
    if not old.found.keys() & new.found.keys():
        raise ResultError(args.new, f"measures nothing that {args.old} measures; run the same command for both")


def _lines(found: Comparison, args: argparse.Namespace) -> list[str]:
    rows = [("new / old", "95% interval", "old", "new", "", "what")]
    for c in (c for c in found.changes if args.all or c.verdict != SAME):
        interval = "-" if c.verdict == FEW else f"{c.interval[0]:.3f} - {c.interval[1]:.3f}"
        rows.append((f"{c.ratio:.3f}", interval, in_seconds(c.old), in_seconds(c.new), c.verdict, c.what))
    text = [visible(f"old: {args.old}"), visible(f"new: {args.new}")]
    text += [f"{name} differs: {a} -> {b}" for name, a, b in found.differences]
    text += ["", *aligned(rows)] if len(rows) > 1 else []
    for name, only in (("old", found.only_old), ("new", found.only_new)):
        text += ["", f"only in {name}:", *(f"  {what}" for what in only)] if only else []
    faster, same = (sum(c.verdict == verdict for c in found.changes) for verdict in (FASTER, SAME))
    counts = f"{len(found.changes)} measurements in both: {len(found.regressions)} slower, {faster} faster"
    return [*text, "", f"{counts}, {same} without a change beyond noise (margin {args.margin:.0%})"]
