"""Shared memory is read and written without conflicts of banks, but for what is listed here with its reason."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers.host_compile import KERNELS
from helpers.host_launcher import HostLauncher
from helpers.on_host import FP32, TENSOR_CORES, both_passes

from dilkit import Pattern
from dilkit.device import Capability
from dilkit.testing.problems import Case

ROW_TERM = {"*row_term(": (3, "in the padding of the weights; once for 64 of the others, or once a tile")}
KNOWN: dict[str, dict[str, tuple[int, str]]] = {
    "fp32_forward.cu": {
        "positions[mine + key_in_column(piece * SWEEP)]": (1, "one number of four that a thread prefetches"),
        "positions[1][key_in_column(r)] =": (1, "once a tile"),
    },
    "fp32_backward.cuh": ROW_TERM,
    "fp32_dquery.cu": ROW_TERM,
    "fp32_dkeyvalue.cu": ROW_TERM,
    "mma_forward.cu": {
        "total[f][h]": (3, "of one thread next to each other: once a tile, or where maxima rise"),
        "totals[f][h]": (3, "the same, once a tile"),
        "total[f][0] += added[f][0], total[f][1] += added[f][1]": (3, "joined to one access of 16 bytes by NVRTC"),
    },
    "mma_backward.cuh": {
        "pair[0] = factor * sum[m][n][2 * h], pair[1] =": (1, "joined to one access of 8 bytes by NVRTC"),
    },
}
"""By file, what a line says, the most turns that an instruction there takes beyond those it needs, and why that is so."""


def excused(place: str, turns: float) -> str | None:
    """The part of `KNOWN` that a place and its turns fall under."""
    name, number = re.findall(r"([\w.]+):(\d+)", place)[0]
    line = (KERNELS / name).read_text().splitlines()[int(number) - 1]
    return next((text for text, (most, _) in KNOWN.get(name, {}).items() if text in line and turns <= most), None)


USUAL = [(FP32, "float32"), (TENSOR_CORES, "bfloat16")]
"""With rows of 32 numbers: what is checked for races is compiled for them too."""

AT_LENGTH = [
    pytest.param(capability, dtype, head_dim, marks=pytest.mark.kernels)
    for capability, dtype in (
        (FP32, "float32"),
        (FP32, "float16"),
        ((7, 5), "float16"),
        (TENSOR_CORES, "bfloat16"),
        ((9, 0), "float16"),
    )
    for head_dim in (16, 32, 48, 64, 96, 128)
    if head_dim != 32 or (capability, dtype) not in USUAL
]


@pytest.mark.parametrize(("capability", "dtype", "head_dim"), [*((*kind, 32) for kind in USUAL), *AT_LENGTH])
def test_no_kernel_has_conflicts_that_are_not_known(capability: Capability, dtype: str, head_dim: int) -> None:
    launcher = HostLauncher(workers=1, checked=True)
    sizes: dict[str, Any] = dict(pattern=Pattern([256], [1]), seq=256, batch=1, heads=1, head_dim=head_dim, dtype=dtype)
    both_passes(Case(feature="banks", variant="", is_causal=True, **sizes), capability, launcher)
    found = {f"{size} bytes at {where}": turns / n for (where, size), (n, turns) in launcher.turns.items() if turns}
    assert {place: turns for place, turns in found.items() if not excused(place, turns)} == {}
    assert found, "what is known is seen"
    assert launcher.conflicts == 0, "matrices for tensor cores"
    assert len(launcher.turns) > 50
    assert (launcher.matrices > 0) == (capability != FP32)


def test_what_is_known_is_there() -> None:
    for name, lines in KNOWN.items():
        source = (KERNELS / name).read_text()
        assert [text for text in lines if text not in source] == []
