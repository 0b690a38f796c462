"""The gradients on tensor cores, run on the CPU: against the oracle, in any order of threads, to the last bit the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers.host_launcher import HostLauncher
from torch import Tensor

from dilkit import Pattern, dilated_attention
from dilkit.backends.cuda.arguments import make_arguments
from dilkit.backends.cuda.table import CudaKernel, kernel_for
from dilkit.backends.tiles.schedule import LOW_ROWS, MOST_ROWS, schedule
from dilkit.problem import Problem
from dilkit.testing.accuracy import LIMITS
from dilkit.testing.conformance import expected
from dilkit.testing.problems import PROBLEMS, Case
from dilkit.testing.tensors import make_tensors

AMPERE, TURING, SMALLER = (8, 0), (7, 5), (8, 6)
ROLES = {"dquery": ("dq",), "dkeyvalue": ("dk", "dv")}

SMALL = [case for case in PROBLEMS if case.dtype in ("float16", "bfloat16") and case.gradients and not case.zero_keys]
DEEP = Pattern([256, 512], [1, 2])
LARGER = [
    Case(feature="tiles", variant=variant, **{"batch": 1, "heads": 2, "head_dim": 64, "dtype": "float16", **fields})
    for variant, fields in {
        "one class": dict(pattern=DEEP, seq=500),
        "causal": dict(pattern=DEEP, seq=515, is_causal=True, dtype="bfloat16"),
        "groups": dict(pattern=Pattern([128, 512], [1, 16]), seq=515, heads=3, dtype="bfloat16"),
        "groups of key heads causal": dict(pattern=Pattern([64, 384], [1, 3]), seq=400, heads=4, kv_heads=2, is_causal=True),
        "grouped heads": dict(pattern=Pattern([128, 256], [1, 3]), seq=300, heads=4, kv_heads=1, mask="random"),
        "dense causal": dict(pattern=Pattern.dense(), seq=333, is_causal=True, mask="left", batch=2),
        "16 of 16": dict(pattern=DEEP, seq=500, head_dim=16),
        "24 of 32": dict(pattern=DEEP, seq=400, head_dim=24, is_causal=True, dtype="bfloat16"),
        "72 of 96": dict(pattern=DEEP, seq=300, head_dim=72, mask="right"),
        "33 of 48 once": dict(pattern=Pattern([128, 384], [1, 3], overlap="once"), seq=400, head_dim=33),
        "128": dict(pattern=DEEP, seq=500, head_dim=128, dtype="bfloat16"),
        "120 of 128 causal": dict(pattern=DEEP, seq=300, head_dim=120, is_causal=True, kv_heads=1),
        "128 negative scale": dict(pattern=DEEP, seq=200, head_dim=128, scale=-0.2, values="large key"),
    }.items()
]


@dataclass(frozen=True)
class Way:
    """How kernels are run: those of which device and tiles, with 16-byte loads or (None) if the tensors allow them, in which
    order."""

    capability: tuple[int, int] = AMPERE
    most_rows: int = MOST_ROWS
    vector: bool | None = None
    launcher: HostLauncher = field(default_factory=HostLauncher)
    blocks: int = 3


def gradients(case: Case, way: Way, roles: Sequence[str] = tuple(ROLES)) -> dict[str, Tensor]:
    """What the kernels of `roles` compute of `case`, from what a forward in fp32 arithmetic has made of it."""
    problem, tensors = case.problem(), make_tensors(case)
    options = dict(is_causal=case.is_causal, key_padding_mask=tensors.mask, scale=case.scale)
    out, lse = dilated_attention(*tensors.qkv, case.pattern, backend="native", return_lse=True, **options)
    delta = (tensors.dout.double() * out.double()).sum(-1).transpose(1, 2) - tensors.dlse.double()
    found = dict(dquery=tensors.query, dkey=tensors.key, dvalue=tensors.value)
    found = {name: torch.full(x.shape, torch.nan, dtype=x.dtype) for name, x in found.items()}
    given = dict(query=tensors.query, key=tensors.key, value=tensors.value, dout=tensors.dout, **found)
    vector = way.vector if way.vector is not None else all(fits(x) for x in given.values())
    given |= dict(lse=lse.contiguous(), delta=delta.float().contiguous(), mask=tensors.mask)
    for role in roles:
        kernel = kernel_for(role, case.dtype, case.head_dim, way.capability, vector, way.most_rows)
        launch_groups(kernel, problem, given, way)
    return {"d" + name[1]: x for name, x in found.items() if any("d" + name[1] in ROLES[role] for role in roles)}


def launch_groups(kernel: CudaKernel, problem: Problem, given: dict[str, Tensor | None], way: Way) -> None:
    assert kernel.source == f"{kernel.name}.cu"
    assert kernel.name.startswith("mma")
    for i, group in enumerate(schedule(problem, kernel.tile_rows).groups):
        tiles = group.key_tiles if kernel.name == "mma_dkeyvalue" else group.query_tiles
        counter = np.zeros(1, np.int32)
        places = dict(tiles=tiles.ctypes.data, branches=group.branches.ctypes.data, counter=counter.ctypes.data)
        if len(tiles):
            way.launcher.launch(kernel, way.blocks, make_arguments(problem, given, group, len(tiles), places, first=i == 0))


def fits(x: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and are a multiple long."""
    sizes = x.data_ptr(), *(n * x.element_size() for n in (*x.stride()[:3], x.shape[-1]))
    return all(size % 16 == 0 for size in sizes)


def judge(case: Case, found: dict[str, Tensor]) -> None:
    want = expected(case)
    for name, x in found.items():
        error = torch.where(want.exact[name] == x, 0.0, (x.double() - want.exact[name]).abs()).nan_to_num(nan=torch.inf).max()
        assert error <= LIMITS[name] * want.error[name], f"{name}: {error:.3g}, plain torch {want.error[name]:.3g}"


@pytest.mark.kernels
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_problems(case: Case) -> None:
    judge(case, gradients(case, Way(launcher=HostLauncher("random", len(case.name)))))


USUAL = ("groups", "120 of 128 causal")
"""With each of the kernels; the others are compiled for other sizes."""


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.variant in USUAL else pytest.mark.slow, id=c.name) for c in LARGER]
)
def test_larger_problems(case: Case) -> None:
    judge(case, gradients(case, Way()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "capability"), [(16, AMPERE), (32, AMPERE), (48, AMPERE), (64, TURING), (96, TURING), (128, TURING)]
)
def test_low_tiles(head_dim: int, capability: tuple[int, int]) -> None:
    sizes = dict(pattern=DEEP, seq=300, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype="float16")
    case = Case(feature="low", variant="", is_causal=True, mask="random", **sizes)
    judge(case, gradients(case, Way(capability, LOW_ROWS)))


@pytest.mark.parametrize(
    ("head_dim", "capability"),
    [
        (128, AMPERE),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((32, AMPERE), (64, TURING), (128, SMALLER))),
        *(pytest.param(x, (12, 0), marks=pytest.mark.slow) for x in (32, 64)),
    ],
)
def test_the_same_bits_in_any_order_and_with_any_loads(head_dim: int, capability: tuple[int, int]) -> None:
    sizes = dict(pattern=DEEP, seq=200, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype="float16")
    case = Case(feature="bits", variant="", is_causal=True, mask="random", **sizes)
    want = gradients(case, Way(capability))
    for order, seed, vector, blocks in [("reverse", 0, True, 1), ("random", 1, True, 5), ("random", 2, False, 2)]:
        for name, x in gradients(case, Way(capability, vector=vector, launcher=HostLauncher(order, seed), blocks=blocks)).items():
            assert torch.equal(x, want[name])


@pytest.mark.parametrize(
    ("head_dim", "capability", "vector"),
    [
        (128, AMPERE, True),
        *(pytest.param(x, AMPERE, False, marks=pytest.mark.slow) for x in (16, 96, 128)),
        *(pytest.param(x, TURING, True, marks=pytest.mark.slow) for x in (48, 128)),
        pytest.param(64, AMPERE, True, marks=pytest.mark.slow),
    ],
)
def test_every_access_is_checked(head_dim: int, capability: tuple[int, int], vector: bool) -> None:
    """No race, nothing out of bounds, in tiles that follow one another, with several query heads and buffers turned over."""
    sizes = dict(pattern=DEEP, seq=230, batch=1, heads=2, kv_heads=1, head_dim=head_dim, dtype="float16")
    case = Case(feature="checked", variant="", is_causal=True, mask="random", **sizes)
    judge(case, gradients(case, Way(capability, vector=vector, launcher=HostLauncher("random", 1, checked=True), blocks=1)))


def test_two_warps_with_the_same_rows_load_half_as_often() -> None:
    """Fragments of keys and values for each product, of 256 queries and keys: every one serves 32 rows, not 16."""
    products = 3 * (256 // 16) * (256 // 8) * (128 // 16)
    case = Case(
        feature="loads", variant="", pattern=Pattern([256], [1]), seq=256, batch=1, heads=1, head_dim=128, dtype="float16"
    )
    loads = {}
    for capability, warps_of_a_row in ((AMPERE, 2), (SMALLER, 1)):
        way = Way(capability)
        gradients(case, way, ["dquery"])
        own = 2 * warps_of_a_row * (256 // 16) * (128 // 16)
        loads[capability] = (way.launcher.matrices / 4 - own) / products
    assert loads == {AMPERE: 0.25, SMALLER: 0.5}


@pytest.mark.parametrize(
    ("role", "capability", "of_a_tile"),
    [
        pytest.param("dquery", SMALLER, 5, id="mma_dquery"),
        pytest.param("dkeyvalue", AMPERE, 7, id="mma_dkeyvalue"),
        pytest.param("dquery", AMPERE, 6, id="mma_dquery_pairs"),
    ],
)
def test_threads_wait_for_each_other_no_more_often_than_they_must(role: str, capability: tuple[int, int], of_a_tile: int) -> None:
    """At the first tile, and in each of 4 tiles for 8 times 32 columns, and beside these: when the rows are in shared memory, in
    `mma_dquery_pairs` when they have left it, when columns are located, when these have been used, when a gradient is in
    shared memory, which is so twice for keys and values with a wait between, and when there is the next tile."""
    case = Case(
        feature="waits", variant="", pattern=Pattern([256], [1]), seq=256, batch=1, heads=1, head_dim=128, dtype="float16"
    )
    way = Way(capability, launcher=HostLauncher(workers=1), blocks=1)
    gradients(case, way, [role])
    assert way.launcher.barriers == 1 + 4 * (8 + of_a_tile)
