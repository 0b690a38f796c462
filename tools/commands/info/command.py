"""`dilkit info`: what this machine has, and which backend would compute a problem here or on a GPU that is not here, and why."""

from __future__ import annotations

import argparse
from typing import Any

from dilkit.device import Device, probe
from dilkit.problem import Problem
from dilkit.selector import explain
from dilkit.tools.commands.info import matrix
from dilkit.tools.commands.info.facts import devices, failure, guarded, has_code, torch_note, variables, versions
from dilkit.tools.console.arguments import (
    add_backend_argument,
    add_call_arguments,
    add_pattern_arguments,
    assumed_device,
    device_here,
    problem_of,
)
from dilkit.tools.console.text import in_bytes, print_json, table, wrapped

HELP = "show devices, versions and which backend computes a problem, with all reasons"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names the device and the problem."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--assume", type=assumed_device, metavar="sm_61", help="a GPU that need not be here, or cpu")
    where.add_argument(
        "--device", type=device_here, metavar="cuda:0", help="a device of this machine (default: the first GPU, else the CPU)"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="also the problem on every known device, for every dtype, and the table of orders behind it",
    )
    add_pattern_arguments(parser)
    add_call_arguments(parser)
    add_backend_argument(parser, "names in order of preference (default: DILKIT_BACKEND's, else by capability)")


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 = a backend was picked, 1 = none was or none can run without torch, 2 = malformed environment."""
    report = collect(args)
    if args.json:
        print_json("info", report)
    else:
        print("\n".join(_lines(report)))
    if any(variable["error"] for variable in report["environment"]):
        return 2
    return 0 if report["problem"].get("picked") and not failure(report["versions"]["torch"]) else 1


def collect(args: argparse.Namespace) -> dict[str, Any]:
    """The whole report as plain data. A failed probe is `{"error": text}` in its place. Raises ValueError for bad arguments."""
    here = devices()
    device = args.assume or _device(args.device, here)
    problem_of(args, device)
    report = dict(
        versions=versions(),
        devices=[_device_facts(d) for d in here],
        problem=guarded(lambda: _judged(args, device)),
        environment=variables(),
    )
    if args.all:
        report["orders"] = matrix.orders()
        report["matrix"] = matrix.matrix(problem_of(args, device), [d for d in here if isinstance(d, Device)], args.backend)
    return report


def _device(text: str | None, here: list[Any]) -> Device:
    if text is None:
        return next((d for d in here[1:] if isinstance(d, Device)), None) or probe("cpu")
    kind, _, index = text.partition(":")
    return probe(kind, int(index or 0))


def _judged(args: argparse.Namespace, device: Device) -> dict[str, Any]:
    problem = problem_of(args, device)
    report = explain(problem, args.backend).to_dict()
    notes = [note for note in (torch_note(device), _half_note(problem)) if note]
    return {**report, "flops": problem.flops(), "notes": notes}


def _half_note(problem: Problem) -> str:
    """What to know of half precision on a GPU that stores it but computes it slowly."""
    device, halves = problem.device, {"float16": "fp16_arithmetic", "bfloat16": "bf16"}
    if device.type != "cuda" or problem.dtype not in halves or halves[problem.dtype] in device.features:
        return ""
    return f"{device.name} has no fast {problem.dtype} units: {problem.dtype} saves memory there, float32 is usually faster"


def _device_facts(device: Any) -> dict[str, Any]:
    if not isinstance(device, Device):
        return dict(device)
    facts = dict(
        device=str(device), type=device.type, name=device.name, capability=device.capability, features=sorted(device.features)
    )
    return {**facts, "memory": device.memory, "torch_code": has_code(device)}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = ["versions", *table(_version_rows(report["versions"])), "", "devices"]
    lines += table(_device_row(device) for device in report["devices"])
    lines += ["", "problem", *_problem_lines(report["problem"])]
    if "matrix" in report:
        lines += [
            "",
            "the same problem on every known device, for every dtype",
            *matrix.lines(report["matrix"], report["orders"]),
        ]
    lines += ["", "environment"]
    lines += table((v["name"], _variable(v)) for v in report["environment"])
    return [*lines, "", "to override", *_override_lines(report["problem"])]


def _variable(found: dict[str, Any]) -> str:
    unset = f"unset: {found['default']}" if found["value"] is None else found["value"]
    return f"MALFORMED: {found['error']}" if found["error"] else unset


def _version_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in found.items():
        text = failure(value)
        if text is None and name == "torch":
            text = f"{value['version']}, built " + (f"for CUDA {value['cuda']}" if value["cuda"] else "without CUDA")
        rows.append((name.replace("_", " "), value if text is None else text))
    return rows


def _device_row(facts: dict[str, Any]) -> tuple[str, str]:
    if error := failure(facts):
        return "GPUs", f"could not be looked for: {error}"
    code = {True: "torch has code for it", False: "torch has NO code for it", None: "not known whether torch has code for it"}
    features = " ".join(facts["features"]) or "no features of note"
    return facts["device"], f"{in_bytes(facts['memory'])}; {features}; {code[facts['torch_code']]}"


def _problem_lines(judged: dict[str, Any]) -> list[str]:
    if error := failure(judged):
        return wrapped("  cannot be judged: ", error)
    asked = f"; asked for: {', '.join(judged['requested'])}" if judged["requested"] else ""
    lines = [*wrapped("  ", judged["problem"]), *wrapped("  on ", judged["device"] + asked)]
    lines += [f"  {judged['flops'] / 1e9:,.4g} nominal GFLOP forward", ""]
    rows = [(b["name"], b["verdict"], "\n".join([b["detail"]] * bool(b["detail"]) + b["reasons"])) for b in judged["backends"]]
    lines += table(rows)
    for note in judged["notes"]:
        lines += wrapped("  note: ", note)
    return lines


def _override_lines(judged: dict[str, Any]) -> list[str]:
    name = judged.get("picked") or "reference"
    ways = (f'dilated_attention(..., backend="{name}")', f'with dilkit.use_backend("{name}"): ...', f"DILKIT_BACKEND={name}")
    lines = [f"  {way:<{max(map(len, ways))}}  wins over" for way in ways]
    lines[-1] += " the automatic choice"
    return [
        *lines,
        *wrapped("  ", "several names, comma-separated, are tried in order; nothing else is ever taken in their place"),
    ]
