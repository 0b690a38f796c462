"""Seeds, poisoned memory, and the matrix backend x feature at the end of a run. Torch is imported where it is used."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from dilkit.environment import TUNED

if TYPE_CHECKING:
    from dilkit.testing.conformance import CaseResult

pytest_plugins = ["helpers.cpu_time", "helpers.gpu_day", "helpers.shares"]
MATRIX = "dilkit_matrix"
os.environ[TUNED.name] = "none"  # what somebody has measured on this machine changes no test, nor what a test starts
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):  # or torch takes AMX for bfloat16, and then fails
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.register_profile("at length", settings.get_profile("any machine"), max_examples=200)
settings.load_profile("any machine")  # how long an example takes, or drawing one, says how busy the machine is


def pytest_addoption(parser):
    parser.addoption("--nothing-missing", action="store_true", help="fail if a test is skipped for want of a package")


def pytest_sessionfinish(session):
    """Fail a run with --nothing-missing if a package was missing, except peers."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not session.config.getoption("--nothing-missing") or reporter is None:
        return
    reasons = {report.longrepr[2] for report in reporter.getreports("skipped") if isinstance(report.longrepr, tuple)}
    if missing := sorted(reason for reason in reasons if "not installed" in reason and "dilkit[peers]" not in reason):
        reporter.write_line(f"\nskipped, with --nothing-missing: {'; '.join(missing)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def seeded():
    """Start every test from the same random numbers."""
    import torch

    torch.default_generator.manual_seed(0)  # torch.manual_seed writes the stack down for each kind of device that is not there


@pytest.fixture
def into_matrix(record_property: Callable[[str, object], None]) -> Callable[[CaseResult], None]:
    return lambda r: record_property(MATRIX, (r.backend, r.case.feature, r.verdict, "; ".join(r.reasons)))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """`torch.empty` and its like hand out NaN."""
    from dilkit.testing.poison import poisoned_memory

    with poisoned_memory():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code in this process and on disk, where old graphs hide new faults."""
    import torch

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C work, here and in children, even if this process inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Freeze the objects before the first test: collecting them takes most of some tests' time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.callbacks.append(_freeze_what_is_left)


def _freeze_what_is_left(phase: str, info: dict[str, int]):
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def pytest_unconfigure():
    """Unfreeze objects at exit if Triton is loaded, which else reports leaks; that takes seconds."""
    if _freeze_what_is_left in gc.callbacks:  # where tests were collected: of a run with workers, in these alone
        gc.callbacks.remove(_freeze_what_is_left)
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)


def pytest_terminal_summary(terminalreporter):
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "skipped", "failed"):
        for report in terminalreporter.getreports(outcome):
            _count(report, counts, reasons)
    if counts:
        terminalreporter.section("backend x feature: passed / refused / failed")
        for line in _matrix(counts, reasons):
            terminalreporter.write_line(line)


def _count(report, counts: dict[tuple[str, str], Counter[str]], reasons: dict[str, Counter[str]]):
    for key, value in getattr(report, "user_properties", ()):  # a skipped file has none
        if key != MATRIX or report.when != "call":
            continue
        backend, feature, verdict, reason = value
        counts[backend, feature][verdict] += 1
        if verdict != "passed":
            reasons[backend][f"{verdict}: {reason}"] += 1


def _matrix(counts: dict[tuple[str, str], Counter[str]], reasons: dict[str, Counter[str]]) -> Iterator[str]:
    backends = list(dict.fromkeys(backend for backend, _ in counts))
    features = list(dict.fromkeys(feature for _, feature in counts))
    width = max(map(len, features))
    columns = [max(11, len(backend)) for backend in backends]
    yield " " * width + "".join(f"  {b:>{c}}" for b, c in zip(backends, columns, strict=True))
    for feature in features:
        cells = [counts[backend, feature] for backend in backends]
        shown = [" / ".join(str(cell[v]) for v in ("passed", "refused", "failed")) for cell in cells]
        yield f"{feature:<{width}}" + "".join(f"  {s:>{c}}" for s, c in zip(shown, columns, strict=True))
    for backend in backends:
        for reason, times in reasons[backend].most_common():
            yield f"{backend}: {times} x {reason}"
