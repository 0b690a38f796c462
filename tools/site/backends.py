"""Tables of backends: limits, status, and the automatic choice on each GPU generation."""

import inspect
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from unittest import mock

import dilkit
import dilkit.comm
from dilkit import Pattern, backend, registry
from dilkit.backend import COUNT, Backend, Limits
from dilkit.device import GENERATIONS, Device
from dilkit.pattern.lowering import Band, CutGrid, Form, Global, Grid, Runs, Segments, lower
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference_table import TABLE, table_preference
from dilkit.selector import trace
from dilkit.tools.commands.info import BY_CALL, SEQ, examples
from dilkit.tools.report.markdown import rows_markdown
from dilkit.tools.results.file import read_result
from dilkit.tools.results.rows import RowsResult
from dilkit.tools.site import figures

FLAGS = {
    "causal": "causal",
    "key_padding_mask": "key padding masks",
    "gradients": "gradients",
    "varlen": "packed sequences",
    "query_offset": "other queries than keys",
}
FLAGS |= {"kv_cache": "cache of all keys", "dropout": "dropout", "softcap": "softcap", "biases": "biases"}
FLAGS |= {"grouped_heads": "grouped heads", "head_ranges": "head ranges"}
"""Limits of a backend that allow a feature of calls."""
PICKED_PATTERNS = {
    "A": Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16]),
    "window": Pattern.longformer(512, global_tokens=64),
}
CALLS = ["dilated_attention", "dilated_attention_varlen", "dilated_attention_with_kvcache", "DilatedCache.attend"]
CALLS += ["PagedCache.attend", "ordered_dilated_attention", "comm.ring_dilated_attention", "comm.ring_dilated_attention_varlen"]
PICKED_DTYPES = ("float16", "bfloat16", "float32")


def own_backends() -> list[Backend]:
    """Return dilkit's backends, those that the automatic choice prefers first."""
    known = (b for b in registry.backends().values() if isinstance(b, Backend))
    ours = [b for b in known if type(b).__module__.startswith("dilkit.backends.")]
    return sorted(ours, key=lambda b: (-b.priority, b.name))


def backend_table(root: Path) -> str:
    """Return a row for each backend: its summary and its limits."""
    rows = [("backend", "what it is", "needs", "devices", "dtypes", "not supported")]
    for b in own_backends():
        limits = b.limits
        devices = "any" if limits.devices is None else ", ".join(sorted(limits.devices))
        dtypes = "all four" if limits.dtypes == set(DTYPES) else ", ".join(d for d in DTYPES if d in limits.dtypes)
        rows.append((f"`{b.name}`", b.summary, ", ".join(b.requires), devices, dtypes, ", ".join(_gaps(limits)) or "-"))
    return rows_markdown(rows)


def form_table(root: Path) -> str:
    """Return a row for each form that kernels know: the first line of its docstring, and its fields."""
    rows = [("form", "what it shows", "fields")]
    for form in (Segments, Band, Global, Runs, Grid, CutGrid, Form):
        common = set() if form is Form else {field.name for field in fields(Form)}
        shown = [
            f"`{field.name}: {str(field.type).replace(' | ', ' or ')}`" for field in fields(form) if field.name not in common
        ]
        rows.append(
            ("every form" if form is Form else f"`{form.__name__}`", (form.__doc__ or "").partition("\n")[0], ", ".join(shown))
        )
    return rows_markdown(rows)


def call_table(root: Path) -> str:
    """Return a row for each call of attention: which options it has. Without `is_causal` a call is always causal."""
    options = ("is_causal", "key_padding_mask", "dropout_p", "sink", "bias", "softcap", "return_lse")
    rows = [("call", *(f"`{option}=`" for option in options))]
    for name in CALLS:
        taken = inspect.signature(attrgetter(name)(dilkit)).parameters
        rows.append((f"`{name}`", *("yes" if o in taken else "always" if o == "is_causal" else "no" for o in options)))
    return rows_markdown(rows)


def status_table(root: Path) -> str:
    """Return the devices on which each backend was held to the oracle and timed, by the results in docs/results."""
    results = root / "docs" / "results"
    timed = {
        row.who for path in results.glob("cpu-*.json") for row in read_result(path, RowsResult, "suite-cpu").rows if row.samples
    }
    emulated = {
        row.who for path in results.glob("ptx.json") for row in read_result(path, RowsResult, "ptx").rows if row.table == "trials"
    }
    gpus = figures.gpu_counts(results)
    rows = [("backend", "right on", "timed on", "not run on")]
    for b in own_backends():
        counts = {gpu: n for (gpu, name), n in sorted(gpus.items()) if name == b.name and not n["wrong"]}
        on_cpu = b.limits.devices is None or "cpu" in b.limits.devices
        right = ["CPUs"] * on_cpu + ["emulated on CPUs"] * (b.name in emulated) + list(counts)
        clocked = ["CPUs"] * (b.name in timed) + [gpu for gpu, n in counts.items() if n["timed"]]
        missing = "-" if b.limits.devices == frozenset({"cpu"}) else "other GPUs" if counts else "GPUs"
        rows.append((f"`{b.name}`", "; ".join(right) or "-", "; ".join(clocked) or "-", missing))
    return rows_markdown(rows)


def _gaps(limits: Limits) -> list[str]:
    gaps = [words for flag, words in FLAGS.items() if not getattr(limits, flag)]
    forms = limits.forms or frozenset({Segments.name})
    kinds = {name: lower(Pattern.of(branch), SEQ, 1).names for name, branch in examples().items() if name != BY_CALL}
    gaps += [f"`{name}`" for name, names in kinds.items() if COUNT not in forms and not names <= forms]
    everything = Limits()
    for name in ("offsets", "overlaps"):
        gaps += [f"{name.removesuffix('s')} {value!r}" for value in sorted(getattr(everything, name) - getattr(limits, name))]
    if limits.min_capability:
        gaps.append("capability below {}.{}".format(*limits.min_capability))
    if limits.max_capability:
        gaps.append("capability above {}.{}".format(*limits.max_capability))
    if limits.max_head_dim:
        gaps.append(f"head_dim above {limits.max_head_dim}")
    if limits.head_dim_multiple > 1:
        gaps.append(f"head_dim not a multiple of {limits.head_dim_multiple}")
    return gaps


def pick_table(root: Path) -> str:
    """Return the backend picked on each GPU generation, without other libraries of kernels, and all rows."""
    rows: list[tuple[str, ...]] = [("device", "architecture, for example", "pattern", *PICKED_DTYPES)]
    names = {"sm_{}{}".format(*one.capability): f"{one.architecture}, {one.example}" for one in GENERATIONS}
    for name, example in {**names, "gfx942": "AMD CDNA 3, MI300X"}.items():
        for called, pattern in PICKED_PATTERNS.items():
            cells = []
            for dtype in PICKED_DTYPES:
                picks = [_pick(pattern, Device.assume(name), dtype, training) for training in (False, True)]
                cells.append("; training: ".join(dict.fromkeys(picks)))
            rows.append((f"`{name}`", example, called, *cells))
    reasons = [("row", "problems", "comes first", "why", "basis")]
    reasons += [(str(n), row.where, f"`{row.order[0]}`", row.why, row.basis) for n, row in enumerate(TABLE, 1)]
    return f"{rows_markdown(rows)}\n\n{rows_markdown(reasons)}"


def _pick(pattern: Pattern, device: Device, dtype: str, training: bool) -> str:
    """Return the backend that is picked, its kernel, and the number of the row of the preference table that decides."""
    problem = Problem(pattern=pattern, seq=131072, heads=8, head_dim=64, dtype=dtype, device=device, requires_grad=training)
    with mock.patch.object(backend, "_installed", lambda module: not module.startswith("flash_attn")):
        traced = trace(problem, {b.name: b for b in own_backends()}, (), table_preference(problem))
    decided = traced.decisions[0]
    detail = decided.detail.partition(";")[0]  # beyond that, why not something else
    number = next(number for number, row in enumerate(TABLE, 1) if row.fits(problem))
    return f"`{decided.name}`{f' ({detail})' * bool(detail)} {number}"
