"""The table of preferences."""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
from helpers.fakes import Fake, family
from helpers.strategies import patterns_with_heads
from hypothesis import given, strategies as st

from dilkit import BlockSparse, Device, DilatedSegment, Pattern, Problem, SlidingWindow, Strided, backend, registry
from dilkit.device import GENERATIONS
from dilkit.problem import DTYPES
from dilkit.selection.preference_table import (
    BY_DESIGN,
    COUNTED,
    LAUNCH_BOUND,
    MODELLED,
    ON_H200,
    TABLE,
    measured_first,
    row_of,
    table_preference,
)
from dilkit.selection.shared_keys import repetition
from dilkit.selector import ranked, trace

A = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 8, 16])
C = Pattern([2048, 8192, 32768, 131072, 524288], [1, 4, 16, 64, 256])
BRANCHES = Pattern([2048, 4096], [1, 2])
ONE = Pattern([4096], [1])
BLOCKS = Pattern.of(BlockSparse.local_global(1024, 128))
GPUS = ["sm_{}{}".format(*generation.capability) for generation in GENERATIONS]


def problem(device, dtype="float16", **options):
    options = dict(pattern=BRANCHES, seq=2**17, heads=16, head_dim=64) | options
    return Problem(device=Device.assume(device), dtype=dtype, **options)


def traced(posed, cupy=True):
    with mock.patch.object(backend, "_installed", lambda module: cupy or module != "cupy"):
        return trace(posed, family(cupy), (), table_preference(posed))


def picked(posed, cupy=True):
    return traced(posed, cupy).picked


def why(posed, cupy=True):
    return str(traced(posed, cupy).why)


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_small_problems_of_many_branches_are_launched_once(device, dtype):
    small = problem(device, dtype, pattern=Pattern([512, 1024], [1, 2]), seq=8192, heads=8, head_dim=128)
    assert small.flops() <= LAUNCH_BOUND[dtype] < problem(device, head_dim=128).flops()
    assert picked(small) == "cupy_raw"
    assert "one launch" in why(small)
    assert picked(replace(small, pattern=ONE)) == "sdpa"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_torch_refuses_is_generated_unless_it_is_dilated_or_the_gpu_is_old(dtype):
    grid = dict(pattern=Pattern.natten((512, 256), 31))
    assert [picked(problem(device, dtype, **grid)) for device in ("sm_80", "sm_90", "sm_75")] == ["flex", "flex", "reference"]
    masked = Pattern.of(BlockSparse.local_global(1024, 128), DilatedSegment(2**15, 4))
    assert picked(problem("sm_80", dtype, pattern=masked)) == "flex", "which is made for them"
    assert "FlexAttention's" in why(problem("sm_80", "float32", **grid))


def test_blocks_are_generated_where_that_is_possible_and_ours_elsewhere():
    beside = Pattern.of(*BLOCKS.branches, DilatedSegment(2**15, 4))
    for pattern, masked in product((BLOCKS, beside), (False, True)):
        asked = dict(pattern=pattern, key_padding_mask=masked)
        assert [picked(problem(device, **asked)) for device in ("sm_80", "sm_90", "sm_75")] == ["flex", "flex", "cupy_raw"]
    assert picked(problem("sm_80", pattern=BLOCKS, dropout_p=0.1)) == "cupy_raw", "which flex does not take"


@pytest.mark.parametrize(
    "pattern", [ONE, BRANCHES, BLOCKS, Pattern.natten((512, 256), 31)], ids=["one", "branches", "blocks", "grid"]
)
@pytest.mark.parametrize(("dtype", "stored"), [("float32", "int8"), ("bfloat16", "bfloat16"), ("float16", "int8")])
def test_steps_of_decoding_run_on_kernels_of_ours(pattern, dtype, stored):
    for device in ("sm_80", "sm_90", "sm_120"):
        step = problem(device, dtype, pattern=pattern, seq=1, is_causal=True, stored=stored)
        assert (picked(step), picked(step, cupy=False)) == ("cupy_raw", "triton")
    assert picked(problem("sm_75", dtype, seq=1, is_causal=True, stored=stored), cupy=False) == "reference"


@pytest.mark.parametrize(("pattern", "picks"), [(A, ("cupy_raw", "sdpa")), (C, ("sdpa", "sdpa")), (ONE, ("sdpa", "sdpa"))])
@pytest.mark.parametrize("training", [False, True])
def test_halves_beside_flash_attention_2_go_by_the_keys_that_branches_repeat(pattern, picks, training):
    asked = dict(dtype="bfloat16", pattern=pattern, seq=2**20, heads=8, requires_grad=training)
    assert tuple(picked(problem(device, **asked)) for device in ("sm_86", "sm_90")) == picks


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)).filter(lambda pair: pair[0] >= pair[1]), min_size=1, max_size=4),
    st.lists(st.integers(1, 20), max_size=1),
    st.integers(1, 90),
    st.booleans(),
)
def test_repetition_is_that_of_the_count(segments, windows, seq, is_causal):
    pattern = Pattern.of(*(DilatedSegment(*pair) for pair in segments), *map(SlidingWindow, windows))
    count = pattern.count(seq, 3, is_causal=is_causal)[0]
    expected = float(count.sum() / (count > 0).sum()) if count.any() else 1.0
    posed = problem("sm_80", pattern=pattern, seq=seq, heads=3, is_causal=is_causal)
    assert repetition(posed) == pytest.approx(expected)


@pytest.mark.parametrize("strides", [(2**62, 2**40 + 1, 2**40), (997, 991, 983, 977, 971, 967, 953, 947)])
def test_keys_whose_common_step_is_beyond_int64_are_counted(strides):
    posed = problem("sm_80", pattern=Pattern.of(*map(Strided, strides)), seq=2000, heads=1)
    count = posed.pattern.count(2000, 1)
    assert repetition(posed) == pytest.approx(float(count.sum() / (count > 0).sum()), rel=1e-2)


def test_on_an_h200_the_table_picks_the_fastest_backend():
    """On its stored sweep, or one that takes 1.05 times as long at most."""
    path = Path(__file__).parents[3] / "docs/results/gpu-day-h200-preferences.json"
    times = {}
    for row in json.loads(path.read_text())["rows"]:
        if row["samples"]:
            times.setdefault(row["case"]["problem"], {})[row["who"]] = median(row["samples"])
    slower = []
    for text, measured in times.items():
        match = re.fullmatch(r"1 x ([\d,]+) tokens, 8 heads x (\d+), (\w+)(.*), Pattern\((\[.*\]), (\[.*\])\)", text)
        assert match, text
        flags = {name: name in match[4] for name in ("is_causal", "key_padding_mask", "requires_grad")}
        sizes = dict(seq=int(match[1].replace(",", "")), heads=8, head_dim=int(match[2]))
        posed = problem("sm_90", match[3], pattern=Pattern(json.loads(match[5]), json.loads(match[6])), **sizes, **flags)
        first = next(name for name in table_preference(posed) if name in measured)
        slower += [text] * (measured[first] > 1.05 * min(measured.values()))
    assert len(times) == 89
    assert not slower


def test_each_row_has_a_reason_and_a_basis():
    assert all(row.why and row.basis for row in TABLE)
    assert why(problem("sm_90", pattern=ONE)).startswith(f"first {ON_H200}: the call that torch's kernels are made for")


def test_branches_of_different_heads_share_no_keys():
    small = dict(seq=8192, heads=8)
    split = problem("sm_80", pattern=Pattern.head_split([2048, 4096], [1, 2], 8), **small)
    assert picked(split) == "sdpa"
    assert picked(problem("sm_80", pattern=Pattern([2048, 4096], [1, 2], heads=[(0, 5), (4, 8)]), **small)) == "cupy_raw"


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_without_cupy_torch_computes_and_the_trace_says_what_to_install(device, dtype):
    posed = problem(device, dtype)
    decided = traced(posed, cupy=False)
    assert decided.picked == "sdpa"
    assert "module cupy: not installed (pip install 'dilkit[cuda]')" in str(decided)
    if next(iter(table_preference(posed))) == "cupy_raw":
        first = "after cupy_raw, which comes first"
        assert str(decided.why).startswith(tuple(f"{first} {basis}: " for basis in (BY_DESIGN, COUNTED, ON_H200, MODELLED)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", *GPUS])
def test_the_backends_that_are_installed_compute_on_every_device(device, dtype):
    posed = problem(device, dtype)
    decided = trace(posed, registry.backends(), (), table_preference(posed))
    assert decided.picked in table_preference(posed)
    assert decided.why


@pytest.mark.parametrize("device", GPUS)
def test_a_torch_without_code_for_the_gpu_is_refused_whatever_the_table_says(device):
    bare = replace(Device.assume(device), torch_code=False)
    posed = replace(problem("cpu"), device=bare)
    decided = trace(posed, family(), (), table_preference(posed))
    assert decided.picked is None
    line = "CUDA 12.6" if (bare.capability or (0, 0)) < (7, 5) else "CUDA 12.8 or newer"
    assert f"install a torch built for {line}" in str(decided)


@given(
    st.tuples(st.integers(5, 15), st.integers(0, 9)).filter(lambda capability: capability >= GENERATIONS[0].capability),
    st.sampled_from(DTYPES),
    patterns_with_heads(),
    st.integers(1, 256),
    st.integers(1, 4096),
    st.booleans(),
)
def test_whatever_the_problem_a_row_decides(capability, dtype, found, dim, seq, mask):
    pattern, (heads, kv_heads) = found
    sizes = dict(pattern=pattern, seq=seq, heads=heads, kv_heads=kv_heads, head_dim=dim, key_padding_mask=mask)
    posed = problem("{}.{}".format(*capability), dtype, **sizes)
    row = row_of(posed)
    decided = trace(posed, family(), (), table_preference(posed))
    able = [d.name for d in decided.decisions if d.verdict in ("picked", "able")]
    assert decided.picked == next(name for name in row.order if name in able)


def test_a_device_of_another_kind_is_in_no_row():
    posed = replace(problem("cpu"), device=Device("xpu", "xpu"))
    assert row_of(posed) is None
    decided = trace(posed, family(), (), table_preference(posed))
    assert (decided.picked, decided.why) == ("reference", "by its priority, 0")


NAMES = [f"b{i}" for i in range(6)]


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(-3, 3)), st.permutations(NAMES), st.integers(0, 6), st.data())
def test_named_backends_share_out_their_priorities(priorities, order, named, data):
    known = {name: Fake(name, priority) for name, priority in priorities.items()}
    wanted = dict.fromkeys(order[:named], "why")
    found = [c.name for c in ranked(known, (), wanted)]
    assert sorted(found) == sorted(known)
    assert [name for name in found if name in wanted] == [name for name in wanted if name in known]
    for other in set(known) - set(wanted):  # as many stand before it as its own priority says
        before = [name for name in found[: found.index(other)] if name in wanted]
        assert len(before) == sum(priorities[name] >= priorities[other] for name in wanted if name in known)
    asked = tuple(data.draw(st.permutations(sorted(known)))[:2])
    assert tuple(c.name for c in ranked(known, asked, wanted))[: len(asked)] == asked


def test_measured_orders_come_first_and_the_table_orders_the_rest():
    posed = problem("sm_61", "float32")
    wanted = measured_first((("numba_cuda", 0.002), ("sdpa", 0.0031)), table_preference(posed))
    assert tuple(wanted) == ("numba_cuda", "sdpa", "cupy_raw", "triton", "flex", "reference")
    decided = trace(posed, family(), (), wanted)
    assert (decided.picked, decided.why) == ("numba_cuda", "measured by `dilkit tune`: numba_cuda 2 ms, sdpa 3.1 ms")
    assert "not among those measured by `dilkit tune`" in wanted["cupy_raw"]
    assert measured_first((), table_preference(posed)) == table_preference(posed)
