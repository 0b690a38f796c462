"""`dilkit info`: devices of this machine, and the backend that would compute a problem here or on another GPU, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import dilkit
from dilkit.device import Device, device_named, has_torch_code, why_float32
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.pattern import broken_kinds
from dilkit.problem import Problem
from dilkit.selection.preference_table import ON_GPUS
from dilkit.selection.proof import recorded
from dilkit.selector import Trace, explain
from dilkit.tools.commands import info_tables
from dilkit.tools.commands.facts import Failure, devices, guarded, pattern_cache, torch_note, variables, versions
from dilkit.tools.console import arguments
from dilkit.tools.console.text import in_bytes, print_json, table, wrapped
from dilkit.tools.results.decode import encode

NAMES_IN_ORDER = "  several names, comma-separated, are tried in order; nothing else is ever taken in their place"
HELP = "show devices, versions and which backend computes a problem, with all reasons"
_SLIDES = ARCHITECTURES["gigapath_slide_enc12l768d"]
PRESETS: dict[str, tuple[str, dict[str, object]]] = {
    "gigapath": (
        "GigaPath's slide encoder on 10,000 tiles",
        dict(
            seq=10_001,  # with the class token
            heads=_SLIDES.num_heads,
            dim=_SLIDES.embed_dim // _SLIDES.num_heads,
            dtype=None,
            segments=_SLIDES.pattern.segment_lengths,
            rates=_SLIDES.pattern.dilation_rates,
            offset=_SLIDES.pattern.offset,
            tail=_SLIDES.pattern.tail,
        ),
    )
}
"""Attention in one layer of a published model, by name: words, and defaults of arguments. No dtype: it is the device's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device and the problem."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--assume", type=arguments.assumed_device, metavar="sm_61", help="a GPU that need not be here, or cpu")
    here = "a device of this machine (default: the first GPU, else the CPU)"
    where.add_argument("--device", type=arguments.device_here, metavar="cuda:0", help=here)
    every = "also the problem on every known device, for every dtype, and the table of orders behind it"
    parser.add_argument("--all", action="store_true", help=every)
    of_kinds = "also who computes each kind of branch on the device, for what calls may ask for"
    parser.add_argument("--kinds", action="store_true", help=of_kinds)
    known = ", ".join(f"{name}: {what}" for name, (what, _) in PRESETS.items())
    preset = f"a named problem, {known}; arguments that are given win over it, and without --dtype it is the device's"
    parser.add_argument("--preset", choices=PRESETS, metavar="NAME", help=preset)
    arguments.add_pattern_arguments(parser)
    arguments.add_call_arguments(parser)
    arguments.add_backend_argument(parser, "names in order of preference (default: DILKIT_BACKEND's, else by capability)")


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 = a backend was picked, 1 = none was or none can run without torch, 2 = malformed environment."""
    here = devices()
    usable = [device for device in here if isinstance(device, Device)]
    device = args.assume or (device_named(args.device) if args.device else (usable[1:] or usable)[0])
    preset = PRESETS[args.preset][0] if args.preset else None
    if preset and args.dtype is None:
        args.dtype, why = _mixed_precision(device)
        preset += f"; {args.dtype}: {why}"
    problem = arguments.problem_of(args, device)
    matrix = info_tables.matrix(problem, usable, args.backend) if args.all else None
    kinds = info_tables.kind_cells(device, args.dtype, lambda one: explain(one, args.backend)) if args.kinds else None
    trace = guarded(lambda: explain(problem, args.backend))
    installed, proofs, cache, read, broken = versions(), recorded(), pattern_cache(), variables(), broken_kinds()
    picked = trace.picked if isinstance(trace, Trace) else None
    if args.json:
        report: dict[str, Any] = dict(versions=installed, devices=[_plain_device(one) for one in here])
        report |= dict(problem=_plain_trace(trace), proofs=proofs, pattern_cache=cache, environment=read)
        report |= dict(broken_kinds=broken, preset=preset)
        if matrix is not None:
            report |= dict(orders=info_tables.orders(), matrix=[cell.to_dict() for cell in matrix])
        print_json("info", encode(report | ({} if kinds is None else dict(kinds=kinds))))
    else:
        proof_rows = [(one.verdict, "\n".join(filter(None, (", ".join(one.facts), one.reason, one.doubt)))) for one in proofs]
        on_gpus = wrapped("  ", "\n".join(ON_GPUS))
        preset_lines = wrapped("  preset ", preset) if preset else []
        sections = {
            "versions": table((name.replace("_", " "), str(version)) for name, version in installed.items()),
            "devices": table(map(_device_row, here)),
            "proofs of our own kernels on GPUs, and of classes of newer packages": table(proof_rows),
            "problem": [*preset_lines, *_problem_lines(trace)],
            "the same problem on every known device, for every dtype": matrix and info_tables.matrix_lines(matrix),
            f"each kind of branch on {device}, {info_tables.SEQ:,} tokens": kinds and info_tables.kind_lines(kinds, device),
            f"GPUs, as of dilkit {dilkit.__version__}": on_gpus if device.type == "cuda" or matrix else [],
            "kinds of branches that are broken": table(broken.items()),
        }
        blocks = [[title, *lines] for title, lines in sections.items() if lines]
        blocks.append(wrapped("pattern cache  ", str(cache)))
        blocks.append(["environment", *table((variable.name, str(variable)) for variable in read)])
        name = picked or "reference"
        ways = f'dilated_attention(..., backend="{name}")', f'with dilkit.use_backend("{name}"): ...', f"DILKIT_BACKEND={name}"
        wins = [f"  {way:<{max(map(len, ways))}}  wins over" for way in ways]
        blocks.append(["to override", *wins[:-1], f"{wins[-1]} the automatic choice", NAMES_IN_ORDER])
        print("\n\n".join("\n".join(block) for block in blocks))
    if any(variable.error for variable in read):
        return 2
    return 0 if picked and not isinstance(installed["torch"], Failure) else 1


def _mixed_precision(device: Device) -> tuple[str, str]:
    """Return the dtype that suits a model in mixed precision on `device`, and the reason."""
    if "fp16_tensor_cores" in device.features:
        return "float16", f"{device.name} has tensor cores for it"
    if device.type == "cuda" and device.capability:
        return "float32", f"{device.name} has no tensor cores: {why_float32('float16', device.capability)}"
    return "float32", f"float16 is no faster on {device.type}"


def _notes(problem: Problem) -> Iterator[str]:
    """Yield what torch lacks, and a warning for half precision on a GPU that computes it slowly."""
    device, halves = problem.device, {"float16": "fp16_arithmetic", "bfloat16": "bf16"}
    if note := torch_note(device):
        yield note
    if device.type == "cuda" and problem.dtype in halves and halves[problem.dtype] not in device.features:
        yield f"{device.name} has no fast {problem.dtype} units: {problem.dtype} saves memory there, float32 is usually faster"


def _plain_trace(trace: Trace | Failure) -> object:
    if isinstance(trace, Failure):
        return trace
    return trace.to_dict() | dict(flops=trace.problem.flops(), notes=list(_notes(trace.problem)))


def _plain_device(device: Device | Failure) -> object:
    if isinstance(device, Failure):
        return device
    facts = dict(device=str(device), type=device.type, name=device.name, capability=device.capability)
    return facts | dict(features=sorted(device.features), memory=device.memory, torch_code=_has_code(device))


def _has_code(device: Device) -> bool | None:
    known = guarded(lambda: has_torch_code(device))
    return None if isinstance(known, Failure) else known


def _device_row(device: Device | Failure) -> tuple[str, str]:
    if isinstance(device, Failure):
        return "GPUs", f"could not be looked for: {device}"
    code = {True: "torch has code for it", False: "torch has NO code for it", None: "not known whether torch has code for it"}
    features = " ".join(sorted(device.features)) or "no features of note"
    return str(device), f"{in_bytes(device.memory)}; {features}; {code[_has_code(device)]}"


def _problem_lines(trace: Trace | Failure) -> list[str]:
    if isinstance(trace, Failure):
        return wrapped("  cannot be judged: ", trace.error)
    requested = f"; asked for: {', '.join(trace.requested)}" if trace.requested else ""
    lines = [*wrapped("  ", str(trace.problem)), *wrapped("  on ", f"{trace.problem.device}{requested}")]
    lines += [f"  {trace.problem.flops() / 1e9:,.4g} nominal GFLOP forward", ""]
    lines += table((d.name, d.verdict, "\n".join(filter(None, (d.detail, *d.reasons)))) for d in trace.decisions)
    return [*lines, *(line for note in _notes(trace.problem) for line in wrapped("  note: ", note))]
