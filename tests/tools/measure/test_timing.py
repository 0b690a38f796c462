"""The method of measuring, on functions whose time order and memory are known."""

from __future__ import annotations

import pytest
import torch

from dilkit.tools.measure import timing as measure
from dilkit.tools.measure.timing import MIB, MeasureError, Samples, matmul_rate, peak_memory, time_interleaved

TOLERANCE = MIB
"""The high-water mark is kept in pages and by per-CPU counters."""


@pytest.fixture
def measurable() -> None:
    try:
        peak_memory(lambda: None)
    except MeasureError as error:
        pytest.skip(f"this system cannot measure it: {error}")


def mebibytes(n: int) -> torch.Tensor:
    return torch.ones(n * MIB, dtype=torch.uint8)


def one_after_the_other() -> torch.Tensor:
    first = mebibytes(64)
    del first
    return mebibytes(32)


def both_at_once() -> tuple[torch.Tensor, torch.Tensor]:
    return mebibytes(64), mebibytes(32)


def many_small() -> list[torch.Tensor]:
    return [torch.ones(64 * 1024, dtype=torch.uint8) for _ in range(256)]


def python_bytes() -> bytes:
    return b"\1" * (24 * MIB)


@pytest.mark.usefixtures("measurable")
@pytest.mark.parametrize(
    ("function", "expected"),
    [(one_after_the_other, 64), (both_at_once, 96), (many_small, 16), (python_bytes, 24), (lambda: None, 0)],
)
def test_peak_memory_of_known_allocations(function, expected) -> None:
    function()  # the code of an operator is read into memory at its first call
    for _ in range(3):  # again: memory that the allocator kept from the last call must not hide this one's
        assert peak_memory(function) == pytest.approx(expected * MIB, abs=TOLERANCE)


@pytest.mark.usefixtures("measurable")
def test_peak_memory_sees_temporaries_inside_operators() -> None:
    x = torch.ones(16 * MIB // 8, dtype=torch.float64)

    def two_temporaries() -> torch.Tensor:
        return (x * 2 + x).sum()

    two_temporaries()  # the code of an operator is read into memory at its first call
    assert peak_memory(two_temporaries) == pytest.approx(32 * MIB, abs=TOLERANCE)


@pytest.mark.usefixtures("measurable")
def test_peak_memory_does_not_count_what_was_there_before() -> None:
    held = [mebibytes(48)]
    assert peak_memory(held.clear) == pytest.approx(0, abs=TOLERANCE)


def test_peak_memory_says_why_it_cannot_be_measured(monkeypatch) -> None:
    monkeypatch.setattr(measure.sys, "platform", "darwin")
    measure._check_resident_method.cache_clear()
    with pytest.raises(MeasureError, match="Linux"):
        peak_memory(lambda: None)
    measure._check_resident_method.cache_clear()


def test_an_allocator_that_hides_memory_is_found_out(monkeypatch) -> None:
    monkeypatch.setattr(measure, "_resident_peak", lambda function: 0)
    monkeypatch.setattr(measure.sys, "platform", "linux")
    monkeypatch.setattr(measure.ctypes, "CDLL", lambda name: type("Libc", (), {"malloc_trim": None}))
    measure._check_resident_method.cache_clear()
    with pytest.raises(MeasureError, match="known 32 MiB was seen as 0"):
        peak_memory(lambda: None)
    measure._check_resident_method.cache_clear()


def test_rounds_are_interleaved_and_every_sample_is_kept() -> None:
    calls: list[str] = []
    samples = time_interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=3, warmup=1)
    assert "".join(calls) == "ab" + "ababab"
    assert [len(s.seconds) for s in samples.values()] == [3, 3]
    assert samples["a"].calls == 1


def test_short_functions_are_called_often_within_a_sample() -> None:
    calls = []
    samples = time_interleaved({"a": lambda: calls.append(1)}, repeats=2, warmup=0, min_time=0.002)["a"]
    assert samples.calls > 1
    assert len(calls) >= 2 * samples.calls


def test_progress_is_told_of_every_sample() -> None:
    told = []
    time_interleaved({"a": int, "b": int}, repeats=4, progress=lambda: told.append(1))
    assert len(told) == 8


@pytest.mark.parametrize("wrong", [dict(repeats=0), dict(warmup=-1), dict(min_time=-1.0)])
def test_meaningless_rounds_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        time_interleaved({"a": int}, **wrong)


def test_median_and_quartiles() -> None:
    samples = Samples((5.0, 1.0, 2.0, 4.0, 3.0))
    assert samples.median == 3.0
    assert samples.quartiles == (2.0, 4.0)
    assert samples.to_dict()["samples_s"] == [5.0, 1.0, 2.0, 4.0, 3.0]
    assert Samples((7.0,)).quartiles == (7.0, 7.0)


def test_matmul_rate_is_flops_over_the_median(monkeypatch) -> None:
    monkeypatch.setitem(measure.MATMUL_SIZE, "cpu", 128)
    rate = matmul_rate("float64", repeats=2)
    assert (rate.size, rate.dtype, len(rate.samples.seconds)) == (128, "float64", 2)
    assert rate.gflops == pytest.approx(2 * 128**3 / rate.samples.median / 1e9)


def test_matmul_shrinks_where_it_would_take_too_long(monkeypatch) -> None:
    monkeypatch.setattr(measure, "_MATMUL_BUDGET", 0.0)
    assert matmul_rate(repeats=1).size == 256
