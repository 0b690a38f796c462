"""`dilkit info`: devices of this machine, and the backend that would compute a problem here or on another GPU, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dilkit
from dilkit.device import Device, device_named, has_torch_code
from dilkit.pattern import broken_kinds
from dilkit.problem import Problem
from dilkit.selection.preference_table import ON_GPUS
from dilkit.selection.proof import Proof, recorded
from dilkit.selector import Trace, explain
from dilkit.tools.commands import info_tables
from dilkit.tools.commands.facts import (
    CacheBound,
    Failure,
    TorchBuild,
    VariableFacts,
    devices,
    guarded,
    pattern_cache,
    torch_note,
    variables,
    versions,
)
from dilkit.tools.commands.info_tables import Cell, KindCell, kind_cells
from dilkit.tools.console import arguments
from dilkit.tools.console.presets import Preset, add_preset_argument
from dilkit.tools.console.text import in_bytes, print_json, table, wrapped
from dilkit.tools.results.decode import encode

HELP = "show devices, versions and which backend computes a problem, with all reasons"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names the device and the problem."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--assume", type=arguments.assumed_device, metavar="sm_61", help="a GPU that need not be here, or cpu")
    here = "a device of this machine (default: the first GPU, else the CPU)"
    where.add_argument("--device", type=arguments.device_here, metavar="cuda:0", help=here)
    every = "also the problem on every known device, for every dtype, and the table of orders behind it"
    parser.add_argument("--all", action="store_true", help=every)
    of_kinds = "also who computes each kind of branch on the device, for what calls may ask for"
    parser.add_argument("--kinds", action="store_true", help=of_kinds)
    add_preset_argument(parser)
    arguments.add_pattern_arguments(parser)
    arguments.add_call_arguments(parser)
    arguments.add_backend_argument(parser, "names in order of preference (default: DILKIT_BACKEND's, else by capability)")


@dataclass(frozen=True)
class Report:
    """All that this command finds; `matrix` with --all alone, `kinds` with --kinds."""

    versions: dict[str, str | TorchBuild | Failure]
    devices: list[Device | Failure]
    proofs: list[Proof]
    """What came of the proofs of kernels on GPUs, as far as it is written down."""
    trace: Trace | Failure
    pattern_cache: CacheBound | Failure
    environment: list[VariableFacts]
    matrix: list[Cell] | None
    kinds: list[KindCell] | None
    broken_kinds: dict[str, str]
    """The kinds of branches of packages that cannot be loaded, and why."""
    preset: str | None
    """The name of the preset, and why its dtype was taken if it was."""

    @property
    def picked(self) -> str | None:
        """The backend that would compute the problem."""
        return self.trace.picked if isinstance(self.trace, Trace) else None


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 = a backend was picked, 1 = none was or none can run without torch, 2 = malformed environment."""
    here = devices()
    found = [device for device in here if isinstance(device, Device)]
    device = args.assume or (device_named(args.device) if args.device else (found[1:] or found)[0])
    preset = _of_preset(args, device)
    problem = arguments.problem_of(args, device)
    cells = info_tables.matrix(problem, found, args.backend) if args.all else None
    of_kinds = kind_cells(device, args.dtype, lambda asked: explain(asked, args.backend)) if args.kinds else None
    judged = guarded(lambda: explain(problem, args.backend))
    report = Report(versions(), here, recorded(), judged, pattern_cache(), variables(), cells, of_kinds, broken_kinds(), preset)
    if args.json:
        print_json("info", _plain(report))
    else:
        print("\n".join(_lines(report, device)))
    if any(variable.error for variable in report.environment):
        return 2
    return 0 if report.picked and not isinstance(report.versions["torch"], Failure) else 1


def _of_preset(args: argparse.Namespace, device: Device) -> str | None:
    """What --preset names, in words. Where --dtype is not given, it is set to what suits `device`."""
    preset: Preset | None = args.preset
    if preset is None:
        return None
    if args.dtype is not None:
        return preset.what
    args.dtype, why = preset.dtype_on(device)
    return f"{preset.what}; {args.dtype}: {why}"


def _notes(problem: Problem) -> Iterator[str]:
    """What torch lacks; what to know of half precision on a GPU that stores it but computes it slowly."""
    device, halves = problem.device, {"float16": "fp16_arithmetic", "bfloat16": "bf16"}
    if note := torch_note(device):
        yield note
    if device.type == "cuda" and problem.dtype in halves and halves[problem.dtype] not in device.features:
        yield f"{device.name} has no fast {problem.dtype} units: {problem.dtype} saves memory there, float32 is usually faster"


def _plain(report: Report) -> dict[str, Any]:
    """For JSON."""
    trace, judged = report.trace, encode(report.trace) if isinstance(report.trace, Failure) else report.trace.to_dict()
    if isinstance(trace, Trace):
        judged |= dict(flops=trace.problem.flops(), notes=list(_notes(trace.problem)))
    report_fields = dict(versions=report.versions, devices=[_plain_device(d) for d in report.devices], problem=judged)
    report_fields |= dict(proofs=report.proofs, pattern_cache=report.pattern_cache, environment=report.environment)
    report_fields |= dict(broken_kinds=report.broken_kinds, preset=report.preset)
    if report.matrix is not None:
        report_fields |= dict(orders=info_tables.orders(), matrix=[cell.to_dict() for cell in report.matrix])
    if report.kinds is not None:
        report_fields |= dict(kinds=report.kinds)
    plain: dict[str, Any] = encode(report_fields)
    return plain


def _plain_device(device: Device | Failure) -> object:
    if isinstance(device, Failure):
        return device
    facts = dict(device=str(device), type=device.type, name=device.name, capability=device.capability)
    return facts | dict(features=sorted(device.features), memory=device.memory, torch_code=_has_code(device))


def _has_code(device: Device) -> bool | None:
    known = guarded(lambda: has_torch_code(device))
    return None if isinstance(known, Failure) else known


def _lines(report: Report, device: Device) -> list[str]:
    lines = ["versions", *table((name.replace("_", " "), str(found)) for name, found in report.versions.items())]
    lines += ["", "devices", *table(_device_row(device) for device in report.devices)]
    if report.proofs:
        lines += [
            "",
            "proofs of our own kernels on GPUs, and of classes of newer packages",
            *table(_proof_row(proof) for proof in report.proofs),
        ]
    lines += ["", "problem", *(wrapped("  preset ", report.preset) if report.preset else ()), *_problem_lines(report.trace)]
    if report.matrix is not None:
        lines += ["", "the same problem on every known device, for every dtype", *info_tables.matrix_lines(report.matrix)]
    if report.kinds is not None:
        lines += [
            "",
            f"each kind of branch on {device}, {info_tables.SEQ:,} tokens",
            *info_tables.kind_lines(report.kinds, device),
        ]
    if device.type == "cuda" or report.matrix is not None:
        lines += ["", f"GPUs, as of dilkit {dilkit.__version__}", *wrapped("  ", "\n".join(ON_GPUS))]
    if report.broken_kinds:
        lines += ["", "kinds of branches that are broken", *table(report.broken_kinds.items())]
    lines += ["", *wrapped("pattern cache  ", str(report.pattern_cache))]
    lines += ["", "environment", *table((variable.name, str(variable)) for variable in report.environment)]
    return [*lines, "", "to override", *_override_lines(report.picked or "reference")]


def _device_row(device: Device | Failure) -> tuple[str, str]:
    if isinstance(device, Failure):
        return "GPUs", f"could not be looked for: {device}"
    code = {True: "torch has code for it", False: "torch has NO code for it", None: "not known whether torch has code for it"}
    features = " ".join(sorted(device.features)) or "no features of note"
    return str(device), f"{in_bytes(device.memory)}; {features}; {code[_has_code(device)]}"


def _proof_row(proof: Proof) -> tuple[str, str]:
    return proof.verdict, "\n".join(filter(None, (", ".join(proof.facts), proof.reason, proof.doubt)))


def _problem_lines(trace: Trace | Failure) -> list[str]:
    if isinstance(trace, Failure):
        return wrapped("  cannot be judged: ", trace.error)
    asked = f"; asked for: {', '.join(trace.requested)}" if trace.requested else ""
    lines = [*wrapped("  ", str(trace.problem)), *wrapped("  on ", f"{trace.problem.device}{asked}")]
    lines += [f"  {trace.problem.flops() / 1e9:,.4g} nominal GFLOP forward", ""]
    lines += table((d.name, d.verdict, "\n".join(filter(None, (d.detail, *d.reasons)))) for d in trace.decisions)
    return [*lines, *(line for note in _notes(trace.problem) for line in wrapped("  note: ", note))]


def _override_lines(name: str) -> list[str]:
    ways = (f'dilated_attention(..., backend="{name}")', f'with dilkit.use_backend("{name}"): ...', f"DILKIT_BACKEND={name}")
    lines = [f"  {way:<{max(map(len, ways))}}  wins over" for way in ways]
    lines[-1] += " the automatic choice"
    return [*lines, "  several names, comma-separated, are tried in order; nothing else is ever taken in their place"]
