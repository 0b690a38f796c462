"""The ranks of a command: `--comm mpi|torch|threads`, `--world-size N`, `--timeout S`; `dilkit.comm.launch.ranks` runs them.

ranks.add_arguments(parser)            # adds the three; `args.comm` is None where the command runs alone
ranks.check(args)                      # raises ValueError for what does not fit together, before anything is started
code = ranks.run(args, work)           # work(comm) -> int on every rank; the largest result is everybody's exit code
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import TYPE_CHECKING

from dilkit import environment
from dilkit.tools.console.arguments import positive, whole

if TYPE_CHECKING:
    from dilkit.comm.launch.ranks import Work

KINDS = ("mpi", "torch", "threads")
TIMEOUT = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --comm, --world-size, --timeout; return their group."""
    group = parser.add_argument_group("ranks")
    comm = "run over ranks: those of mpirun, those of torchrun, or threads of this process (default: no ranks)"
    group.add_argument("--comm", choices=KINDS, help=comm)
    group.add_argument("--world-size", type=whole(1), metavar="P", help="how many ranks, with --comm threads")
    wait = f"seconds that a rank waits for another (default {TIMEOUT:g})"
    group.add_argument("--timeout", type=positive, metavar="S", help=wait)
    return group


def check(args: Namespace) -> None:
    """Raise ValueError where the three arguments do not fit together, or not what started this process."""
    started, size = environment.launch(), args.world_size
    several = started if started is not None and started.size > 1 else None
    if args.comm is None:
        for name, value in (("world-size", size), ("timeout", args.timeout)):
            if value is not None:
                raise ValueError(f"--{name}: goes with --comm alone; say which ranks, as in --comm threads --world-size 4")
        if several:
            kind = "torch" if several.launcher == "torchrun" else "mpi"
            raise ValueError(
                f"--comm: {several.launcher} started {several.size} processes, which would all do the same; add --comm {kind}"
            )
        return
    if args.comm == "threads":
        if size is None:
            raise ValueError("--comm threads: how many? add --world-size, as in --comm threads --world-size 4")
        if several:
            raise ValueError(f"--comm threads: makes ranks in one process; start it without {several.launcher}")
        return
    launcher = "torchrun" if args.comm == "torch" else "mpirun"
    if args.comm == "torch" and (started is None or started.launcher != launcher):
        raise ValueError("--comm torch: not started by torchrun; run torchrun --nproc-per-node 4 -m dilkit ...")
    if several and several.launcher != launcher:
        raise ValueError(f"--comm {args.comm}: started by {several.launcher}; start it by {launcher}, or choose another --comm")
    there = 1 if started is None else started.size
    if size not in (None, there):
        raise ValueError(f"--world-size: {size}, but there are {there} ranks; {launcher} decides on them, leave it out")


def run(args: Namespace, work: Work) -> int:
    """Run `work(comm)` on every rank; return the exit code. Raises as `check`, and as `work` if this process has all ranks."""
    check(args)
    from dilkit.comm.launch.ranks import run_ranks

    return run_ranks(args.comm, work, world_size=args.world_size or 1, timeout=args.timeout or TIMEOUT)
