"""`dilkit info`: devices of this machine, and the backend that would compute a problem here or on another GPU, and why."""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import dilkit
from dilkit.bias.form import BiasForm
from dilkit.device import GENERATIONS, Device, device_named, has_torch_code
from dilkit.pattern import Branch, Pattern
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference_table import BY_DESIGN, TABLE
from dilkit.selection.proof import recorded
from dilkit.selector import Trace, explain
from dilkit.tools.commands.machine import Failure, devices, guarded, torch_note, versions
from dilkit.tools.console import arguments
from dilkit.tools.console.text import in_bytes, print_json, table, wrapped
from dilkit.tools.results.decode import encode

HELP = "show devices, versions and which backend computes a problem, with all reasons"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--assume", type=arguments.assumed_device, metavar="sm_61", help="a GPU that need not be here, or cpu")
    here = "a device of this machine (default: the first GPU, else the CPU)"
    where.add_argument("--device", type=arguments.device_here, metavar="cuda:0", help=here)
    parser.add_argument("--all", action="store_true", help="also every known device, every dtype, and the table of orders")
    parser.add_argument("--kinds", action="store_true", help="also the backend of each kind of branch on the device")
    arguments.add_pattern_arguments(parser)
    arguments.add_call_arguments(parser)
    arguments.add_backend_argument(parser, "names in order of preference (default: DILKIT_BACKEND's, else by capability)")


def run(args: argparse.Namespace) -> int:
    """Print the report. 0 = a backend was picked, 1 = none was or none can run without torch."""
    here = devices()
    usable = [device for device in here if isinstance(device, Device)]
    device = args.assume or (device_named(args.device) if args.device else (usable[1:] or usable)[0])
    trace = explain(arguments.problem_of(args, device), args.backend)
    report: dict[str, Any] = dict(
        versions=versions(),
        devices=[one if isinstance(one, Failure) else _device_facts(one) for one in here],
        problem=trace.to_dict() | dict(flops=trace.problem.flops(), notes=list(_notes(trace.problem))),
        proofs=recorded(),
    )
    if args.all:
        report["orders"] = [dict(number=number, **row.to_dict()) for number, row in enumerate(TABLE, 1)]
        report["matrix"] = matrix(trace.problem, usable, args.backend)
    if args.kinds:
        report["kinds"] = kind_cells(device, args.dtype, lambda one: explain(one, args.backend))
    if args.json:
        print_json("info", encode(report))
    else:
        print(*_lines(report, device), sep="\n")
    return 0 if trace.picked and not isinstance(report["versions"]["torch"], Failure) else 1


def _lines(report: Mapping[str, Any], device: Device) -> Iterator[str]:
    yield from wrapped("", "; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    yield from table(map(_device_row, report["devices"]))
    problem = report["problem"]
    requested = f"; asked for: {', '.join(problem['requested'])}" if problem["requested"] else ""
    yield from wrapped("", f"{problem['problem']}: {problem['flops'] / 1e9:,.4g} nominal GFLOP forward")
    yield from wrapped("on ", f"{problem['device']}{requested}")
    alike: dict[tuple[str, str], list[str]] = {}
    for b in problem["backends"]:
        alike.setdefault((b["verdict"], "; ".join(filter(None, (b["detail"], *b["reasons"])))), []).append(b["name"])
    yield from table((", ".join(names), *why) for why, names in alike.items())
    yield from (line for note in problem["notes"] for line in wrapped("note: ", note))
    proofs = ((p.verdict, ", ".join(p.facts), "; ".join(filter(None, (p.reason, p.doubt)))) for p in report["proofs"])
    yield from table(("proof", verdict, f"{facts}: {why}" if why else facts) for verdict, facts, why in proofs)
    if "matrix" in report:
        picks: dict[str, list[str]] = {}
        for cell in report["matrix"]:
            picks.setdefault(cell["label"], []).append(cell["picked"] or "none")
        yield from ("", *table([("", *DTYPES), *((label, *names) for label, names in picks.items())]), "")
        head = f"The first row that fits decides. Of GPUs it is {BY_DESIGN}, where no measurement is named:"
        yield from wrapped("", head)
        for number, row in enumerate(TABLE, 1):
            basis = "" if row.basis == BY_DESIGN else f" ({row.basis})"
            yield from wrapped(f"  {number:<3} ", f"{row.where}: {', '.join(row.order)}: {row.why}{basis}")
    if "kinds" in report:
        yield f"\neach kind of branch on {device}, {SEQ:,} tokens"
        yield from table([("", *ASKED), *((kind, *picked.values()) for kind, picked in by_kind(report["kinds"]).items())])
        left: dict[str, list[str]] = {}
        for one in report["kinds"] if device.type == "cuda" else ():
            if one["picked"] in (None, "reference"):
                left.setdefault("; ".join(one["refusals"]), []).append(f"{one['kind']} {one['asked']}")
        for why, calls in left.items():
            yield from wrapped("  ", f"left to the definition, which is slow: {', '.join(calls)}: {why}")


def _device_facts(device: Device) -> dict[str, Any]:
    code = guarded(lambda: has_torch_code(device))
    return dict(
        device=str(device),
        type=device.type,
        name=device.name,
        capability=device.capability,
        features=sorted(device.features),
        memory=device.memory,
        torch_code=None if isinstance(code, Failure) else code,
    )


def _device_row(facts: Mapping[str, Any] | Failure) -> tuple[str, str]:
    if isinstance(facts, Failure):
        return "GPUs", f"could not be looked for: {facts}"
    code = {True: "torch has code for it", False: "torch has NO code for it", None: "not known whether torch has code for it"}
    features = " ".join(facts["features"]) or "no features of note"
    return facts["device"], f"{in_bytes(facts['memory'])}; {features}; {code[facts['torch_code']]}"


def _notes(problem: Problem) -> Iterator[str]:
    device, halves = problem.device, {"float16": "fp16_arithmetic", "bfloat16": "bf16"}
    if note := torch_note(device):
        yield note
    if device.platform == "cuda" and problem.dtype in halves and halves[problem.dtype] not in device.features:
        yield f"{device.name} has no fast {problem.dtype} units: {problem.dtype} saves memory there, float32 is usually faster"


SEQ, BLOCK, LABEL = 16384, 64, 34
"""Tokens of an example, rows of a block, characters of a device's name in a table at most."""
BY_CALL = "blocks of each call"

ASKED: dict[str, dict[str, Any]] = {
    "training": {},
    "with a mask": dict(key_padding_mask=True),
    "with a bias": dict(bias=BiasForm()),
    "with a softcap": dict(softcap=30.0),
    "packed": dict(varlen=True),
    "with dropout": dict(dropout_p=0.1),
    "cache of all keys": dict(kv_cache=True, requires_grad=False, is_causal=True),
}
"""Options of calls, beside a backward pass."""

OF_WHOLE_SEQUENCES = frozenset({"packed", "cache of all keys"})
"""Options that a call which gives its blocks does not have."""


@cache
def examples() -> dict[str, Branch]:
    """Return a branch of each kind for `SEQ` tokens, and one whose blocks each call gives."""
    blocks = SEQ // BLOCK
    local = [[column <= row < column + 4 or column == 0 for column in range(blocks)] for row in range(blocks)]
    branches: tuple[Branch, ...] = (
        dilkit.DilatedSegment(SEQ // 2, 4),
        dilkit.SlidingWindow(512),
        dilkit.GlobalTokens(16),
        dilkit.Strided(128),
        dilkit.BlockSparse(local, BLOCK),
        dilkit.Neighborhood((128, 128), 13),
        dilkit.Documents([SEQ // 2, SEQ // 4, SEQ // 4]),
        dilkit.Prefix(1024),
        dilkit.Intervals([[0, max(0, i - 512)] for i in range(SEQ)], [[15, i] for i in range(SEQ)]),
    )
    return {type(branch).__name__: branch for branch in branches} | {BY_CALL: dilkit.BlockSparse(None, BLOCK)}


def kind_cells(device: Device, dtype: str, explain: Callable[[Problem], Trace]) -> list[dict[str, Any]]:
    """Return the pick of every kind with every option; `refusals`: reasons of the backends that lack least."""
    cells = []
    for kind, branch in examples().items():
        plain = Problem(pattern=Pattern.of(branch), seq=SEQ, heads=8, head_dim=64, dtype=dtype, device=device, requires_grad=True)
        for asked, options in ASKED.items():
            if branch.is_given_by_call and asked in OF_WHOLE_SEQUENCES:
                continue
            trace = explain(replace(plain, **options))
            others = [d for d in trace.decisions if d.reasons and d.verdict in ("refused", "broken")]
            others = [d for d in others if not d.reasons[0].startswith("device ")]
            fewest = min((len(d.reasons) for d in others), default=0)
            why = [f"{d.name}: {'; '.join(d.reasons)}" for d in others if len(d.reasons) == fewest]
            cells.append(dict(kind=kind, asked=asked, picked=trace.picked, refusals=why))
    return cells


def by_kind(cells: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Return the picks by kind and option; "-" where there is no such call."""
    picked: dict[str, dict[str, str]] = {}
    for cell in cells:
        picked.setdefault(cell["kind"], dict.fromkeys(ASKED, "-"))[cell["asked"]] = cell["picked"] or "none"
    return picked


def matrix(problem: Problem, here: Iterable[Device], backend: Sequence[str] | None) -> list[dict[str, Any]]:
    """Return the trace of `problem` on the devices `here` and on one of each generation, for each dtype."""
    cells = []
    for device in (*here, *(Device.assume("sm_{}{}".format(*generation.capability)) for generation in GENERATIONS)):
        kind = device.type if device.capability is None else "sm_{}{}".format(*device.capability)
        where = "" if device.assumed or device.type == "cpu" else f" {device.type}:{device.index}"
        label = textwrap.shorten(f"{kind}{where} {device.name}", LABEL, placeholder="...")
        for dtype in DTYPES:
            trace = explain(replace(problem, device=device, dtype=dtype), backend)
            cells.append(dict(label=label, dtype=dtype, **trace.to_dict()))
    return cells
