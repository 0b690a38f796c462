"""The backend of the kernels in Triton, by a launcher that records."""

import warnings
from dataclasses import replace

import pytest
import torch
from helpers.triton_fakes import Recorder, need_triton

from dilkit import BlockSparse, DilatedSegment, GlobalTokens, Pattern, SlidingWindow, backend, explain
from dilkit.backends.tiles import device
from dilkit.backends.triton.backend import TritonTiles, TunedLauncher, compiler
from dilkit.backends.triton.biases import add_sums
from dilkit.backends.triton.launch import DeviceLauncher
from dilkit.backends.triton.sizes import HEAD_DIMS, Sizes, padded, sizes_for
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.device import Device
from dilkit.environment import TUNED
from dilkit.inputs import Inputs
from dilkit.problem import Problem
from dilkit.selection import tuned
from dilkit.selection.tuned_file import TunedEntry, TunedKernel, to_text
from dilkit.testing.tensors import Tensors

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def pose(**fields):
    sizes = dict(seq=500, heads=4, kv_heads=2, head_dim=64, batch=2)
    return Problem(**{**dict(pattern=Pattern([256, 512], [1, 64])), **sizes, **fields})


def test_each_group_is_one_launch_and_later_ones_continue():
    need_triton()
    recorder, problem = Recorder(), pose(dtype="bfloat16")
    q, k, v = Tensors.random(problem).qkv
    made = TritonTiles(recorder)
    out, lse = made.forward(Inputs(q, k, v, key_padding_mask=torch.zeros(2, 500, dtype=torch.bool)), problem)
    assert (out.shape, lse.shape) == (q.shape, (2, 4, 500))
    made.backward(out, Inputs(q, k, v), out, lse, replace(problem, softcap=30.0))
    roles = [role for role, *_ in recorder.launches]
    assert roles == ["forward", "forward", "dots", "dquery", "dquery", "dkeyvalue", "dkeyvalue"]
    constants = [given[-1] for given in recorder.launches if given[0] != "dots"]
    assert [x["FIRST"] for x in constants] == [True, False] * 3
    assert [x["MASKED"] for x in constants] == [True, True, False, False, False, False]
    assert [x["SOFTCAP"] for x in constants] == [0.0] * 2 + [30.0] * 4
    assert {(x["METRIC"], x["DIMS"]) for x in constants} == {("", 0)}
    for _, sizes, programs, arguments, given in recorder.launches:
        assert given["ROWS"] == sizes.rows
        assert programs > 0
        assert all(x.data.data_ptr() for x in arguments if hasattr(x, "batch"))


def test_gradients_of_weights_are_summed_over_tiles_of_their_head():
    need_triton()
    form, recorder = BiasForm(sizes=(3,), learned=True), Recorder()
    problem = pose(bias=form)
    (q, k, v), weights = Tensors.random(problem).qkv, torch.zeros(4, 3)
    inputs = Inputs(q, k, v, bias=LoweredBias(form, weights))
    dbias = TritonTiles(recorder).backward(q, inputs, q, torch.zeros(2, 4, 500), problem)[3]
    assert torch.equal(dbias, weights)
    _, _, programs, arguments, constants = next(given for given in recorder.launches if given[0] == "dquery")
    assert (constants["METRIC"], constants["DIMS"], constants["LEARNED"]) == ("table", 0, True)
    tiles, view = next(x.tiles for x in arguments if hasattr(x, "tiles")), next(x for x in arguments if hasattr(x, "sums"))
    assert view.sums.shape == (programs, 3)
    view.sums.copy_(torch.arange(programs * 3.0).view(-1, 3))
    add_sums(dbias, view.sums, tiles)
    of_head = (tiles[:, 3] == 1).repeat_interleave(2)
    assert 0 < of_head.sum() < programs
    torch.testing.assert_close(dbias[1], view.sums[of_head].sum(0))


def test_each_relation_is_one_launch_and_only_what_has_bounds_is_compared():
    need_triton()
    recorder = Recorder()
    problem = pose(pattern=Pattern.of(GlobalTokens(3), SlidingWindow(9, 2), DilatedSegment(64, 2), SlidingWindow(1000)))
    TritonTiles(recorder).forward(Inputs(*Tensors.random(problem).qkv), problem)
    constants = [given[-1] for given in recorder.launches]
    assert [x["FIRST"] for x in constants] == [True, False, False, False]
    assert [x["BOUNDED"] for x in constants] == [False, False, True, False]


class TunedRecorder(Recorder, TunedLauncher):
    sizes, capability = TunedLauncher.sizes, None


def test_measured_sizes_are_launched_where_they_were_measured(tmp_path, monkeypatch):
    need_triton()
    gpu, recorder, file = Device("cuda", "NVIDIA H100", (9, 0)), TunedRecorder(), tmp_path / "tuned.json"
    problem, backend = pose(dtype="bfloat16", device=gpu), TritonTiles(recorder)
    q, k, v = Tensors.random(pose(dtype="bfloat16")).qkv

    def launched(problem):
        recorder.launches.clear()
        out, lse = backend.forward(Inputs(q, k, v), problem)
        backend.backward(out, Inputs(q, k, v), out, lse, problem)
        return {role: sizes for role, sizes, *_ in recorder.launches}

    def measured(kernel):
        return TunedEntry(tuned.setup_of(gpu), kernel, (("32 x 16, 8 warps, 2 stages", 0.1), ("64 x 64, 4 warps, 3 stages", 0.2)))

    monkeypatch.setattr(device, "cuda_driver", lambda: 0)
    monkeypatch.setenv(TUNED.name, str(file))
    file.write_text(to_text([measured(TunedKernel("triton 0.1", "forward", "bfloat16", 64))]))
    tuned.read_again()
    table, facts = launched(problem), backend.proof_facts(problem)
    assert table == launched(replace(problem, device=Device.assume("sm_90"))), "another version of Triton measured"
    file.write_text(to_text([measured(TunedKernel(compiler(), "dquery", "bfloat16", 64))]))
    tuned.read_again()
    assert launched(problem) == table | dict(dquery=Sizes(32, 16, 8, 2))
    others = dict(dtype="float16", head_dim=48, device=Device("cuda", "NVIDIA A100", (9, 0)), bias=BiasForm(sizes=(3,)))
    with warnings.catch_warnings(action="ignore"):  # of a file of another device
        elsewhere = [recorder.sizes("dquery", replace(problem, **{name: value}), low=False) for name, value in others.items()]
    assert Sizes(32, 16, 8, 2) not in elsewhere
    assert backend.proof_facts(problem) != facts, "they have a proof of their own"


COMPUTES = "computes band, global, runs, segments"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (dict(device=Device.assume("cpu")), "device cpu: runs on cuda, hip"),
        (dict(device=Device.assume("sm_75")), "capability 7.5: at least 8.0 is needed"),
        (dict(device=Device.assume("gfx1100")), "architecture gfx1100: compiled for gfx90a, gfx942"),
        (
            dict(device=Device.assume("gfx90a"), dtype="float16"),
            "dtype float16: its matrix units take numbers below 6e-5 for 0, which loses small weights (use bfloat16 or float32)",
        ),
        (
            dict(device=Device.assume("gfx942"), stored="int8"),
            "stored rows int8: the counter of a step goes by CUDA's number of its stream, which HIP does not have "
            '(backend="reference")',
        ),
        (dict(varlen=True, batch=1), "varlen yes: not supported"),
        (dict(dropout_p=0.1), "dropout_p 0.1: drops no weights (dropout_p=0, or another backend)"),
        (dict(head_dim=160), "head_dim 160: at most 128"),
        (dict(bias=BiasForm(sizes=(1025,), learned=True)), 'learned bias 1025 weights a head: at most 1024 (backend="cupy_raw")'),
        (dict(pattern=Pattern.natten((20, 25), 3)), f"branch kind neighborhood: shown as grid of windows; {COMPUTES}"),
        (
            dict(pattern=Pattern.of(BlockSparse(None, 50))),
            f'branch kind block_sparse: shown as given blocks; {COMPUTES} (backend="native" on a CPU, "flex" on a GPU)',
        ),
        (
            dict(pattern=Pattern.of(BlockSparse.local_global(50, 10))),
            "rows of a tile 10: at least 32 of 64 on average, or at most 16 tiles of a head "
            '(longer runs of rows that see the same columns, or backend="flex")',
        ),
    ],
)
def test_refusals(fields, reason):
    problem = pose(**{**dict(device=Device.assume("sm_90"), dtype="bfloat16"), **fields})
    assert reason in map(str, TritonTiles().refusals(problem))


@pytest.mark.parametrize(("architecture", "dtype"), [("gfx90a", "bfloat16"), ("gfx90a", "float32"), ("gfx942", "float16")])
def test_gpus_of_amd_are_used_within_their_limits(architecture, dtype):
    problem = pose(device=Device.assume(architecture), dtype=dtype)
    assert [x for x in TritonTiles().refusals(problem) if x.code != "module"] == []
    for form in (None, BiasForm()):
        sizes = DeviceLauncher().sizes("forward", replace(problem, bias=form), low=False)
        assert (sizes.warps <= 4, sizes.stages <= 2) == (True, True)
    with pytest.raises(ValueError, match="8388608 programs for dots, at most 8388607"):
        TritonTiles(Recorder())._launch("dots", problem, Sizes(64, 0, 8, 1), 2**23, (), {})


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(backend, "_installed", lambda module: module != "triton")
    problem = pose(device=Device.assume("sm_90"), dtype="bfloat16")
    assert [str(x) for x in TritonTiles().refusals(problem)] == ["module triton: not installed (pip install triton)"]
    decided = next(x for x in explain(problem, "triton").decisions if x.name == "triton")
    assert decided.verdict == "refused"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_role_has_sizes_for_every_head_dim(capability):
    for role in ("forward", "dots", "dquery", "dkeyvalue"):
        for dtype in ("float32", "float16", "bfloat16"):
            for head_dim in (1, *HEAD_DIMS, 48, 80, 96):
                low = sizes_for(role, dtype, head_dim, capability, low=True)
                assert low.rows <= 64
                assert sizes_for(role, dtype, head_dim, capability).rows >= low.rows


def test_what_there_are_no_sizes_for_is_refused():
    with pytest.raises(ValueError, match="no kernel in Triton"):
        sizes_for("forward", "float16", 64, (7, 5))
    with pytest.raises(ValueError, match="head_dim=129: kernels are made for at most 128"):
        padded(129)


def test_it_tells_what_it_computes_with():
    posed = pose(device=Device.assume("sm_90"), head_dim=96, dtype="bfloat16")
    assert TritonTiles().detail(posed) == "tensor cores; head_dim 96 computed as 128: 1.33 times the multiplications"
    assert TritonTiles().detail(pose(device=Device.assume("sm_90"))) == "fp32 on CUDA cores"
    assert TritonTiles(Recorder()).proof_facts(posed) == ()
