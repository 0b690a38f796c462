"""Tiles whose rows are so far apart that rows beyond the tile have no 32-bit position."""

import numpy as np
import pytest
import torch
from helpers.on_host import Compiled

from dilkit import Pattern
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import kernel_for
from dilkit.backends.tiles.schedule import BRANCH, LOW_ROWS, MOST_ROWS, TILE, Group
from dilkit.problem import Problem

SEQ, STEP, ROW = 2**26, 2**25, 5
"""Two of the 64 or 128 rows that a tile has room for: `ROW`, and a step further."""

KINDS = {
    "fp32_forward": ("forward", "float16", (5, 2), 64, MOST_ROWS),
    "fp32_dquery": ("dquery", "float32", (6, 1), 20, MOST_ROWS),
    "fp32_dkeyvalue": ("dkeyvalue", "float32", (9, 0), 20, MOST_ROWS),
    "mma_forward low": ("forward", "float16", (8, 0), 128, LOW_ROWS),
    "mma_forward tall": ("forward", "float16", (9, 0), 128, MOST_ROWS),
    "mma_dquery": ("dquery", "float16", (8, 0), 64, MOST_ROWS),
    "mma_dquery_pairs": ("dquery", "float16", (8, 0), 128, MOST_ROWS),
    "mma_dkeyvalue": ("dkeyvalue", "float16", (8, 0), 64, MOST_ROWS),
}
USUAL = ("fp32_dquery", "mma_dkeyvalue")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind in USUAL else pytest.mark.slow) for kind in KINDS])
def test_no_number_exceeds_its_type(kind):
    """All rows share one memory: out is the value, and the two rows see one key and both."""
    role, dtype, capability, dim, rows = KINDS[kind]
    sizes = dict(seq=SEQ, heads=1, head_dim=dim, dtype=dtype)
    problem = Problem(pattern=Pattern([SEQ], [STEP]), is_causal=True, scale=0.5, **sizes)
    kernel, launcher = kernel_for(role, dtype, dim, capability, True, rows), Compiled(checked=True, arch=100 * capability[0])
    tiles = np.array([(ROW, 1, STEP, 0, 2)], TILE)
    group = Group(np.array([(SEQ, STEP, 0, 1)], BRANCH), tiles, tiles, ahead=0)
    places = dict(tiles=tiles.ctypes.data, branches=group.branches.ctypes.data)
    row = torch.linspace(-1, 1, dim).to(getattr(torch, dtype)).view(1, 1, 1, dim)
    one = {name: row.clone() for name in ("query", "key", "value", "dout")}
    one |= {name: torch.full_like(row, torch.nan) for name in ("out", "dquery", "dkey", "dvalue")}
    score = 0.5 * row.float().square().sum()
    seen = torch.stack([score, score + np.log(2)])
    lse, delta = (torch.from_numpy(np.zeros((1, 1, SEQ), np.float32)) for _ in range(2))  # only what is touched takes memory
    lse[..., [ROW, ROW + STEP]], delta[..., [ROW, ROW + STEP]] = seen, 2 * score
    given = {**{name: x.expand(1, SEQ, 1, dim) for name, x in one.items()}, "lse": lse, "delta": delta}
    for first in (True, False):
        launcher.launch(kernel, 1, make_arguments(problem, given, group, 1, places, first))
        if role == "forward":
            torch.testing.assert_close(one["out"], row)
            torch.testing.assert_close(lse[0, 0, [ROW, ROW + STEP]], seen if first else seen + np.log(2))
    for name in {"forward": (), "dquery": ("dquery",), "dkeyvalue": ("dkey", "dvalue")}[role]:
        assert one[name].isfinite().all()
