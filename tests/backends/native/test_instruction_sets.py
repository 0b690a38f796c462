"""Every instruction set of the CPU kernel that runs here."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import huge_scores
from helpers.pairwise import diagonal

from dilkit import BlockSparse, DilatedSegment, GlobalTokens, Neighborhood, Pattern, SlidingWindow, Strided, dilated_attention
from dilkit.backends.native import _native
from dilkit.backends.native.backend import Native
from dilkit.environment import BF16_SETS
from dilkit.problem import DTYPES, Problem
from dilkit.selector import explain, select
from dilkit.testing.conformance import check
from dilkit.testing.problems import DROPPING, PROBLEMS, SCORES, Case
from dilkit.testing.tensors import HUGE

LONG = {
    "nested": dict(pattern=Pattern([128, 256, 512], [1, 2, 4]), heads=2),
    "not nested": dict(pattern=Pattern([150, 330], [1, 3]), heads=2),
    "few rows in a segment": dict(pattern=Pattern([16, 700], [1, 8]), heads=2),
    "odd head_dim": dict(pattern=Pattern([200, 512], [1, 3]), heads=1, head_dim=75),
    "dense grouped": dict(pattern=Pattern.dense(), heads=2, kv_heads=1),
    "kinds": dict(pattern=Pattern.of(DilatedSegment(128, 2), SlidingWindow(60, 3), GlobalTokens(5), Strided(70)), heads=2),
    "many runs": dict(pattern=Pattern.of(GlobalTokens(range(1, 700, 3)), GlobalTokens([7], "read"), SlidingWindow(1)), heads=1),
    "longformer": dict(pattern=Pattern.longformer(60, 5), heads=2, kv_heads=1),
    "globals once": dict(
        pattern=Pattern.of(GlobalTokens(3), GlobalTokens([1, 60, 61], "read"), Strided(9), overlap="once"), heads=1
    ),
    "bands once": dict(pattern=Pattern.of(*map(SlidingWindow, (9, 9, 40), (1, 1, 4)), Strided(8), overlap="once"), heads=2),
    "segments once": dict(
        pattern=Pattern.of(DilatedSegment(150, 2), DilatedSegment(330, 3), GlobalTokens(9), overlap="once"), heads=2
    ),
    "segments and windows once": dict(
        pattern=Pattern.of(DilatedSegment(150, 2), SlidingWindow(60), SlidingWindow(90, 4), Strided(9), overlap="once"), heads=2
    ),
    "every kind once": dict(
        pattern=Pattern.of(
            BlockSparse.bigbird(15, 25),
            Neighborhood((9, 39), (3, 9), 2),
            SlidingWindow(40),
            DilatedSegment(150, 3),
            GlobalTokens(9),
            BlockSparse.local_global(20, 18),
            Neighborhood((351,), 31),
            overlap="once",
        ),
        seq=351,
        heads=2,
        kv_heads=1,
        dropout_p=0.2,
    ),
    "strided": dict(pattern=Pattern.of(Strided(3)), seq=301, heads=2, kv_heads=1, batch=2, mask="random", dropout_p=0.2),
    "classes": dict(pattern=Pattern.of(SlidingWindow(300, 6), Strided(9), Strided(90, heads=(1, 2)), overlap="once"), heads=2),
    "blocks": dict(pattern=Pattern.of(BlockSparse.bigbird(30, 25, heads=2)), heads=2, kv_heads=1),
    "neighborhood": dict(pattern=Pattern.natten((18, 39), (5, 9)), seq=702, heads=2, kv_heads=1),
    "neighborhood in a line": dict(pattern=Pattern.natten((701,), 151, 3), heads=1),
    "neighborhood in space": dict(
        pattern=Pattern.of(Neighborhood((10, 9, 8), (5, 3, 3), (2, 1, 2)), SlidingWindow(9)), seq=720, heads=2
    ),
    "dropout in a neighborhood": dict(pattern=Pattern.natten((27, 13), 7), seq=351, heads=2, dropout_p=0.3),
    "dropout in a window": dict(pattern=Pattern.of(SlidingWindow(100), GlobalTokens(9)), heads=2, dropout_p=0.3),
    "dropout grouped": dict(pattern=Pattern([150, 330, 512], [1, 2, 4]), heads=2, kv_heads=1, dropout_p=0.3),
}


@pytest.fixture(params=_native.instruction_sets())
def isa(request, monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", request.param)
    return request.param


def in_turn():
    """Yield each variant in one dtype and instruction set, in turn; the rest is slow."""
    sets, listed = _native.instruction_sets(), []
    for at, case in enumerate((*PROBLEMS, *DROPPING, *SCORES)):
        variant, dtype = divmod(at, len(DTYPES))
        for number, name in enumerate(sets):
            usual = (dtype, number) == (variant % len(DTYPES), variant // len(DTYPES) % len(sets))
            listed.append(pytest.param(name, case, marks=[] if usual else pytest.mark.slow, id=f"{name}-{case.name}"))
    return listed


@pytest.mark.parametrize(("isa", "case"), in_turn(), indirect=["isa"])
def test_every_instruction_set_agrees_with_the_oracle(isa, case):
    result = check("native", case)
    assert result.verdict == "passed", "; ".join(result.reasons)


@pytest.mark.parametrize(
    ("isa", "name", "is_causal", "dtype"),
    diagonal(_native.instruction_sets(), LONG, [False, True], ["float32", "float64", "bfloat16"]),
    indirect=["isa"],
)
def test_sequences_of_many_tiles(isa, name, is_causal, dtype):
    fields = dict(seq=701, batch=1, is_causal=is_causal, dtype=dtype) | LONG[name]
    result = check("native", Case(feature="long", variant=f"{name} tiles", **fields))
    assert result.verdict == "passed", "; ".join(result.reasons)


NARROW = {**huge_scores.PATTERNS, "grid": Pattern.natten((16, 15), (3, 5))}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize(("dtype", "size"), [("float32", 3e2), ("float32", 1e5), *HUGE.items()])
def test_huge_scores(isa, name, dtype, size):
    huge_scores.check("native", dtype, size, NARROW[name], seq=240, dim=64)


def test_an_instruction_set_that_is_not_there(monkeypatch):
    monkeypatch.setenv("DILKIT_CPU_ISA", "mmx")
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match=r"DILKIT_CPU_ISA='mmx'.*generic"):
        dilated_attention(q, q, q, Pattern([8], [1]), backend="native")


@pytest.mark.parametrize("name", ["avx5l2", "AVX2", "avx2,generic"])
def test_a_misspelt_instruction_set_is_not_passed_over(monkeypatch, name):
    """The automatic choice does not silently replace the kernel."""
    monkeypatch.setenv("DILKIT_CPU_ISA", name)
    q, problem = torch.randn(1, 8, 2, 8), Problem(pattern=Pattern([8], [1]), seq=8, heads=2, head_dim=8)
    here = ", ".join(_native.instruction_sets())
    said = rf"DILKIT_CPU_ISA='{name}' is not .* this machine has \({here}\); .* generic, avx2, avx512, avx512bf16, amx"
    for choose in (lambda: dilated_attention(q, q, q, problem.pattern), lambda: explain(problem), lambda: select(problem)):
        with pytest.raises(ValueError, match=said):
            choose()


@pytest.mark.skipif("amx" not in _native.instruction_sets(), reason="this machine has no AMX, or the system refuses it")
def test_a_process_that_the_system_refuses_amx_computes_without():
    """Linux refuses AMX if the alternate signal stack has no room for tile registers."""
    program = """
import ctypes
room = ctypes.create_string_buffer(8192)
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, len(room))), None) == 0
import torch
import dilkit
from dilkit.backends.native import _native
q = torch.ones(1, 8, 2, 8, dtype=torch.bfloat16)
assert dilkit.dilated_attention(q, q, q, dilkit.Pattern.dense(), backend="native").eq(1).all()
print(*_native.instruction_sets())
"""
    variables = {name: value for name, value in os.environ.items() if name != "DILKIT_CPU_ISA"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [name for name in _native.instruction_sets() if name != "amx"]


def test_the_choice_names_the_code_that_runs(isa):
    problem = Problem(pattern=Pattern.dense(), seq=8, heads=1, head_dim=8)
    assert Native().detail(problem) == ("avx512" if isa in BF16_SETS else isa)
    assert Native().detail(replace(problem, dtype="bfloat16")) == isa


def test_exp2_is_accurate(isa):
    x = np.linspace(-126, 1.5, 1 << 16, dtype=np.float32)
    y = np.empty_like(x)
    _native.exp2(isa, x, y)
    assert np.abs(y / np.exp2(x.astype(np.float64)) - 1).max() < 2e-7


def test_exp2_of_the_extremes(isa):
    x = np.full(16, -np.inf, np.float32)
    x[:4] = 0, np.nan, -127, -1e30
    y = np.empty_like(x)
    _native.exp2(isa, x, y)
    assert y[0] == 1
    assert np.isnan(y[1])
    assert not y[2:].any()
