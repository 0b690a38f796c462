"""`dilkit bench`: who computes a pattern how fast, in how much memory, at which lengths."""

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path

from dilkit import environment
from dilkit.device import device_named
from dilkit.problem import Problem
from dilkit.tools.bench import suites
from dilkit.tools.commands import compare
from dilkit.tools.console import arguments
from dilkit.tools.console.arguments import names, whole
from dilkit.tools.console.interrupt import INTERRUPTED, load_torch

HELP = """\
measure time and memory of backends over lengths, each checked first

Every implementation is checked against fp64 arithmetic, then timed in interleaved rounds, beside a matmul of the same run.
Writes bench.json, bench.md and bench.png (overhead.* with --overhead, suite.* with --suite) into --out, in place of earlier ones.
Ctrl-C keeps what was measured so far. Exit code 1 when an implementation was wrong or failed, or a backend of --backend was
measured at no length."""

SEQS = (2048, 4096, 8192, 16384)
PEERS = ("gather", "dense", "flex")
"""The names of `BASELINES`, known without torch."""
REPEATS, OVERHEAD_REPEATS, BUDGET = 7, 201, 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    arguments.add_pattern_arguments(parser, seq=None, seq_help=f"tokens (default {','.join(map(str, SEQS))}; 16 with --overhead)")
    arguments.add_call_arguments(parser)
    group = parser.add_argument_group("measuring")
    add = group.add_argument
    add("--backward", action="store_true", dest="train", help="the same as --train")
    help = "backends to measure (default: DILKIT_BACKEND's, else all)"
    add("--backend", type=names(), metavar="A,B", help=help)  # suites know more
    peers = f"measure beside them, or all of: {', '.join(PEERS)}"
    add("--baseline", "--peers", type=names(lambda: (*PEERS, "all")), default=(), metavar="A,B", help=peers)
    add("--device", type=arguments.device_here, default="cpu", help="cpu, cuda, cuda:1, ... (default %(default)s)")
    repeats = f"samples of each implementation (default {REPEATS}; {OVERHEAD_REPEATS} with --overhead)"
    add("--repeats", type=whole(1), metavar="N", help=repeats)
    add("--budget", type=arguments.positive, metavar="S", help="seconds a call may take before it is left out (default 20)")
    add("--out", type=Path, default=Path("dilkit-bench"), metavar="DIR", help="folder of the results (default %(default)s)")
    add("--overhead", action="store_true", help="what a call costs over calling its backend directly (16 tokens)")
    add("--suite", choices=tuple(sorted(suites.SUITES)), help="measurements with targets, in a checkout; half an hour at most")
    add("--quick", action="store_true", help="the suite at a small part of its lengths, to see that it works")
    rows = "suite gpu: only the steps whose names have all of these words, as in bfloat16,backward; --backend goes with it"
    add("--rows", type=names(), metavar="A,B", help=rows)
    add("--resume", action="store_true", help="go on with the suite's interrupted run in --out")
    add("--against", type=Path, metavar="FILE", help="compare with an earlier run's file, as `dilkit compare` does")


def run(args: Namespace) -> int:
    """Measure, write the files and print the tables; 0, 130 when interrupted, else 1 when an implementation was wrong or failed.

    1 also when a backend that --backend names was measured at no length, or when nothing was.
    """
    suite, new = None, args.out / ("suite.json" if args.suite else "bench.json")
    if args.suite:
        load_torch()
        suite = suites.suite(args.suite)
    if args.against:
        kind = suite.kind() if suite else "bench"
        if (earlier := compare.load(args.against)[0].kind) != kind:
            raise ValueError(f"--against {args.against}: a result of kind {earlier!r}; one of {kind!r} is needed")
        if args.against.resolve() == new.resolve():
            raise ValueError(f"--against {args.against}: this run overwrites that file; choose another folder with --out")
        if args.json:
            raise ValueError(f"--against: does not go with --json; run dilkit compare --json {args.against} {new}")
    if suite:
        from dilkit.tools.bench import run as suite_run

        code = suite_run.run(suite(), args, arguments.changed(args, add_arguments))
    else:
        code = _one_pattern(args)
    if code == INTERRUPTED or not args.against:
        return code
    return max(code, compare.run(Namespace(old=args.against, new=new, margin=compare.MARGIN, all=False, json=False)))


def _one_pattern(args: Namespace) -> int:
    _leave_out(args, "goes with --suite alone", "quick", "rows", "resume")
    if (started := environment.launch()) and started.size > 1:
        why = "processes, which would all do the same; start it without"
        raise ValueError(f"{started.launcher} started {started.size} {why} {started.launcher}")
    lengths = sorted(set(args.seq or ((16,) if args.overhead else SEQS)))
    problem = arguments.problem_of(Namespace(**{**vars(args), "seq": lengths[-1]}), device_named(args.device))
    return _overhead(args, problem) if args.overhead else _lengths(args, problem, lengths)


def _leave_out(args: Namespace, why: str, *options: str) -> None:
    for name in options:
        if getattr(args, name):
            raise ValueError(f"--{'backward' if name == 'train' else name}: {why}; leave it out")


def _overhead(args: Namespace, problem: Problem) -> int:
    why = "does not go with --overhead, which compares one backend with itself both ways"
    _leave_out(args, why, "baseline", "train", "budget", "against")
    if len(args.backend or ("",)) != 1 or len(args.seq or ("",)) != 1:
        raise ValueError("--overhead: one backend at one length is measured; name one in --backend and one in --seq")
    arguments.make_folder("--out", args.out)
    load_torch()
    from dilkit.tools.bench import overhead
    from dilkit.tools.report.files import publish

    result = overhead.measure(problem, args.backend[0] if args.backend else None, args.repeats or OVERHEAD_REPEATS)
    publish(result, args.out, "overhead", "dilkit bench --overhead", args.json)
    return 0


def _lengths(args: Namespace, longest: Problem, lengths: list[int]) -> int:
    load_torch()
    from dilkit.selector import requested_backends
    from dilkit.tools.bench import one_pattern
    from dilkit.tools.measure.baselines import BASELINES
    from dilkit.tools.measure.implementation import backend_implementations
    from dilkit.tools.report.files import publish
    from dilkit.tools.results.decode import encode
    from dilkit.tools.results.rows import YARDSTICKS

    implementations = backend_implementations(requested_backends(args.backend) or None)
    arguments.make_folder("--out", args.out)
    implementations += [BASELINES[name] for name in (BASELINES if "all" in args.baseline else args.baseline)]
    result = one_pattern.measure(longest, lengths, implementations, args.repeats or REPEATS, args.budget or BUDGET)
    if result.rows:
        publish(result, args.out, "bench", "dilkit bench", args.json)
    else:
        print("interrupted before anything was measured; nothing is written", file=sys.stderr)
        if args.json:
            print(json.dumps(encode(result), allow_nan=False))
    if result.interrupted:
        return INTERRUPTED
    measured = {row.who for row in result.rows if row.verdict == "measured" and row.who not in YARDSTICKS}
    bad = any(row.verdict in ("wrong", "failed") for row in result.rows)
    return 1 if bad or not measured or not measured.issuperset(args.backend or ()) else 0
