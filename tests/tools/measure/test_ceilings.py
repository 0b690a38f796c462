"""What the machine can do at most: the ceilings that everything is timed beside."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dilkit.tools.measure import ceilings
from dilkit.tools.results.record import Samples

pytestmark = pytest.mark.usefixtures("tiny_yardsticks")


def test_ceilings_are_amounts_over_medians() -> None:
    found = ceilings.Ceilings("float32")
    timed = {name: Samples.of((0.5, 0.25, 1.0)) for name in found.calls}
    rates = found.rates(timed)
    assert (rates["matmul"].size, rates["matmul"].dtype, rates["matmul"].gflops) == (64, "float32", 2e-9 * 64**3 / 0.5)
    assert rates["copy"].gb_per_s == pytest.approx(1e-9 * 2 * (1 << 20) / 0.5)
    assert rates["copy"].samples_s == (0.5, 0.25, 1.0)


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
    rates = found.rates({name: Samples.of((0.5,)) for name in found.calls})
    assert rates["fma"].gflops == pytest.approx(1e-9 * 3 * ceilings.ROUNDS / 0.5)


def test_a_copy_moves_everything() -> None:
    assert ceilings.whole_copy("cpu")().sum() == 1 << 20


def test_where_there_is_no_kernel_there_are_no_multiply_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_multiply_adds", lambda: None)
    found = ceilings.Ceilings("float32")
    assert found.rates({name: Samples.of((1.0,)) for name in found.calls})["fma"] is None


def test_a_matmul_shrinks_where_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_MATMUL_BUDGET", 0.0)
    assert ceilings.square_matmul(size=2048)[0] == 256
