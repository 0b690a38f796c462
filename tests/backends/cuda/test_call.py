"""The structs that kernels take: numpy's layout against the C compiler's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.project import ROOT

from dilkit import Pattern
from dilkit.backends.cuda.call import _PACKED, CALL, VIEW, make_call
from dilkit.backends.cuda.table import HEAD_DIMS, ROLES, STORAGE, TABLE, kernel_for, padded
from dilkit.backends.tiles.schedule import BRANCH, TILE, schedule
from dilkit.problem import Problem

HEADER = ROOT / "backends/cuda/kernels/dilated.cuh"
STRUCTS = {"View": VIEW, "Call": CALL, "Tile": TILE, "Branch": BRANCH}


def test_numpy_lays_out_the_structs_as_c_does(tmp_path: Path) -> None:
    structs = re.findall(r"typedef struct \{.*?\} \w+;", HEADER.read_text(), re.DOTALL)
    wanted = [text for text in structs if text.rpartition("}")[2].strip(" ;") in STRUCTS]
    assert len(wanted) == len(STRUCTS)
    shown = [
        f'printf("{name} {field} %zu\\n", offsetof({name}, {field}));' for name, d in STRUCTS.items() for field in d.names or ()
    ] + [f'printf("{name} size %zu\\n", sizeof({name}));' for name in STRUCTS]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join(["#include <stddef.h>", "#include <stdio.h>", *wanted, "int main(void) {", *shown, "}"]))
    subprocess.run(["gcc", str(source), "-o", str(program)], check=True)
    told = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = [f"{name} {field} {d.fields[field][1]}" for name, d in STRUCTS.items() if d.fields for field in d.names or ()]
    assert told == ours + [f"{name} size {d.itemsize}" for name, d in STRUCTS.items()]
    for text in wanted:
        name = text.rpartition("}")[2].strip(" ;")
        body = re.sub(r"\b(void|long long|int|float|View|const|unsigned char|Tile|Branch)\b", "", text.partition("{")[2])
        assert re.findall(r"\w+", body.rpartition("}")[0]) == list(STRUCTS[name].names or ())


def test_a_call_says_what_the_problem_and_the_tensors_are() -> None:
    sizes = dict(seq=20, heads=4, kv_heads=2, head_dim=8, batch=3, scale=2.0)
    problem = Problem(pattern=Pattern([8, 16], [1, 2], overlap="once"), **sizes)
    q, k = torch.zeros(3, 20, 4, 8), torch.zeros(3, 40, 2, 8)[:, ::2]
    mask = torch.zeros(20, 3, dtype=torch.bool).T
    (group,) = schedule(problem, 4).groups
    tensors = {"query": q, "key": k, "value": k, "mask": mask, "delta": None}
    assert _PACKED.size == CALL.itemsize
    call = make_call(problem, tensors, group, len(group.query_tiles), {"tiles": 16, "branches": 32}, first=True)
    assert call["query"].tolist() == (q.data_ptr(), 640, 32, 8)
    assert call["key"].tolist() == (k.data_ptr(), 640, 32, 8)
    assert call["mask"] == mask.data_ptr()
    assert (call["mask_batch"], call["mask_row"]) == (1, 3)
    assert (call["tiles"], call["branches"], call["counter"], call["delta"]) == (16, 32, 0, 0)
    numbers = {name: int(call[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "step", "branch_count")}
    assert numbers == dict(batch=3, seq=20, heads=4, kv_heads=2, head_dim=8, step=2, branch_count=2)
    assert (call["causal"], call["once"], call["first"], call["scale"]) == (0, 1, 1, np.float32(2))
    assert call["tile_count"] == len(group.query_tiles)


@pytest.mark.parametrize(
    ("dtype", "capability", "source"),
    [
        ("float32", (5, 2), "fp32"),
        ("float32", (9, 0), "fp32"),
        ("float16", (6, 1), "fp32"),
        ("float16", (7, 0), "fp32"),
        ("float16", (7, 5), "mma"),
        ("bfloat16", (7, 5), "fp32"),
        ("bfloat16", (8, 0), "mma"),
        ("bfloat16", (12, 0), "mma"),
    ],
)
def test_tensor_cores_serve_half_types_where_they_are(dtype: str, capability: tuple[int, int], source: str) -> None:
    for role in ("forward", "dquery", "dkeyvalue"):
        assert kernel_for(role, dtype, 64, capability).name.startswith(source)


def test_every_head_dim_and_role_has_a_kernel() -> None:
    for role in ROLES:
        for head_dim in range(1, 129):
            for dtype, storage in STORAGE.items():
                kernel = kernel_for(role, dtype, head_dim, (8, 0))
                assert kernel.macros["HEAD_DIM"] == padded(head_dim)
                assert kernel.macros["STORAGE"] == storage
    assert {padded(d) for d in range(1, 129)} == set(HEAD_DIMS)
    assert {entry.role for entry in TABLE} == set(ROLES)
    with pytest.raises(ValueError, match="head_dim=129"):
        padded(129)
    with pytest.raises(ValueError, match=r"capability 5\.0"):
        kernel_for("forward", "float32", 64, (5, 0))
