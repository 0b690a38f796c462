"""`dilkit info`: devices of this machine, and the backend that would compute a problem here or on another GPU, and why."""

from __future__ import annotations

import argparse
import string
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import dilkit
from dilkit import environment
from dilkit.bias.form import BiasForm
from dilkit.device import GENERATIONS, Device, device_named, has_torch_code, why_float32
from dilkit.integrations.gigapath.config import ARCHITECTURES
from dilkit.pattern import Branch, Pattern, broken_kinds
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference import BY_DESIGN
from dilkit.selection.preference_table import ON_GPUS, TABLE, row_of
from dilkit.selection.proof import recorded
from dilkit.selector import Trace, explain
from dilkit.tools.commands.facts import Failure, devices, guarded, torch_note, variables, versions
from dilkit.tools.console import arguments
from dilkit.tools.console.text import in_bytes, print_json, table, wrapped
from dilkit.tools.results.decode import encode

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
    parser.add_argument("--all", action="store_true", help="also every known device, every dtype, and the table of orders")
    parser.add_argument("--kinds", action="store_true", help="also the backend of each kind of branch on the device")
    known = ", ".join(f"{name}: {summary}" for name, (summary, _) in PRESETS.items())
    preset = f"a named problem, {known}; other arguments win over it; without --dtype the device's"
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
    trace = guarded(lambda: explain(problem, args.backend))
    cells = matrix(problem, usable, args.backend) if args.all and isinstance(trace, Trace) else []
    kinds = kind_cells(device, args.dtype, lambda one: explain(one, args.backend)) if args.kinds else []
    report: dict[str, Any] = dict(
        versions=versions(),
        devices=[one if isinstance(one, Failure) else _device_facts(one) for one in here],
        problem=trace if isinstance(trace, Failure) else _problem_facts(trace),
        proofs=recorded(),
        pattern_cache=guarded(lambda: dict(limit=environment.cache_bytes(), variable=environment.CACHE_BYTES.name)),
        environment=variables(),
        broken_kinds=broken_kinds(),
        preset=preset,
    )
    if args.json:
        rows = [dict(number=number, **row.to_dict()) for number, row in enumerate(TABLE, 1)]
        report |= dict(orders=rows, matrix=[cell.to_dict() for cell in cells]) if cells else {}
        print_json("info", encode(report | (dict(kinds=kinds) if kinds else {})))
    else:
        proofs = [(p.verdict, "\n".join(filter(None, (", ".join(p.facts), p.reason, p.doubt)))) for p in report["proofs"]]
        on_gpus = wrapped("  ", "\n".join(ON_GPUS))
        sections = {
            "versions": table((name.replace("_", " "), str(version)) for name, version in report["versions"].items()),
            "devices": table(map(_device_row, report["devices"])),
            "proofs of our own kernels on GPUs, and of classes of newer packages": table(proofs),
            "preset": wrapped("  ", preset or ""),
            "problem": _problem_lines(report["problem"]),
            "the same problem on every known device, for every dtype": matrix_lines(cells) if cells else [],
            f"GPUs, as of dilkit {dilkit.__version__}": on_gpus if args.all or device.type == "cuda" else [],
            f"each kind of branch on {device}, {SEQ:,} tokens": kind_lines(kinds, device) if kinds else [],
            "kinds of branches that are broken": table(report["broken_kinds"].items()),
            "environment": table((variable.name, str(variable)) for variable in report["environment"]),
        }
        print("\n\n".join("\n".join([title, *lines]) for title, lines in sections.items() if any(lines)))
    if any(variable.error for variable in report["environment"]):
        return 2
    return 0 if isinstance(trace, Trace) and trace.picked and not isinstance(report["versions"]["torch"], Failure) else 1


def _mixed_precision(device: Device) -> tuple[str, str]:
    """Return the dtype that suits a model in mixed precision on `device`, and the reason."""
    if "fp16_tensor_cores" in device.features:
        return "float16", f"{device.name} has tensor cores for it"
    if device.type == "cuda" and device.capability:
        return "float32", f"{device.name} has no tensor cores: {why_float32('float16', device.capability)}"
    return "float32", f"float16 is no faster on {device.type}"


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


def _problem_facts(trace: Trace) -> dict[str, Any]:
    return trace.to_dict() | dict(flops=trace.problem.flops(), notes=list(_notes(trace.problem)))


def _notes(problem: Problem) -> Iterator[str]:
    """Yield what torch lacks, and a warning for half precision on a GPU that computes it slowly."""
    device, halves = problem.device, {"float16": "fp16_arithmetic", "bfloat16": "bf16"}
    if note := torch_note(device):
        yield note
    if device.type == "cuda" and problem.dtype in halves and halves[problem.dtype] not in device.features:
        yield f"{device.name} has no fast {problem.dtype} units: {problem.dtype} saves memory there, float32 is usually faster"


def _problem_lines(facts: Mapping[str, Any] | Failure) -> list[str]:
    if isinstance(facts, Failure):
        return wrapped("  cannot be judged: ", facts.error)
    requested = f"; asked for: {', '.join(facts['requested'])}" if facts["requested"] else ""
    lines = [*wrapped("  ", facts["problem"]), *wrapped("  on ", f"{facts['device']}{requested}")]
    lines += [f"  {facts['flops'] / 1e9:,.4g} nominal GFLOP forward", ""]
    lines += table((b["name"], b["verdict"], "\n".join(filter(None, (b["detail"], *b["reasons"])))) for b in facts["backends"])
    return [*lines, *(line for note in facts["notes"] for line in wrapped("  note: ", note))]


SEQ, BLOCK = 16384, 64
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
"""Options without meaning where each call gives the blocks: they are those of whole sequences."""


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


@dataclass(frozen=True)
class KindCell:
    """The backend of a kind of branch in a call with an option; `refusals`: reasons of the backends that lack least."""

    kind: str
    asked: str
    picked: str | None
    refusals: tuple[str, ...]


def kind_cells(device: Device, dtype: str, explain: Callable[[Problem], Trace]) -> list[KindCell]:
    """Return a cell for every kind and every option."""
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
            why = (f"{d.name}: {'; '.join(d.reasons)}" for d in others if len(d.reasons) == fewest)
            cells.append(KindCell(kind, asked, trace.picked, tuple(why)))
    return cells


def by_kind(cells: Iterable[KindCell]) -> dict[str, dict[str, str]]:
    """Return the picks by kind and option; "-" where there is no such call."""
    picked: dict[str, dict[str, str]] = {}
    for cell in cells:
        picked.setdefault(cell.kind, dict.fromkeys(ASKED, "-"))[cell.asked] = cell.picked or "none"
    return picked


def kind_lines(cells: Sequence[KindCell], device: Device) -> list[str]:
    """Return the table, and below it the reasons for which a GPU leaves calls to `reference`."""
    lines = table([("", *ASKED), *((kind, *picks.values()) for kind, picks in by_kind(cells).items())])
    left: dict[tuple[str, ...], list[str]] = {}
    for cell in cells if device.type == "cuda" else ():
        if cell.picked in (None, "reference"):
            left.setdefault(cell.refusals, []).append(f"{cell.kind} {cell.asked}")
    for refusals, whose in left.items():
        lines += ["", *wrapped("", f"left to the definition, which is slow: {', '.join(whose)}")]
        lines += table((why,) for why in refusals)
    return lines


_LABEL = 34
"""Characters of a device's name, at most."""


@dataclass(frozen=True)
class Cell:
    """The problem on one device in one dtype. `row`: number of the table's row that decided; None: another reason did."""

    label: str
    dtype: str
    trace: Trace
    row: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return dict(label=self.label, dtype=self.dtype, **self.trace.to_dict(), row=self.row)


def matrix(problem: Problem, here: Iterable[Device], backend: Sequence[str] | None) -> list[Cell]:
    """Return the trace of `problem`, on the devices `here` and on one of each generation, for each dtype."""
    cells = []
    for device in (*here, *(Device.assume("sm_{}{}".format(*generation.capability)) for generation in GENERATIONS)):
        kind = device.type if device.capability is None else "sm_{}{}".format(*device.capability)
        where = "" if device.assumed or device.type == "cpu" else f" {device.type}:{device.index}"
        label = textwrap.shorten(f"{kind}{where} {device.name}", _LABEL, placeholder="...")
        for dtype in DTYPES:
            posed = replace(problem, device=device, dtype=dtype)
            trace, row = explain(posed, backend), row_of(posed)
            decided = row and trace.picked and trace.why == row.preference.why(trace.picked)
            cells.append(Cell(label, dtype, trace, TABLE.index(row) + 1 if row and decided else None))
    return cells


def matrix_lines(cells: Sequence[Cell]) -> list[str]:
    """Return the picks, each with the number of the row that decided, and the rows; other reasons have letters."""
    letters: dict[str, str] = {}
    by_device: dict[str, list[str]] = {}
    for cell in cells:
        why = str(cell.trace.why)
        if cell.trace.picked and not cell.row:
            letters.setdefault(why, string.ascii_letters[len(letters)])
        text = f"{cell.trace.picked} {cell.row or letters[why]}" if cell.trace.picked else "none"
        by_device.setdefault(cell.label, []).append(text)
    lines = table([("", *DTYPES), *((label, *picks) for label, picks in by_device.items())])
    refusals = [(d.name, reason) for c in cells for d in c.trace.decisions if d.verdict == "refused" for reason in d.reasons]
    lines += table(dict.fromkeys(pair for pair in refusals if pair[1].startswith("module ")))  # what is not installed
    if letters:
        lines += ["", "picked for other reasons than the table's", *table((letter, reason) for reason, letter in letters.items())]
    head = f"the table of orders; the first row that fits decides. Of GPUs it holds {BY_DESIGN}, where no measurement is named"
    lines += ["", *wrapped("", head)]
    for number, row in enumerate(TABLE, 1):
        basis = "" if row.basis == BY_DESIGN else f" ({row.basis})"
        lines += wrapped(f"  {number:<3} ", f"{row.where}: {', '.join(row.order)}\n{row.why}{basis}")
    return lines
