"""`dilkit tune`: which backend is the fastest here, for problems like yours; the automatic choice then goes by it."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dilkit import environment
from dilkit.device import Device, device_named
from dilkit.environment import BACKEND, backend_names
from dilkit.problem import Problem
from dilkit.selection import tuned, tuned_file
from dilkit.selection.preference_table import table_preference
from dilkit.selection.tuned_file import Seconds, TunedEntry, TunedSetup, TunedShape
from dilkit.tools.commands.bench import SEQS
from dilkit.tools.commands.facts import devices
from dilkit.tools.console import arguments
from dilkit.tools.console.arguments import whole
from dilkit.tools.console.interrupt import INTERRUPTED, load_torch
from dilkit.tools.console.text import in_seconds, print_json, table
from dilkit.tools.results.decode import decode
from dilkit.tools.results.file import read_json, read_result, write_text
from dilkit.tools.results.record import Entry
from dilkit.tools.results.rows import RowsResult

HELP = """\
measure which backend is the fastest here, for the automatic choice to go by

Every backend that can compute the problem is checked against fp64 arithmetic, then timed in interleaved rounds: calls without
a backward pass, and calls with one. The order by median time goes into a file, DILKIT_TUNED says which. The automatic choice
goes by it for problems of the same dtype, head_dim, causality, pattern and, to the nearest power of two, length, with a key
padding mask or without, on the same device with the same torch and dilkit; not for packed sequences, caches or dropout.
Other problems are measured by another run, which adds to the file. Ctrl-C keeps what was measured so far. Exit code 1 when a
backend was wrong or failed, or none could be measured."""

INSTEAD = ("show", "take", "clear")
PASSES = {"forward": (False,), "training": (True,), "both": (False, True)}
REPEATS = 7
BUDGET = 5.0
MIN_TIME = 0.02
"""Seconds that a sample lasts at least."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    arguments.add_pattern_arguments(parser, seq=None, seq_help=f"tokens (default {','.join(map(str, SEQS))})")
    arguments.add_call_arguments(parser, train=False)
    group = parser.add_argument_group("measuring")
    group.add_argument("--seqs", type=arguments.numbers, metavar="N,N", help="several lengths in place of the one of --seq")
    group.add_argument("--passes", choices=tuple(PASSES), default="both", help="calls to measure (default %(default)s)")
    arguments.add_backend_argument(group, "backends to measure (default: all)")
    where = "cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)"
    group.add_argument("--device", type=arguments.device_here, help=where)
    group.add_argument("--repeats", type=whole(1), default=REPEATS, metavar="N", help="samples of each (default %(default)s)")
    spent = "seconds a call may take before its backend is left out (default %(default)g)"
    group.add_argument("--budget", type=arguments.positive, default=BUDGET, metavar="S", help=spent)
    instead = parser.add_argument_group("the file").add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="measure nothing: show what was measured before")
    take = "measure nothing: take the sweep of `dilkit bench --suite preferences`, out of its suite.json"
    instead.add_argument("--take", type=Path, metavar="FILE", help=take)
    instead.add_argument("--clear", action="store_true", help="measure nothing: remove the file")


def run(args: Namespace) -> int:
    """Measure and write the file, or show it, or remove it; exit codes as `HELP` says."""
    path = environment.tuned_file()
    if path is None:
        raise ValueError(f"{environment.TUNED.name}={environment.tuned()!r}: no file to keep orders in; name one, or unset it")
    if instead := next((name for name in INSTEAD if getattr(args, name)), ""):
        _check_alone(args, f"--{instead}")
    if args.clear:
        return _clear(args, path)
    if args.take:
        return _take(args, path)
    return _show(args, path) if args.show else _tune(args, path)


def _check_alone(args: Namespace, instead: str) -> None:
    """Raise ValueError for an option that says what to measure: `instead` of measuring, all orders are shown or removed."""
    for name, option in arguments.changed(args, add_arguments).items():
        if name not in INSTEAD:
            raise ValueError(f"{option}: does not go with {instead}, which is about all orders of the file; leave it out")


def _tune(args: Namespace, path: Path) -> int:
    if args.seq and args.seqs:
        raise ValueError(f"--seqs: does not go with --seq {args.seq}; put that length into --seqs too")
    if (started := environment.launch()) is not None and started.size > 1:
        raise ValueError(f"{started.launcher} started {started.size} processes, which would disturb each other; start one")
    load_torch()
    posed = _problems(args)
    arguments.make_folder(environment.TUNED.name, path.parent)
    measured: list[Found] = []
    interrupted = False
    try:
        for found in _measured(args, posed):
            measured.append(found)
            if found.order:
                _keep(path, [TunedEntry(tuned.setup_of(found.problem.device), tuned.shape_of(found.problem), found.order)])
    except KeyboardInterrupt:
        interrupted = True
    setup = str(tuned.setup_of(posed[0].device))
    plain = dict(file=str(path), setup=setup, overridden=environment.backend_names(), problems=[m.to_dict() for m in measured])
    text = (f"on {setup}", "", *lines(path, measured, interrupted))
    _print(args, plain | dict(interrupted=interrupted), text)
    if interrupted:
        return INTERRUPTED
    verdicts = {entry.verdict for found in measured for entry in found.entries.values()}
    return 1 if {"wrong", "failed"} & verdicts or not all(found.order for found in measured) else 0


def _print(args: Namespace, plain: dict[str, object], lines: Iterable[str]) -> None:
    if args.json:
        print_json("tune", plain)
    else:
        print("\n".join(lines))


def _problems(args: Namespace) -> list[Problem]:
    """What is to be measured, the shortest first: each length once or twice, without and with a backward pass."""
    device, seqs = device_named(args.device), sorted({args.seq} if args.seq else set(args.seqs or SEQS))
    posed = product(seqs, PASSES[args.passes])
    return [arguments.problem_of(Namespace(**{**vars(args), "seq": n, "train": train}), device) for n, train in posed]


def _measured(args: Namespace, posed: list[Problem]) -> Iterator[Found]:
    """What became of each problem."""
    from tqdm import tqdm

    from dilkit.tools.measure.case import CaseRunner
    from dilkit.tools.measure.implementation import backend_implementations

    implementations = backend_implementations(args.backend)
    runners = [CaseRunner(implementations, args.repeats, MIN_TIME, args.budget) for _ in ("forward", "training")]
    with tqdm(posed, unit="problem", file=sys.stderr, disable=None) as bar:
        for problem in bar:
            runner, passes = runners[problem.requires_grad], "training" if problem.requires_grad else "forward"
            runner.say = partial(_say, bar, passes)
            yield Found(problem, runner.run(problem)["entries"])


def _say(bar: Any, title: str, text: str) -> None:
    bar.set_description(f"{title}: {text}")


def _keep(path: Path, new: Sequence[TunedEntry]) -> None:
    """Put orders into the file, in place of earlier ones for the same keys; in place of a file that cannot be read, too."""
    try:
        kept = tuned_file.load(path)
    except tuned_file.TunedError as error:
        print(f"{error}; it is written anew", file=sys.stderr)
        kept = ()
    keys = {(entry.setup, entry.shape) for entry in new}
    write_text(path, tuned_file.to_text([*(e for e in kept if (e.setup, e.shape) not in keys), *new]))
    tuned.read_again()


def _take(args: Namespace, path: Path) -> int:
    """Keep the orders of a sweep."""
    result = read_result(args.take, RowsResult, read_json(args.take)["kind"])
    if result.quick:
        raise ValueError(f"--take: {args.take} is of a quick run, whose problems are no real ones; give that of a whole one")
    at = result.environment
    setup = TunedSetup(at.device, at.device_name, at.capability or "none", at.torch, at.dilkit)
    entries = []
    for case in result.cases("sweep"):
        choice = case.rows.get("automatic")
        shape = decode(TunedShape, choice and choice.values.get("shape"), f"{args.take}: shape")
        times = sorted(((name, row.median_s) for name, row in case.rows.items() if row.samples), key=lambda pair: pair[1])
        entries += [TunedEntry(setup, shape, tuple(times))] if times else []
    if not entries:
        raise ValueError(f"--take: {args.take} has no sweep; `dilkit bench --suite preferences` measures it")
    arguments.make_folder(environment.TUNED.name, path.parent)
    _keep(path, entries)
    text = f"{len(entries)} orders of {setup} taken; the automatic choice goes by {path}"
    _print(args, dict(file=str(path), setup=str(setup), taken=len(entries)), [text])
    return 0


def _show(args: Namespace, path: Path) -> int:
    entries = tuned_file.load(path)
    here = {tuned.setup_of(device) for device in devices() if isinstance(device, Device)}
    plain = [dict(setup=str(e.setup), holds=e.setup in here, **vars(e.shape), seconds=dict(e.seconds)) for e in entries]
    text = (f"{path}: {len(entries) or 'no'} orders", *listed(entries, here))
    _print(args, dict(file=str(path), entries=plain), text)
    return 0


def _clear(args: Namespace, path: Path) -> int:
    there = path.exists()
    path.unlink(missing_ok=True)
    tuned.read_again()
    _print(args, dict(file=str(path), removed=there), [f"{'removed' if there else 'there is no file'} {path}"])
    return 0


@dataclass(frozen=True)
class Found:
    """What became of every backend on one problem."""

    problem: Problem
    entries: dict[str, Entry]

    @property
    def order(self) -> Seconds:
        """Those that were measured, each with its median seconds a call, the fastest first."""
        times = [(name, entry.time.median_s) for name, entry in self.entries.items() if entry.time]
        return tuple(sorted(times, key=lambda pair: pair[1]))

    @property
    def left_out(self) -> dict[str, Entry]:
        """Those that were not."""
        return {name: entry for name, entry in self.entries.items() if not entry.time}

    @property
    def by_table(self) -> list[str]:
        """The order in which those that were measured would come without being measured."""
        return [name for name in table_preference(self.problem).order if name in dict(self.order)]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        order = [dict(backend=name, seconds=seconds) for name, seconds in self.order]
        left_out = [dict(backend=name, verdict=e.verdict, reasons=e.reasons) for name, e in self.left_out.items()]
        call = dict(problem=str(self.problem), seq=self.problem.seq, requires_grad=self.problem.requires_grad)
        return dict(**call, order=order, left_out=left_out, by_table=self.by_table)


def lines(path: Path, problems: Sequence[Found], interrupted: bool) -> Iterator[str]:
    """For each problem the backends in the order found, then those left out."""
    for found in problems:
        yield from (*table([(str(found.problem),)], indent=0), *table(_rows(found)), "")
    if interrupted:
        yield "interrupted; what was measured before is kept"
    if names := backend_names():
        yield f"{BACKEND.name}={','.join(names)} is set, and wins over what was measured"
    kept = any(found.order for found in problems)
    yield f"the automatic choice goes by {path}" if kept else "no backend was measured; the file is as it was"


def _rows(found: Found) -> Iterator[tuple[str, str, str]]:
    """Of the first it is said whether it would have been picked anyway."""
    for i, (name, seconds) in enumerate(found.order):
        note = "" if i or found.by_table[:1] in ([], [name]) else f"unmeasured, it would have been {found.by_table[0]}"
        yield name, in_seconds(seconds), note
    yield from ((name, entry.verdict, "\n".join(entry.reasons)) for name, entry in found.left_out.items())


def listed(entries: Sequence[TunedEntry], here: Collection[TunedSetup]) -> Iterator[str]:
    """What a file holds, setup by setup; `here` are the setups of this machine."""
    for setup in dict.fromkeys(entry.setup for entry in entries):
        yield from ("", f"{setup}{'' if setup in here else ' (does not hold here)'}")
        yield from table(_row(entry) for entry in entries if entry.setup == setup)


def _row(entry: TunedEntry) -> tuple[str, str]:
    shape = entry.shape
    said = dict(causal=shape.is_causal, training=shape.requires_grad, masked=shape.key_padding_mask, packed=shape.varlen)
    said |= dict(cached=shape.kv_cache, dropout=shape.dropout)
    flags = "".join(f", {name}" for name, there in said.items() if there)
    times = ", ".join(f"{name} {in_seconds(taken)}" for name, taken in entry.seconds)
    return f"{shape.seq:,} tokens, {shape.branches}, {shape.dtype} x {shape.head_dim}{flags}", times
