"""`dilkit gpu-day`: the first half hour of a machine with a GPU."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from dilkit import environment
from dilkit.tools.console import arguments
from dilkit.tools.console.interrupt import INTERRUPTED, load_torch

if TYPE_CHECKING:
    from dilkit.device import Device
    from dilkit.tools.gpu_day.record import GpuDayResult
    from dilkit.tools.gpu_day.step import Context

HELP = """\
check and measure everything on a GPU that is new to dilkit, within half an hour

Three stages of at most nine minutes each: is it right (all kernels compiled, loaded and launched; the problem list; graphs,
streams, torch.compile, sanitizers, two ranks), how fast is it (the gpu suite), and which rows of the preference table are wrong
(a sweep of 128 problems). What is found wrong is not timed. Each step is a process with a deadline, and is written down when it
ends: the same command goes on where it was ended, and repeats a step where code, driver or device are others. The GPU is the
first; CUDA_VISIBLE_DEVICES puts another one there. Writes gpu-day.json, gpu-day.md and gpu-day.png into --out. With
`dilkit tune --take gpu-day.json` the automatic choice goes by the sweep. Exit code 1 when anything was wrong or did not end."""

STAGES = ("correctness", "speed", "preferences")
MINUTES = 9.0
DEVICE = "cuda:0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("--stage", choices=STAGES, help="this stage alone (default: all, each in a process of its own)")
    parser.add_argument(
        "--out", type=Path, default=Path("dilkit-gpu-day"), metavar="DIR", help="folder of the results (default %(default)s)"
    )
    minutes = "minutes that a stage may take (default %(default)g)"
    parser.add_argument("--minutes", type=arguments.positive, default=MINUTES, metavar="M", help=minutes)
    parser.add_argument("--again", action="store_true", help="run every step anew, whatever is in --out")
    rehearse = "on the CPU, at small sizes: to see in a few minutes what it does; nothing of it is a GPU's figure"
    parser.add_argument("--rehearse", action="store_true", help=rehearse)
    cubins = "compiled kernels to take, and to add to, in the place of the folder that DILKIT_CUDA_CACHE names"
    parser.add_argument("--cubins", type=Path, metavar="DIR", help=cubins)
    assume = "compile all kernels for such a GPU into --cubins, on a machine that need not have one, and do nothing else"
    parser.add_argument("--assume", type=arguments.assumed_device, metavar="sm_90", help=assume)


def run(args: Namespace) -> int:
    """Run the stages, write the files, print the page; 0, 1 where something is wrong, 130 when interrupted."""
    if args.cubins is not None:
        arguments.make_folder("--cubins", args.cubins)
        environment.set_cuda_cache(args.cubins)
    load_torch()
    if args.assume is not None:
        return _compile(args, args.assume)
    context = _context(args)
    arguments.make_folder("--out", args.out)
    interrupted = False
    try:
        _run_stages(args, context)
    except KeyboardInterrupt:
        interrupted = True
    result = _result(args, context)
    return INTERRUPTED if interrupted else int(any(step.wrong for step in result.steps))


def _context(args: Namespace) -> Context:
    """Where the steps run. Raises ValueError where there is no such device."""
    from dilkit.tools.gpu_day.step import Context

    if args.rehearse:
        return Context("cpu", rehearse=True)
    try:
        return Context(arguments.device_here(DEVICE))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{error}; --rehearse shows on the CPU what would be done") from None


def _run_stages(args: Namespace, context: Context) -> None:
    """One stage here, or all, each in a process of its own."""
    from dilkit.tools.gpu_day import stage

    seconds = 60 * args.minutes
    if args.stage:
        stage.run(args.stage, context, args.out, seconds, args.again, lambda text: print(text, file=sys.stderr, flush=True))
        return
    for name in STAGES:
        ended = stage.in_a_process(name, context, args.out, seconds, args.again)
        if ended.code:
            print(f"{name}: the stage ended with exit status {ended.code}", file=sys.stderr)


def _result(args: Namespace, context: Context) -> GpuDayResult:
    """What there is now, with its figures: written and printed."""
    from dilkit.tools.gpu_day import state
    from dilkit.tools.gpu_day.plan import plan
    from dilkit.tools.gpu_day.summary import summed
    from dilkit.tools.report.files import publish

    result = summed(state.begun(args.out, context, plan(context.rehearse)))
    publish(result, args.out, state.STEM, "dilkit gpu-day", args.json)
    return result


def _compile(args: Namespace, device: Device) -> int:
    """Compile all kernels for a GPU that need not be here; 1 where the compiler refuses one."""
    from dilkit.tools.gpu_day.correctness.launches import compile_all, needed

    if args.cubins is None or device.capability is None:
        raise ValueError("--assume: goes with --cubins alone, the folder to compile into, for a GPU such as sm_90")
    kernels = needed(device.capability)
    failures = compile_all(kernels, device.capability)
    for name, why in failures:
        print(f"{name}: {why}", file=sys.stderr)
    print(f"{len(kernels)} kernels for {device.name}: compiled in {args.cubins}, {len(failures)} refused")
    return int(bool(failures))
