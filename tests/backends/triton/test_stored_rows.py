"""Steps of decoding by the backend in Triton."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.steps import StepCase, in_pages, make_step
from helpers.triton_fakes import Recorder, need_triton

from dilkit import Device, Pattern, Problem
from dilkit.backends.tiles import counters
from dilkit.backends.tiles.steps import MOST_ITEMS, counts_of, divided
from dilkit.backends.triton import launch
from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import DeviceLauncher, kernel
from dilkit.backends.triton.sizes import HEAD_DIMS, RESIDENT_WARPS, Sizes, step_sizes
from dilkit.bias.form import BiasForm
from dilkit.decoding.protocol import Span, place


def pose(**fields):
    own = dict(seq=1, heads=6, kv_heads=1, head_dim=64, is_causal=True, stored="float32", dtype="float32") | fields
    return Problem(pattern=Pattern.dense(), device=Device("cuda", "GPU", (9, 0)), **own)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(head_dim=200), "head_dim 200: at most 128"),
        (dict(bias=BiasForm(2, placed=True, apart=True)), "bias"),
        (dict(dtype="float64", stored="float64"), "dtype float64: computes bfloat16, float16, float32"),
    ],
)
def test_refusals(fields, reason):
    assert TritonTiles().limits.refusals(pose()) == ()
    assert any(str(refusal).startswith(reason) for refusal in TritonTiles.limits.refusals(pose(**fields)))
    old = replace(pose(), device=Device("cuda", "GPU", (7, 5)))
    assert [refusal.code for refusal in TritonTiles.limits.refusals(old)] == ["capability"]


def test_any_pattern_is_a_step():
    grid = replace(pose(), pattern=Pattern.natten((20, 25), 3))
    assert {refusal.code for refusal in TritonTiles().refusals(grid)} <= {"module"}


def test_rows_at_a_time_are_a_power_of_two():
    for heads, head_dim in product((1, 2, 3, 8, 100), (1, 20, *HEAD_DIMS)):
        sizes = step_sizes(pose(heads=heads, head_dim=head_dim))
        assert sizes.rows <= 8
        assert sizes.columns >= sizes.warps
        assert sizes.columns & (sizes.columns - 1) == 0
    assert TritonTiles().detail(pose(dtype="bfloat16", stored="int8", head_dim=96)) == "fp32 on CUDA cores; rows of 128 numbers"


def test_work_is_divided_by_what_runs_at_once():
    case = StepCase(heads=20, kv_heads=2)
    step = make_step(case)
    placed = place(step, case.problem, most=10_000)
    assert divided(placed, 64) == (8, 16, 4), "a write for 4 rows of 2 heads, 2 shares of 10 query heads, and 4 pieces of each"
    assert divided(placed, 1).splits == 1
    assert divided(place(step, case.problem, most=300), 10**6).splits == 2
    assert divided(place(step._replace(key=None, value=None, writes=step.writes[:0]), case.problem), 64).writes == 0
    many = place(step, case.problem, most=2**60)
    with pytest.raises(ValueError, match=f"query has 8 rows and key/value heads, .* at most {MOST_ITEMS}: make several calls"):
        divided(many, MOST_ITEMS)


def test_there_is_nothing_to_write_without_new_rows_whatever_tables_say():
    case = StepCase()
    step = make_step(case)
    placed = place(step._replace(key=None, value=None, writes=np.zeros_like(step.writes)), case.problem)
    assert (counts_of(placed).writes, counts_of(placed).spans) == (0, 5)


def test_a_step_is_one_launch_of_an_item_a_program():
    need_triton()
    recorder, case = Recorder(), StepCase("float16", "int8", heads=6, kv_heads=3, head_dim=20, bias="coordinates", sink=True)
    step = make_step(case)
    out, lse = TritonTiles(recorder).attend_stored(step, case.problem)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (step.query.shape, torch.float16, (2, 6, 2), torch.float32)
    [(role, sizes, programs, arguments, constants)] = recorder.launches
    view = dict(zip(kernel("stored").arg_names, arguments, strict=False))
    assert (role, programs) == ("stored", 12 + 12 * view["splits"] + 12)
    assert view["partials"].shape == (12 * view["splits"], 2, 32 + 2)
    sized = {name: constants[name] for name in ("DIM", "SIZE", "WIDTH", "GROUP", "COLUMNS", "METRIC", "DIMS")}
    assert sized == dict(DIM=20, SIZE=32, WIDTH=24, GROUP=2, COLUMNS=sizes.columns, METRIC="euclidean", DIMS=2)
    none = {name: getattr(step, name)[:0] for name in ("query", "key", "value", "spans", "writes")}
    TritonTiles(recorder).attend_stored(step._replace(**none, bias=None), replace(case.problem, bias=None))
    assert len(recorder.launches) == 1, "of no rows there is none"


def test_a_graph_captures_a_placed_step_and_keeps_it(monkeypatch):
    need_triton()
    case, recorder, held = StepCase(), Recorder(), list[object]()
    step = make_step(case)
    placed = place(step, case.problem)
    monkeypatch.setattr("dilkit.backends.tiles.backend.capturing", lambda device: True)
    monkeypatch.setattr("dilkit.backends.tiles.backend.keep", lambda thing, device: held.append(thing))
    with pytest.raises(RuntimeError, match="cannot be copied to the device while a CUDA graph is captured"):
        TritonTiles(recorder).attend_stored(step, case.problem)
    TritonTiles(recorder).attend_placed(placed)
    assert (len(recorder.launches), held) == (1, [placed])


CASES = ({}, dict(spans=16, seq=1), dict(spans=1, most=3000, seed=4), dict(batch=1, seed=2))


def test_nothing_is_compiled_anew_for_other_tables():
    need_triton()
    from helpers.triton_compile import CompilingLauncher, asked_for

    cases = [StepCase(head_dim=32, **fields) for fields in CASES]
    backend = TritonTiles(CompilingLauncher("stored", step_sizes(cases[0].problem)))
    step = make_step(cases[0])
    nothing = step._replace(spans=step.spans[:0], writes=step.writes[:0])
    with asked_for() as asked:
        for each in (step, *map(make_step, cases), in_pages(step, cases[0].problem), nothing):
            backend.attend_stored(each, cases[0].problem)
    assert len(set(asked)) == 1


def test_the_launcher_asks_for_the_counter_of_its_stream(monkeypatch):
    device, stream = torch.device("cuda", 0), SimpleNamespace(cuda_stream=4096)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(counters, "cuda_stream_number", lambda stream: stream)
    launcher = DeviceLauncher()
    first = launcher.counter(device)
    assert launcher.counter(device) == first
    stream.cuda_stream = 8192
    assert launcher.counter(device) != first


def test_as_many_programs_run_at_once_as_have_registers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert DeviceLauncher().resident(Sizes(8, 4, 4, 1), torch.device("cuda", 0)) == 132 * RESIDENT_WARPS // 4


def test_positions_of_too_many_tokens_are_refused():
    case = StepCase(bias="coordinates")
    step = make_step(case)
    placed = place(step, case.problem)
    many = torch.zeros(1, 1, 2).expand(1, 2**31, 2)
    with pytest.raises(ValueError, match="positions of the bias are of 2147483648 tokens; at most 2147483647"):
        counts_of(placed._replace(step=step._replace(bias=step.bias._replace(positions=many))))


def test_columns_of_tables_are_those_of_spans():
    """The kernel has numbers in place of names."""
    need_triton()
    from dilkit.backends.triton import spans

    sides = {"key": (spans.KEY, spans.OFFSET), "value": (spans.VALUE, spans.OFFSET)}
    for side, (first, offset) in sides.items():
        at = Span._fields.index(side)
        assert first.value == at
        assert Span._fields[at + offset.value] == f"{side}_offset"
        assert Span._fields[at + spans.OF_ROW.value] == f"{side}_row"
