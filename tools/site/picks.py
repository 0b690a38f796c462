"""Tables of what the automatic choice picks on each kind of device, where all that dilkit can use is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

from dilkit import Pattern, backend, registry
from dilkit.backend import Backend
from dilkit.device import GENERATIONS, Device
from dilkit.problem import Problem
from dilkit.selection.preference_table import table_preference
from dilkit.selector import Trace, trace
from dilkit.tools.commands.info_tables import ASKED, by_kind, kind_cells
from dilkit.tools.report.markdown import rows_markdown

PATTERN = Pattern([2048, 4096, 8192, 16384], [1, 2, 4, 8])
OTHER_KERNELS = ("flash_attn", "flash_attn_interface")
"""Libraries that would change the picks where they are installed."""
DTYPES = ("float16", "bfloat16", "float32")


def own_backends() -> list[Backend]:
    """The backends of dilkit itself, those that the automatic choice prefers first."""
    known = (b for b in registry.backends().values() if isinstance(b, Backend))
    ours = [b for b in known if type(b).__module__.startswith("dilkit.backends.")]
    return sorted(ours, key=lambda b: (-b.priority, b.name))


def pick_table(root: Path) -> str:
    """What would run on each known GPU generation, for training, with torch and no other library of kernels."""
    rows: list[tuple[str, ...]] = [("device", "architecture, for example", *DTYPES)]
    for name, shown in _generations().items():
        rows.append((f"`{name}`", shown, *map(partial(_pick, Device.assume(name)), DTYPES)))
    return rows_markdown(rows)


def kind_table(root: Path) -> str:
    """Who computes each kind of branch: a row for the CPU, and one for all GPUs with the same picks of bfloat16."""
    devices = {"CPU": Device.assume("cpu"), **{name: Device.assume(name) for name in _generations()}}
    rows: list[tuple[str, ...]] = [("kind of branch", "on", *ASKED)]
    with _all_installed():
        picked = {name: by_kind(kind_cells(device, "bfloat16", _traced)) for name, device in devices.items()}
    for kind in picked["CPU"]:
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in devices:
            alike.setdefault(tuple(picked[name][kind].values()), []).append(name)
        rows += ((f"`{kind}`" * (i == 0), _span(names), *map(_code, cells)) for i, (cells, names) in enumerate(alike.items()))
    return rows_markdown(rows)


def _generations() -> dict[str, str]:
    names = ("sm_{}{}".format(*generation.capability) for generation in GENERATIONS)
    return dict(zip(names, (f"{generation.architecture}, {generation.example}" for generation in GENERATIONS), strict=True))


@contextmanager
def _all_installed() -> Iterator[None]:
    with mock.patch.object(backend, "_installed", lambda module: module not in OTHER_KERNELS):
        yield


def _traced(problem: Problem) -> Trace:
    return trace(problem, {b.name: b for b in own_backends()}, (), table_preference(problem))


def _pick(device: Device, dtype: str) -> str:
    problem = Problem(
        pattern=PATTERN, seq=131072, heads=8, head_dim=64, dtype=dtype, device=device, is_causal=True, requires_grad=True
    )
    with _all_installed():
        decided = _traced(problem).decisions[0]
    detail = decided.detail.partition(";")[0]  # beyond that, why not something else
    return f"`{decided.name}` ({detail})" if detail else f"`{decided.name}`"


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _code(name: str) -> str:
    return name if name in ("-", "none") else f"`{name}`"
