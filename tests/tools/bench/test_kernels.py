"""Every CUDA kernel compiles for every kind of GPU, and fits: no spilled registers, no stack, shared memory that there is."""

from __future__ import annotations

import json

import pytest
from helpers.project import ROOT

from dilkit.backends.cuda.compile import compiler_version
from dilkit.backends.cuda.table import STORAGE, TABLE
from dilkit.tools.bench.kernels import CAPABILITIES, FIELDS, Build, builds, complaints, markdown, rows_in, rows_of, verdict

pytest.importorskip("cupy", reason="cupy is not installed")

EVERYWHERE = builds(head_dims=[64], dtypes=["float32"], vectors=[True])
TENSOR_CORES = builds([(7, 5)], [64], ["float16"], [True]) + builds(
    [c for c in CAPABILITIES if c >= (8, 0)], [64], ["bfloat16"], [True]
)
WIDE = [
    build
    for capability in ((6, 1), (9, 0))
    for dtype in ("float32", "float16")
    for build in builds([capability], [128], [dtype], [capability == (9, 0)])
]
USUAL = list(dict.fromkeys([*EVERYWHERE, *TENSOR_CORES]))
AT_LENGTH = [pytest.param(build, marks=pytest.mark.kernels) for build in WIDE]


@pytest.mark.parametrize("build", [*USUAL, *AT_LENGTH], ids=lambda build: build.name)
def test_a_kernel_compiles_and_fits(build: Build) -> None:
    """`make kernels` holds every size of every kernel to the same."""
    rows = rows_of(build)
    assert [row["name"] for row in rows] == list(build.names)
    assert {row["architecture"] for row in rows} == {"sm_{}{}".format(*build.capability)}
    assert [complaint for row in rows for complaint in complaints(row)] == []


def test_what_does_not_fit_is_told() -> None:
    row = dict(zip(FIELDS, ("name", "sm_75", "float16", 64, 1, 128, 2, 64, 40_000, 25_000, 99, 0, 0), strict=True))
    assert complaints(row) == []
    assert complaints({**row, "architecture": "sm_61"}) == [
        "name sm_61 float16 64 1: 25000 + 40000 bytes of shared memory, at most 48 KiB"
    ]
    assert complaints({**row, "dynamic": 41_000}) == [
        "name sm_75 float16 64 1: 25000 + 41000 bytes of shared memory, at most 64 KiB"
    ]
    assert complaints({**row, "spills": 8, "stack": 16}) == [
        "name sm_75 float16 64 1: 8 bytes of spills",
        "name sm_75 float16 64 1: 16 bytes of stack",
    ]


def test_every_kernel_is_compiled_for_every_kind_of_gpu_that_it_is_for() -> None:
    for entry in TABLE:
        serves = {build.capability for build in USUAL if entry.name in build.names}
        first = min(entry.dtypes.values())
        assert serves >= {capability for capability in CAPABILITIES if capability >= first}, entry.name
    assert {(build.dtype, build.head_dim, build.vector) for build in builds()} == {
        (dtype, head_dim, vector) for dtype in STORAGE for head_dim in (16, 32, 64, 96, 128) for vector in (True, False)
    }


def test_the_table_in_the_docs_is_of_these_kernels() -> None:
    """Where the compiler is the same, its report of one build of each file is what the table says."""
    result = json.loads((ROOT / "docs" / "results" / "kernels.json").read_text())
    if result["nvrtc"] != ".".join(map(str, compiler_version())):
        pytest.skip(f"the table was made with NVRTC {result['nvrtc']}")
    kept = rows_in(result)
    for build in builds([(8, 0)], [64], ["float32", "bfloat16"], [True]):
        for row in rows_of(build):
            assert {name: row[name] for name in FIELDS} in kept, "write the table anew with: make kernels"


def test_the_table_shows_registers_and_says_what_is_wrong() -> None:
    fine = "name sm_75 float16 64 1 128 2 128 0 25600 99 0 0"
    spilled = "name sm_80 float16 64 1 128 2 128 0 25600 255 8 16"
    result = dict(nvrtc="12.9", quick=False, fields=list(FIELDS), rows=[fine, spilled])
    assert verdict(result).endswith("2 times for 2 architectures: 1 SPILL registers or have a stack.")
    assert "| `name` | float16 | 64 | 128 | 128 | 2 | 25 KiB | 99 | 255 |" in markdown(result)
    assert verdict({**result, "rows": [fine]}).endswith("none spills a register or has a stack.")
    assert verdict({**result, "quick": True}).startswith("QUICK")
