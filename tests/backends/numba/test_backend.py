"""The backend of the kernels in numba.cuda, by a launcher that records."""

import contextlib
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dilkit import Pattern
from dilkit.backends.numba import backend as numba_cuda
from dilkit.backends.numba.arguments import LaunchGroup, TensorView, view
from dilkit.backends.numba.backend import TABLE, NumbaCuda, NumbaLauncher
from dilkit.backends.tiles.schedule import schedule
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.testing.tensors import Tensors

tiling_for = NumbaLauncher().tiling
GROUPS = Pattern([256, 512, 512], [1, 4, 64])


class Recorder(NumbaLauncher):
    def __init__(self):
        self.launches: list[SimpleNamespace] = []

    def launch(self, role, dtype, tiling, blocks, arguments):
        self.launches.append(SimpleNamespace(role=role, dtype=dtype, tiling=tiling, blocks=blocks, arguments=arguments))


def pose(**fields):
    return Problem(**{**dict(pattern=GROUPS, seq=500, heads=4, kv_heads=2, head_dim=64, batch=2), **fields})


def numbers(records):
    return records.view(np.int32).reshape(-1, 4).tolist()


@pytest.mark.parametrize("masked", [False, True])
def test_forward_launches_each_group_once(masked):
    recorder, problem = Recorder(), pose(is_causal=True, key_padding_mask=masked, scale=0.25)
    q, k, v = Tensors.random(problem).qkv
    ignored = torch.ones(2, 500, dtype=torch.bool) if masked else None
    out, lse = NumbaCuda(recorder).forward(Inputs(q, k, v, key_padding_mask=ignored), problem)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (2, 4, 500), torch.float32)
    groups = schedule(problem, tiling_for("forward", 64).rows).groups
    assert len(groups) > 1
    for i, (launch, group) in enumerate(zip(recorder.launches, groups, strict=True)):
        assert (launch.role, launch.dtype, launch.blocks) == ("forward", "float32", 2 * len(group.query_tiles))
        facts, (tiles, branches, first), mask, *views, given_lse = launch.arguments
        assert (facts, first) == ((2, 500, 4, 2, 64, 1, 0, int(masked), 0.25), int(i == 0))
        assert (tiles.tolist(), branches.tolist()) == (numbers(group.query_tiles), numbers(group.branches))
        assert (mask.numbers.dtype, mask.numbers.dim()) == (torch.uint8, 1)
        assert ignored is None or (mask.numbers.data_ptr(), mask.batch, mask.row) == (ignored.data_ptr(), 500, 1)
        in_place = [x.numbers.data_ptr() == y.data_ptr() for x, y in zip(views, (q, k, v, out), strict=True)]
        assert in_place == [True, not masked, not masked, True]  # of a mask, keys and values are copied without what it ignores
        assert given_lse is lse


def test_a_pattern_that_counts_once_is_launched_so():
    recorder, problem = Recorder(), pose(pattern=Pattern([256, 512], [1, 4], overlap="once"))
    NumbaCuda(recorder).forward(Inputs(*Tensors.random(problem).qkv), problem)
    assert [launch.arguments[0].once for launch in recorder.launches] == [1]


def test_backward_writes_delta_then_the_gradients():
    recorder, problem = Recorder(), pose(requires_grad=True, dtype="float16")
    q, k, v = Tensors.random(problem).qkv
    lse = torch.zeros(2, 500, 4).transpose(1, 2)
    results = NumbaCuda(recorder).backward(q, Inputs(q, k, v), q, lse, problem)
    assert [x.shape for x in results] == [q.shape, k.shape, v.shape]
    groups = schedule(problem, tiling_for("dquery", 64).rows).groups
    roles = ["dots", *["dquery"] * len(groups), *["dkeyvalue"] * len(groups)]
    assert [launch.role for launch in recorder.launches] == roles
    dots, *rest = recorder.launches
    assert dots.blocks * dots.tiling.threads >= 2 * 4 * 500
    delta = dots.arguments[-1]
    assert delta.is_contiguous()
    for launch, group in zip(rest, (*groups, *groups), strict=True):
        tiles = group.query_tiles if launch.role == "dquery" else group.key_tiles
        assert launch.blocks == 2 * len(tiles)
        assert launch.arguments[1].tiles.tolist() == numbers(tiles)
        dout, given_lse, given_delta, *written = launch.arguments[6:]
        assert dout.numbers.data_ptr() == q.data_ptr()
        assert given_lse.is_contiguous()
        assert given_delta is delta
        expected = results[:1] if launch.role == "dquery" else results[1:]
        assert [x.numbers.data_ptr() for x in written] == [x.data_ptr() for x in expected]


def test_a_group_without_tiles_is_not_launched():
    recorder = Recorder()
    problem = pose(pattern=Pattern([64, 512], [1, 64], heads=[None, (3, 4)]), seq=3, kv_heads=4)
    assert [len(group.query_tiles) > 0 for group in schedule(problem, 64).groups] == [True, False]
    NumbaCuda(recorder).forward(Inputs(*Tensors.random(problem).qkv), problem)
    assert len(recorder.launches) == 1


def test_more_blocks_than_a_launch_has_are_refused(monkeypatch):
    monkeypatch.setattr(numba_cuda, "MAX_BLOCKS", 10)
    problem = pose()
    with pytest.raises(ValueError, match="blocks for forward, at most 10; use a smaller batch"):
        NumbaCuda(Recorder()).forward(Inputs(*Tensors.random(problem).qkv), problem)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(head_dim=129), "head_dim 129: at most 128"),
        (dict(dtype="bfloat16"), "dtype bfloat16: computes float16, float32"),
        (dict(seq=2**30 + 1), f"seq {2**30 + 1}: at most {2**30}"),
        (dict(pattern=Pattern([8] * 33, [1] * 33, overlap="once")), 'branches 33: at most 32 with overlap="once"'),
    ],
)
def test_what_is_refused(fields, reason):
    found = NumbaCuda().refusals(pose(**{"device": Device.assume("sm_61"), **fields}))
    assert reason in [str(refusal) for refusal in found if refusal.code != "module"]


def test_a_stand_in_for_a_gpu_leaves_no_proof():
    assert NumbaCuda(Recorder()).proof_facts(pose(device=Device.assume("sm_61"))) == ()


class FakeNumba:
    """The part of numba.cuda that launches use; it records calls and devices."""

    def __init__(self):
        self.events: list[tuple[Any, ...]] = []
        self.device: int | None = None
        self.gpus = {index: self._on(index) for index in (0, 1)}

    @contextlib.contextmanager
    def _on(self, index):
        self.device = index
        yield
        self.device = None

    def external_stream(self, address):
        return "stream", address

    def as_cuda_array(self, x, sync):
        assert not x.requires_grad
        assert not sync, "the kernel runs on the stream that torch uses: nothing is waited for"
        return "array", x.data_ptr()

    def compiled(self, *asked):
        self.events.append(("compiled", self.device, asked))
        return self

    def __getitem__(self, configuration):
        warnings.warn("Grid size 7 will likely result in GPU under-utilization", stacklevel=2)
        return lambda *arguments: self.events.append(("launched", self.device, configuration, arguments))


class OnDevice(Tensor):
    @property
    def device(self):
        return torch.device("cuda", 1)


def test_a_launch_goes_to_the_current_stream_of_its_device(monkeypatch):
    fake = FakeNumba()
    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(numba_cuda, "compiled", fake.compiled)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, device.index))
    x = torch.ones(3, requires_grad=True).as_subclass(OnDevice)
    tiling = tiling_for("forward", 64)
    NumbaLauncher().launch("forward", "float32", tiling, 7, (LaunchGroup(x, x, 1), TensorView(x, 8, 4, 1), x, 7))
    array = "array", x.data_ptr()
    launched = LaunchGroup(array, array, 1), TensorView(array, 8, 4, 1), array, 7
    assert fake.events == [
        ("compiled", 1, ("forward", "float32", tiling, (6, 1))),
        ("launched", 1, (7, (tiling.across, tiling.down), ("stream", 71)), launched),
    ]


def test_a_view_reaches_from_the_first_number_to_the_last():
    whole = torch.arange(3.0 * 5 * 4 * 8, requires_grad=True)
    x = whole.view(3, 5, 4, 8).transpose(1, 2)[1:, 1:, ::2, 2:6]
    numbers, *strides = view(x)
    assert strides == [160, 8, 64]
    assert not numbers.requires_grad
    assert numbers.data_ptr() == x.data_ptr()
    assert (numbers[0], numbers[-1]) == (x[0, 0, 0, 0], x[-1, -1, -1, -1])
    assert numbers[torch.tensor(strides) @ torch.tensor([1, 2, 1]) + 3] == x[1, 2, 1, 3]
    expanded = torch.ones(1, 1, 4).expand(2, 7, 3, 4)
    assert (view(expanded).numbers.tolist(), view(expanded)[1:]) == ([1.0] * 4, (0, 0, 0))


def test_threads_share_tiles_evenly_and_a_head_dim_takes_the_next_tiling():
    for tiling in {tiling for row in TABLE.values() for tiling in row}:
        assert tiling.rows % tiling.down == tiling.columns % tiling.down == 0
        assert tiling.columns % tiling.across == tiling.columns % 4 == 0
        assert tiling.head_dim % (4 * tiling.across) == 0
        assert tiling.threads % tiling.columns == 0
        assert tiling.threads >= tiling.rows
    assert [tiling_for("forward", size).head_dim for size in (1, 16, 17, 96, 97, 128)] == [16, 16, 32, 96, 128, 128]
    with pytest.raises(ValueError, match="head_dim=129: kernels are made for at most 128"):
        tiling_for("dquery", 129)
