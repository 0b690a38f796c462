"""Choices of the kernels that merge results."""

import warnings

import pytest
import torch
from helpers.sdpa import TorchRows, problem

from dilkit.backends.sdpa import fusing
from dilkit.backends.sdpa.backend import SDPA

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "triton", "text"),
    [
        ("sm_90", True, "merges by one kernel a call"),
        ("sm_80", True, "merges by one kernel a call"),
        ("sm_90", False, "merges by eager operators: install triton"),
        ("sm_75", True, "merges by eager operators: Triton needs capability 8.0"),
        ("cpu", True, None),
    ],
)
def test_detail_says_how_results_are_merged(monkeypatch, device, triton, text):
    monkeypatch.setattr(fusing, "installed", lambda name: triton)
    found = [part for part in SDPA().detail(problem(device, "float16")).split("; ") if part.startswith("merges")]
    assert found == ([text] if text else [])


@pytest.mark.parametrize("head_dim", [8, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_that_are_right_pass(dtype, head_dim):
    assert fusing.failure(TorchRows(), CPU, dtype, head_dim) == ""


class Shares(TorchRows):
    def merge(self, out, lse, part, part_lse):
        super().merge(out, lse, part, part_lse + 0.01)


class Unread(TorchRows):
    def merge(self, out, lse, part, part_lse):
        super().merge(out, lse, part, part_lse)
        out += 0.0 * part


class Groups(TorchRows):
    def add(self, total, part):
        super().add(total[:, :1], part[:, :1])


class Crash(TorchRows):
    def add(self, total, part):
        raise RuntimeError("no C compiler\nis found")


WRONG = {
    Shares: "kernels compute wrong merges of torch.float32 and head_dim 16",
    Unread: "kernels compute wrong merges of torch.float32 and head_dim 16",
    Groups: "kernels compute wrong sums of gradients of torch.float32 and head_dim 16",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_kernels_that_are_wrong_are_found_out(kind):
    assert fusing.failure(kind(), CPU, torch.float32, 16) == WRONG[kind]


class OnCuda:
    is_cuda, device, dtype = True, CPU, torch.float16


@pytest.fixture
def chosen(monkeypatch):
    """`row_kernels` for a CUDA device of capability 9.0, of the kernels that it is given."""

    def choose(kernels, mode="once", capturing=False):
        monkeypatch.setenv("DILKIT_GPU_PROOF", mode)
        monkeypatch.setattr(fusing, "installed", lambda name: True)
        monkeypatch.setattr(fusing, "_kernels", lambda: kernels)
        monkeypatch.setattr(fusing, "capturing", lambda device: capturing)
        query = OnCuda()
        return fusing.row_kernels(query, problem("sm_90", "float16"))

    fusing._proven.cache_clear()
    yield choose
    fusing._proven.cache_clear()


def test_kernels_that_are_right_are_used(chosen):
    rows = TorchRows()
    assert chosen(rows) is rows
    asked = len(rows.calls)
    assert chosen(rows) is rows
    assert len(rows.calls) == asked, "proven twice"


def test_kernels_that_cannot_be_compiled_are_not_used(chosen):
    with pytest.warns(UserWarning, match=r"merges by torch's operators on cpu: RuntimeError: no C compiler\. Please report"):
        assert chosen(Crash()) is None


def test_kernels_that_are_wrong_are_not_used_and_a_warning_says_so_once(chosen):
    with pytest.warns(
        UserWarning, match=r"merges by torch's operators on cpu: kernels compute wrong merges .* Please report this"
    ):
        assert chosen(Shares()) is None
    with warnings.catch_warnings():
        assert chosen(Shares()) is None


def test_without_proofs_kernels_are_used_as_they_are(chosen):
    rows = Shares()
    assert chosen(rows, mode="off") is rows
    assert rows.calls == []


def test_nothing_is_proven_while_a_graph_is_captured(chosen):
    with pytest.raises(RuntimeError, match=r"have not been proven on cpu, .* make the same call once before"):
        chosen(TorchRows(), capturing=True)


def test_tensors_on_other_devices_are_merged_by_torch():
    query = torch.zeros(1, 256, 8, 64, dtype=torch.float16)
    assert fusing.row_kernels(query, problem("sm_90", "float16")) is None
