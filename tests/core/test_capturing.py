"""Captured CUDA graphs, asked of the device of the tensors."""

import contextlib

import pytest
import torch
from helpers.project import ROOT, ROOTS

from dilkit import Device, Pattern, Problem
from dilkit.device import capturing
from dilkit.op import zero_keys
from dilkit.op.dropout import Dropout, dropout_of
from dilkit.op.zero_keys import ZeroKeys, add_zero_keys

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class OnSecond(torch.Tensor):
    device = property(lambda self: SECOND)


class Gpus:
    """Two GPUs in place of torch's: which is current, and which captures."""

    current, captures = 0, 1

    @contextlib.contextmanager
    def guard(self, device):
        before, self.current = self.current, device.index
        yield
        self.current = before


@pytest.fixture
def gpus(monkeypatch):
    found = Gpus()
    monkeypatch.setattr(torch.cuda, "device", found.guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.current == found.captures)
    return found


def test_it_is_asked_of_a_device(gpus):
    assert [capturing(device) for device in (FIRST, SECOND, torch.device("cpu"))] == [False, True, False]
    assert gpus.current == 0


def test_dropout_is_refused_where_the_tensors_are_captured(gpus):
    device = Device("cuda", "GPU", (9, 0), index=1)
    problem = Problem(pattern=Pattern.dense(), seq=8, heads=1, head_dim=16, dropout_p=0.5, device=device)
    drawn = Dropout(0.5, torch.tensor(1))
    with pytest.raises(RuntimeError, match="every replay would drop the same weights"):
        dropout_of(problem, drawn)
    gpus.captures = 0
    found = dropout_of(problem, drawn)
    assert found.seed == 1


@pytest.mark.parametrize("captures", [0, 1])
def test_zero_keys_are_kept_for_graphs_of_their_device(gpus, monkeypatch, captures):
    monkeypatch.setattr(zero_keys, "_CAPTURED", {})
    gpus.captures, keys = captures, ZeroKeys(0, torch.zeros(1, 4))
    out, lse = torch.ones(1, 4, 1, 2), torch.zeros(1, 1, 4)
    add_zero_keys(out, lse.as_subclass(OnSecond), keys)
    assert list(zero_keys._CAPTURED.values()) == [keys] * captures
    assert torch.equal(out, torch.full_like(out, 0.5))


def test_nothing_else_asks_torch():
    files = (path for folder in ROOTS.values() for path in (ROOT / folder).rglob("*.py"))
    assert [path.name for path in files if "is_current_stream_capturing" in path.read_text()] == ["device.py"]
