"""The argument of the CUDA kernels."""

import re
import subprocess

import numpy as np
import pytest
import torch
from helpers.project import ROOT

from dilkit import Pattern
from dilkit.backends.cuda.arguments import ARGUMENTS, PARTS, STEP, VIEW, make_arguments
from dilkit.backends.cuda.table import HEAD_DIMS, STORAGE, TABLE, kernel_for, padded
from dilkit.backends.tiles.backend import ROLES
from dilkit.backends.tiles.relations import FAR
from dilkit.backends.tiles.schedule import BRANCH, TILE, schedule
from dilkit.problem import Problem

HEADER = ROOT / "backends/cuda/kernels/dilated.cuh"
STRUCTS = {"View": VIEW, "StepTables": STEP, "Args": ARGUMENTS, "Tile": TILE, "Branch": BRANCH}
TYPES = r"\b(void|long long|short|int|float|View|StepTables|const|unsigned char|unsigned|Tile|Branch)\b"


def test_numpy_lays_out_the_structs_as_c_does(tmp_path):
    texts = re.findall(r"typedef struct (\{.*?\}) (\w+);", HEADER.read_text(), re.DOTALL)
    wanted = {name: body for body, name in texts if name in STRUCTS}
    assert {name: re.findall(r"\w+", re.sub(TYPES, "", body)) for name, body in wanted.items()} == {
        name: [*(kind.names or ())] for name, kind in STRUCTS.items()
    }
    places = [(name, field, kind.fields[field][1]) for name, kind in STRUCTS.items() if kind.fields for field in kind.names or ()]
    checks = [f"_Static_assert(offsetof({name}, {field}) == {place}, #name);" for name, field, place in places]
    checks += [f"_Static_assert(sizeof({name}) == {kind.itemsize}, #name);" for name, kind in STRUCTS.items()]
    source = tmp_path / "layout.c"
    structs = [f"typedef struct {body} {name};" for name, body in wanted.items()]
    source.write_text("\n".join(["#include <stddef.h>", *structs, *checks]).replace("#name", '"laid out otherwise"'))
    subprocess.run(["gcc", "-fsyntax-only", str(source)], check=True)
    assert sum(part.size for part in PARTS) == ARGUMENTS.itemsize


def test_arguments_hold_what_the_problem_and_the_tensors_are():
    sizes = dict(seq=20, heads=4, kv_heads=2, head_dim=8, batch=3, scale=2.0)
    problem = Problem(pattern=Pattern([8, 16], [1, 2], overlap="once"), **sizes)
    q, k = torch.zeros(3, 20, 4, 8), torch.zeros(3, 40, 2, 8)[:, ::2]
    mask = torch.zeros(20, 3, dtype=torch.bool).T
    (group,) = schedule(problem, 4).groups
    tensors = {"query": q, "key": k, "value": k, "mask": mask, "delta": None}
    arguments = make_arguments(problem, tensors, group, len(group.query_tiles), {"tiles": 16, "branches": 32}, first=True)
    assert arguments["query"].tolist() == (q.data_ptr(), 640, 32, 8)
    assert arguments["key"].tolist() == (k.data_ptr(), 640, 32, 8)
    want = dict(batch=3, seq=20, heads=4, kv_heads=2, head_dim=8, branch_count=2, tile_count=len(group.query_tiles))
    want |= dict(mask=mask.data_ptr(), mask_batch=1, mask_row=3, tiles=16, branches=32, counter=0, delta=0)
    want |= dict(back=FAR, ahead=FAR, once=1, first=1, scale=np.float32(2))
    assert {name: arguments[name] for name in want} == want


@pytest.mark.parametrize(
    ("dtype", "last_without", "first_with"),
    [("float32", (12, 0), None), ("float16", (7, 0), (7, 5)), ("bfloat16", (7, 5), (8, 0))],
)
def test_tensor_cores_serve_half_types_where_they_are(dtype, last_without, first_with):
    for role in ("forward", "dquery", "dkeyvalue"):
        for capability in ((5, 2), last_without):
            assert kernel_for(role, dtype, 64, capability).name.startswith("fp32")
        for capability in (first_with, (12, 0)) if first_with else ():
            assert kernel_for(role, dtype, 64, capability).name.startswith("mma")


def test_every_head_dim_and_role_has_a_kernel():
    for role in (*ROLES, "stored"):
        for head_dim in range(1, 129):
            for dtype, storage in STORAGE.items():
                macros = kernel_for(role, dtype, head_dim, (8, 0)).macros
                assert (macros["HEAD_DIM"], macros["STORAGE"]) == (padded(head_dim), storage)
    assert {padded(d) for d in range(1, 129)} == set(HEAD_DIMS)
    assert {entry.role for entry in TABLE} == {*ROLES, "stored"}
    with pytest.raises(ValueError, match="head_dim=129"):
        padded(129)
    with pytest.raises(ValueError, match=r"capability 5\.0"):
        kernel_for("forward", "float32", 64, (5, 0))
