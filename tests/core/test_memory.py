"""Peak memory."""

from pathlib import Path

import pytest
import torch

from dilkit.testing import memory
from dilkit.testing.memory import MIB, MeasureError, check_peak_memory, peak_memory

pytestmark = pytest.mark.usefixtures("freed_memory_goes_back")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def huge_page():
    """Return the bytes of large pages for numpy; 0 if there are none."""
    chosen = HUGE_PAGES / "enabled"
    if not chosen.exists() or "[never]" in chosen.read_text():
        return 0
    return int((HUGE_PAGES / "hpage_pmd_size").read_text())


TOLERANCE = MIB + huge_page()
"""The high-water mark is kept in pages, of which the last may be in part another's, and by per-CPU counters."""


@pytest.fixture
def measurable():
    try:
        peak_memory(lambda: None)
    except MeasureError as error:
        pytest.skip(f"this system cannot measure it: {error}")


def mebibytes(n):
    return torch.ones(n * MIB, dtype=torch.uint8)


def one_after_the_other():
    first = mebibytes(64)
    del first
    return mebibytes(32)


def both_at_once():
    return mebibytes(64), mebibytes(32)


def many_small():
    return [torch.ones(64 * 1024, dtype=torch.uint8) for _ in range(256)]


def python_bytes():
    return b"\1" * (24 * MIB)


@pytest.mark.usefixtures("measurable")
@pytest.mark.parametrize(
    ("function", "expected", "rounding"),
    [
        (one_after_the_other, 64, 0),
        (both_at_once, 96, 0),
        (many_small, 16, 2),  # each of 256 may lie in a hole of its own, and begin and end in a page that it has for itself
        (python_bytes, 24, 0),
        (lambda: None, 0, 0),
    ],
)
def test_peak_memory_of_known_allocations(function, expected, rounding):
    function()  # the code of an operator is read into memory at its first call
    peaks = [peak_memory(function) for _ in range(3)]  # memory that the allocator kept from one call must not hide the next one's
    assert expected * MIB - TOLERANCE < min(peaks) < (expected + rounding) * MIB + TOLERANCE  # other threads may add to the rest
    assert max(peaks) < (expected + 8) * MIB


@pytest.mark.usefixtures("measurable")
def test_peak_memory_does_not_count_what_was_there_before():
    held = [mebibytes(48)]
    assert peak_memory(held.clear) == pytest.approx(0, abs=TOLERANCE)


def test_peak_memory_says_why_it_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    memory._check_resident_method.cache_clear()
    with pytest.raises(MeasureError, match="Linux"):
        peak_memory(lambda: None)
    memory._check_resident_method.cache_clear()


def check_with_peaks(monkeypatch, peaks):
    monkeypatch.setattr(memory, "_resident_peak", lambda function: peaks.pop(0))
    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: type("Libc", (), {"malloc_trim": None}))
    memory._check_resident_method.cache_clear()
    try:
        check_peak_memory()
    finally:
        memory._check_resident_method.cache_clear()


def test_an_allocator_that_hides_memory_is_found_out(monkeypatch):
    with pytest.raises(MeasureError, match="known 32 MiB was seen as 0"):
        check_with_peaks(monkeypatch, [32 * MIB] + [0] * 9)


def test_one_try_that_another_thread_spoils_does_not_end_measuring(monkeypatch):
    check_with_peaks(monkeypatch, [32 * MIB, 12 * MIB, 45 * MIB, 33 * MIB])
