"""Tables of backends: limits, and the automatic choice on each kind of device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

from dilkit import Pattern, backend, registry
from dilkit.backend import COUNT, Backend, Limits
from dilkit.device import GENERATIONS, Device
from dilkit.pattern.lowering import FORMS, Segments, lower
from dilkit.problem import DTYPES, Problem
from dilkit.selection.preference_table import table_preference
from dilkit.selector import Trace, trace
from dilkit.tools.commands.info import ASKED, BY_CALL, SEQ, by_kind, examples, kind_cells
from dilkit.tools.report.markdown import rows_markdown

LIMITS = {"packed sequences": "varlen", "cache of all keys": "kv_cache", "dropout": "dropout", "sinks": None}
LIMITS |= {"softcap": "softcap", "biases": "biases"}
"""Features of calls, and the limit of a backend for each; None: the operator adds it to any backend's results."""
PATTERN = Pattern([2048, 4096, 8192, 16384], [1, 2, 4, 8])
PICKED_DTYPES = ("float16", "bfloat16", "float32")
OTHER_KERNELS = ("flash_attn", "flash_attn_interface")
"""Libraries that would change the picks where they are installed."""


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


def _gaps(limits: Limits) -> list[str]:
    """Return all that limits leave out beside devices and dtypes."""
    flags = ("causal", "key_padding_mask", "gradients", "varlen", "kv_cache", "dropout", "grouped_heads", "head_ranges")
    gaps = [flag.replace("_", " ") for flag in flags if not getattr(limits, flag)]
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


def support_table(root: Path) -> str:
    """Return a row for each backend: the features and the kinds of branches that it computes."""
    branches = {name: branch for name, branch in examples().items() if name != BY_CALL}
    needed = {name: lower(Pattern.of(branch), SEQ, 1).names for name, branch in branches.items()}
    rows = [("backend", *LIMITS, "kinds of branches")]
    for b in own_backends():
        able = ("yes" if flag is None or getattr(b.limits, flag) else "no" for flag in LIMITS.values())
        forms = b.limits.forms or frozenset({Segments.name})
        forms = FORMS if COUNT in forms else forms
        kinds = ", ".join(f"`{name}`" for name, names in needed.items() if names <= forms)
        rows.append((f"`{b.name}`", *able, kinds))
    return rows_markdown(rows)


def pick_table(root: Path) -> str:
    """Return the backend picked for training on each GPU generation, with torch and no other library of kernels."""
    rows: list[tuple[str, ...]] = [("device", "architecture, for example", *PICKED_DTYPES)]
    for name, shown in _generations().items():
        rows.append((f"`{name}`", shown, *map(partial(_pick, Device.assume(name)), PICKED_DTYPES)))
    return rows_markdown(rows)


def _pick(device: Device, dtype: str) -> str:
    problem = Problem(
        pattern=PATTERN, seq=131072, heads=8, head_dim=64, dtype=dtype, device=device, is_causal=True, requires_grad=True
    )
    with _all_installed():
        decided = _traced(problem).decisions[0]
    detail = decided.detail.partition(";")[0]  # beyond that, why not something else
    return f"`{decided.name}` ({detail})" if detail else f"`{decided.name}`"


def kind_table(root: Path) -> str:
    """Return the backend of each kind of branch: a row for the CPU, and one for all GPUs with the same picks of bfloat16."""
    devices = {"CPU": Device.assume("cpu"), **{name: Device.assume(name) for name in _generations()}}
    rows: list[tuple[str, ...]] = [("kind of branch", "on", *ASKED)]
    with _all_installed():
        picked = {name: by_kind(kind_cells(device, "bfloat16", _traced)) for name, device in devices.items()}
    for kind in picked["CPU"]:
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in devices:
            alike.setdefault(tuple(picked[name][kind].values()), []).append(name)
        for i, (cells, names) in enumerate(alike.items()):
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            rows.append((f"`{kind}`" * (i == 0), span, *(cell if cell in ("-", "none") else f"`{cell}`" for cell in cells)))
    return rows_markdown(rows)


def _generations() -> dict[str, str]:
    return {"sm_{}{}".format(*one.capability): f"{one.architecture}, {one.example}" for one in GENERATIONS}


def _all_installed() -> AbstractContextManager[object]:
    return mock.patch.object(backend, "_installed", lambda module: module not in OTHER_KERNELS)


def _traced(problem: Problem) -> Trace:
    return trace(problem, {b.name: b for b in own_backends()}, (), table_preference(problem))
