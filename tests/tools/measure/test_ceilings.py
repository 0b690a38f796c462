"""What the machine can do at most: the ceilings that everything is timed beside."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dilkit.tools.measure import ceilings
from dilkit.tools.measure import timing as measure


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.MATMUL_SIZE, "cpu", 64)
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 1 << 20)


def test_ceilings_are_amounts_over_medians() -> None:
    found = ceilings.Ceilings("float32")
    timed = {name: measure.Samples((0.5, 0.25, 1.0), 1) for name in found.calls}
    told = found.told(timed)
    assert told["matmul"]["gflops"] == found.matmul(timed).gflops == 2e-9 * 64**3 / 0.5
    assert told["copy"]["gb_per_s"] == pytest.approx(1e-9 * 2 * (1 << 20) / 0.5)
    assert told["copy"]["samples_s"] == [0.5, 0.25, 1.0]


@pytest.mark.skipif(find_spec("dilkit.backends.native._native") is None, reason="the CPU kernel was not built")
def test_multiply_adds_are_done_on_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from dilkit.backends.native import _native
    from dilkit.backends.native import backend as native

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    called: list[str] = []

    def count(isa: str, rounds: int) -> int:
        called.append(isa)
        return rounds

    monkeypatch.setattr(_native, "multiply_add", count)
    found = ceilings.Ceilings("float32")
    assert called == [native.instruction_set()], "once, to know its FLOPs"
    found.calls["ceiling fma"]()
    assert len(called) == 1 + 3
    told = found.told({name: measure.Samples((0.5,), 1) for name in found.calls})
    assert told["fma"]["gflops"] == pytest.approx(1e-9 * 3 * ceilings.ROUNDS / 0.5)


def test_a_copy_moves_everything() -> None:
    assert ceilings.whole_copy("cpu")().sum() == 1 << 20


def test_where_there_is_no_kernel_there_are_no_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_multiply_adds", lambda: None)
    found = ceilings.Ceilings("float32")
    assert "fma" not in found.told({name: measure.Samples((1.0,), 1) for name in found.calls})
