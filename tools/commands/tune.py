"""`dilkit tune`: which backend is the fastest here, for problems like yours; the automatic choice then goes by it."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dilkit import environment
from dilkit.device import Device, device_named
from dilkit.environment import BACKEND, backend_names
from dilkit.problem import Problem
from dilkit.selection import tuned, tuned_file
from dilkit.selection.tuned_file import TunedEntry, TunedKernel, TunedSetup, TunedShape
from dilkit.tools.commands.bench import SEQS
from dilkit.tools.commands.machine import devices
from dilkit.tools.console import arguments
from dilkit.tools.console.arguments import whole
from dilkit.tools.console.interrupt import INTERRUPTED, load_torch
from dilkit.tools.console.text import in_seconds, print_json, table, wrapped
from dilkit.tools.results.decode import decode
from dilkit.tools.results.file import read_json, read_result, write_text
from dilkit.tools.results.rows import ResultRow, RowsResult

if TYPE_CHECKING:
    from dilkit.tools.measure.case import CaseRunner

Measured = tuple[dict[str, Any], TunedShape | TunedKernel, dict[str, ResultRow]]
"""The measured case, for people; the key of the file; the result of each backend, or of each size of a kernel."""
HELP = """\
measure which backend is the fastest here, for the automatic choice to go by

Every backend that can compute the problem is checked against fp64 arithmetic, then timed with and without a backward pass. The
order by median time goes into the file of DILKIT_TUNED. The automatic choice follows it for problems of the same dtype, head_dim,
causality, pattern, mask or none, and length to the nearest power of two, on the same device with the same torch and dilkit; not
for packed sequences, caches or dropout. Another run adds to the file. Ctrl-C keeps what was measured so far. Exit code 1 when a
backend was wrong or failed, or none could be measured.

On a GPU other sizes of Triton's kernels are measured first, at the longest length. Those that are right and the fastest go into
the file too, and hold for their dtype and head_dim, without a bias."""

INSTEAD = ("show", "take")
PASSES = {"forward": (False,), "training": (True,), "both": (False, True)}
REPEATS = 7
BUDGET = 5.0
SIZES = 8
MIN_TIME = 0.02
"""Seconds that a sample lasts at least."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_pattern_arguments(parser, seq=None, seq_help=f"tokens (default {','.join(map(str, SEQS))})")
    arguments.add_call_arguments(parser, train=False)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--passes", choices=tuple(PASSES), default="both", help="calls to measure (default %(default)s)")
    arguments.add_backend_argument(group, "backends to measure (default: all)")
    add("--device", type=arguments.device_here, help="cpu, cuda, cuda:1, ... (default: the first GPU, else the CPU)")
    add("--repeats", type=whole(1), default=REPEATS, metavar="N", help="samples of each (default %(default)s)")
    budget = "seconds a call may take before its backend is left out (default %(default)g)"
    add("--budget", type=arguments.positive, default=BUDGET, metavar="S", help=budget)
    sizes = "other sizes of each of Triton's kernels to try; 0: none (default %(default)s)"
    add("--sizes", type=whole(0), default=SIZES, metavar="N", help=sizes)
    instead = parser.add_argument_group("in place of measuring").add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="show what was measured before")
    take = "take the sweep of `dilkit bench --suite preferences` out of its suite.json"
    instead.add_argument("--take", type=Path, metavar="FILE", help=take)


def run(args: Namespace) -> int:
    """Measure and write the file, or show it; exit codes as `HELP` says."""
    path = environment.tuned_file()
    if path is None:
        raise ValueError(f"{environment.TUNED.name}={environment.tuned()!r}: no file to keep orders in; name one, or unset it")
    instead = next((name for name in INSTEAD if getattr(args, name)), None)
    if instead is None:
        return _tune(args, path)
    for name, option in arguments.changed(args, add_arguments).items():
        if name not in INSTEAD:
            raise ValueError(f"{option}: does not go with --{instead}, which is about all orders of the file; leave it out")
    return _show(args, path) if args.show else _take(args, path)


def _print(args: Namespace, report: dict[str, object], lines: Iterable[str]) -> None:
    if args.json:
        print_json("tune", report)
    else:
        print("\n".join(lines))


def _tune(args: Namespace, path: Path) -> int:
    if (started := environment.launch()) is not None and started.size > 1:
        raise ValueError(f"{started.launcher} started {started.size} processes, which would disturb each other; start one")
    load_torch()
    device, seqs = device_named(args.device), sorted(set(args.seq or SEQS))
    posed = product(seqs, PASSES[args.passes])
    problems = [arguments.problem_of(Namespace(**{**vars(args), "seq": n, "train": train}), device) for n, train in posed]
    arguments.make_folder(environment.TUNED.name, path.parent)
    setup, overridden = tuned.setup_of(device), backend_names()
    outcomes: list[dict[str, Any]] = []
    interrupted = False
    kernels: list[dict[str, Any]] = []
    try:
        for what, shape, entries in chain(_kernels(args, problems), _measured(args, problems)):
            order = sorted(((name, one.median_s) for name, one in entries.items() if one.samples), key=lambda pair: pair[1])
            left_out = [dict(backend=n, verdict=e.verdict, reasons=e.reasons) for n, e in entries.items() if not e.samples]
            measured = [dict(backend=name, seconds=seconds) for name, seconds in order]
            (kernels if "role" in what else outcomes).append(what | dict(order=measured, left_out=left_out))
            if order:
                _keep(path, [TunedEntry(setup, shape, tuple(order))])
    except KeyboardInterrupt:
        interrupted = True
    lines = [f"on {setup}", "", *(line for one in (*kernels, *outcomes) for line in _lines(one))]
    lines += ["interrupted; what was measured before is kept"] * interrupted
    if overridden:
        lines.append(f"{BACKEND.name}={','.join(overridden)} is set, and wins over what was measured")
    any_order = any(one["order"] for one in outcomes)
    lines.append(f"the automatic choice goes by {path}" if any_order else "no backend was measured; the file is as it was")
    report = dict(file=str(path), setup=str(setup), overridden=overridden, interrupted=interrupted)
    report |= dict(problems=outcomes, kernels=kernels)
    _print(args, report, lines)
    if interrupted:
        return INTERRUPTED
    verdicts = {backend["verdict"] for one in outcomes for backend in one["left_out"]}
    return 1 if {"wrong", "failed"} & verdicts or not all(one["order"] for one in outcomes) else 0


def _lines(one: Mapping[str, Any]) -> list[str]:
    rows = [(backend["backend"], in_seconds(backend["seconds"])) for backend in one["order"]]
    rows += [(backend["backend"], "\n".join((backend["verdict"], *backend["reasons"]))) for backend in one["left_out"]]
    return [*wrapped("", one["problem"]), *table(rows), ""]


def _measured(args: Namespace, problems: list[Problem]) -> Iterator[Measured]:
    from dilkit.tools.console.progress import progress

    runners = [_runner(args, args.backend) for _ in ("forward", "training")]
    with progress(problems, unit="problem") as bar:
        for problem in bar:
            bar.set_description(f"{'training' if problem.requires_grad else 'forward'}, {problem.seq:,} tokens")
            what = dict(problem=str(problem), seq=problem.seq, requires_grad=problem.requires_grad)
            yield what, tuned.shape_of(problem), runners[problem.requires_grad].run(problem)["entries"]


def _kernels(args: Namespace, problems: list[Problem]) -> Iterator[Measured]:
    """Measure other sizes of Triton's kernels for the longest problem of each pass; yield no role where there is no GPU."""
    from dilkit.backends.triton.backend import TUNED_ROLES, compiler
    from dilkit.tools.measure import triton_sizes
    from dilkit.tools.measure.implementation import backend_implementations

    if not args.sizes or "triton" not in (args.backend or ("triton",)):
        return
    for problem in problems[-len(PASSES[args.passes]) :]:
        if reasons := backend_implementations(["triton"])[0].refusals(problem):
            what = dict(problem="other sizes of Triton's kernels", role="")
            yield what, tuned.shape_of(problem), dict(triton=ResultRow(verdict="refused", reasons=tuple(reasons)))
            return
        for role in TUNED_ROLES[1:] if problem.requires_grad else TUNED_ROLES[:1]:
            with triton_sizes.registered(role, problem, args.sizes) as sizes:
                entries = _runner(args, [*sizes]).run(problem)["entries"]
            kernel = TunedKernel(compiler(), role, problem.dtype, problem.head_dim)
            what = dict(problem=f"{kernel}, {problem.seq:,} tokens", role=role)
            yield what, kernel, {sizes[name]: entry for name, entry in entries.items()}


def _runner(args: Namespace, names: Sequence[str] | None) -> CaseRunner:
    from dilkit.tools.measure.case import CaseRunner
    from dilkit.tools.measure.implementation import backend_implementations

    return CaseRunner(backend_implementations(names), args.repeats, MIN_TIME, args.budget, matmul_dtype="")


def _keep(path: Path, new: Sequence[TunedEntry]) -> None:
    """Put orders into the file, in place of earlier ones for the same keys; in place of a file that cannot be read, too."""
    try:
        earlier = tuned_file.load(path)
    except tuned_file.TunedError as error:
        print(f"{error}; it is written anew", file=sys.stderr)
        earlier = ()
    keys = {(entry.setup, entry.shape) for entry in new}
    write_text(path, tuned_file.to_text([*(e for e in earlier if (e.setup, e.shape) not in keys), *new]))
    tuned.read_again()


def _take(args: Namespace, path: Path) -> int:
    result = read_result(args.take, RowsResult, read_json(args.take)["kind"])
    if result.quick:
        raise ValueError(f"--take: {args.take} is of a quick run, whose problems are no real ones; give that of a whole one")
    place = result.environment
    setup = TunedSetup(place.device, place.device_name, place.capability or "none", place.torch, place.dilkit)
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
    report = [dict(setup=str(e.setup), holds=e.setup in here, **vars(e.shape), seconds=dict(e.seconds)) for e in entries]
    lines = [f"{path}: {len(entries) or 'no'} orders"]
    for setup in dict.fromkeys(entry.setup for entry in entries):
        lines += ["", f"{setup}{'' if setup in here else ' (does not hold here)'}"]
        lines += table(_row(entry) for entry in entries if entry.setup == setup)
    _print(args, dict(file=str(path), entries=report), lines)
    return 0


def _row(entry: TunedEntry) -> tuple[str, str]:
    shape, times = entry.shape, ", ".join(f"{name} {in_seconds(taken)}" for name, taken in entry.seconds)
    if isinstance(shape, TunedKernel):
        return str(shape), times
    flags = dict(causal=shape.is_causal, training=shape.requires_grad, masked=shape.key_padding_mask, packed=shape.varlen)
    flags |= dict(cached=shape.kv_cache, dropout=shape.dropout)
    features = "".join(f", {name}" for name, value in flags.items() if value)
    return f"{shape.seq:,} tokens, {shape.branches}, {shape.dtype} x {shape.head_dim}{features}", times
