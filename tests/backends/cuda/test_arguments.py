"""The argument of the CUDA kernels: numpy's layout of the structs against the C compiler's, and their values."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import torch
from helpers.project import ROOT

from dilkit import Pattern
from dilkit.backends.cuda.arguments import _PACKED, ARGUMENTS, STEP, VIEW, make_arguments
from dilkit.backends.tiles.relations import FAR
from dilkit.backends.tiles.schedule import BRANCH, TILE, schedule
from dilkit.problem import Problem

HEADER = ROOT / "backends/cuda/kernels/dilated.cuh"
STRUCTS = {"View": VIEW, "StepTables": STEP, "Args": ARGUMENTS, "Tile": TILE, "Branch": BRANCH}


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
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    ours = [f"{name} {field} {d.fields[field][1]}" for name, d in STRUCTS.items() if d.fields for field in d.names or ()]
    assert printed == ours + [f"{name} size {d.itemsize}" for name, d in STRUCTS.items()]
    for text in wanted:
        name = text.rpartition("}")[2].strip(" ;")
        types = r"\b(void|long long|short|int|float|View|StepTables|const|unsigned char|unsigned|Tile|Branch)\b"
        body = re.sub(types, "", text.partition("{")[2])
        assert re.findall(r"\w+", body.rpartition("}")[0]) == list(STRUCTS[name].names or ())


def test_arguments_hold_what_the_problem_and_the_tensors_are() -> None:
    sizes = dict(seq=20, heads=4, kv_heads=2, head_dim=8, batch=3, scale=2.0)
    problem = Problem(pattern=Pattern([8, 16], [1, 2], overlap="once"), **sizes)
    q, k = torch.zeros(3, 20, 4, 8), torch.zeros(3, 40, 2, 8)[:, ::2]
    mask = torch.zeros(20, 3, dtype=torch.bool).T
    (group,) = schedule(problem, 4).groups
    tensors = {"query": q, "key": k, "value": k, "mask": mask, "delta": None}
    assert _PACKED.size == ARGUMENTS.itemsize
    arguments = make_arguments(problem, tensors, group, len(group.query_tiles), {"tiles": 16, "branches": 32}, first=True)
    assert arguments["query"].tolist() == (q.data_ptr(), 640, 32, 8)
    assert arguments["key"].tolist() == (k.data_ptr(), 640, 32, 8)
    assert arguments["mask"] == mask.data_ptr()
    assert (arguments["mask_batch"], arguments["mask_row"]) == (1, 3)
    assert (arguments["tiles"], arguments["branches"], arguments["counter"], arguments["delta"]) == (16, 32, 0, 0)
    numbers = {name: int(arguments[name]) for name in ("batch", "seq", "heads", "kv_heads", "head_dim", "branch_count")}
    assert numbers == dict(batch=3, seq=20, heads=4, kv_heads=2, head_dim=8, branch_count=2)
    assert (arguments["back"], arguments["ahead"]) == (FAR, FAR)
    assert (arguments["once"], arguments["first"], arguments["scale"]) == (1, 1, np.float32(2))
    assert arguments["tile_count"] == len(group.query_tiles)
