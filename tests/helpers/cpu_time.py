"""A pytest plugin: how much CPU time each file of tests takes.

CPU time is that of the process and of the children it has waited for, user and system, from the start of a test to the end of
its fixtures. Reports carry it, so that pytest-xdist brings it over from its workers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

CPU_TIME = "dilkit_cpu_time"


class _Clock:
    read = 0.0


def spent() -> float:
    """Seconds of CPU time that this process and its ended children have used."""
    return sum(os.times()[:4])


def pytest_runtest_logstart() -> None:
    _Clock.read = spent()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    outcome = yield
    report, now = outcome.get_result(), spent()  # type: ignore[attr-defined]
    report.user_properties = [*report.user_properties, (CPU_TIME, now - _Clock.read)]
    _Clock.read = now


def pytest_terminal_summary(terminalreporter: Any) -> None:
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, value in getattr(report, "user_properties", ()):
                if key == CPU_TIME:
                    files[report.nodeid.split("::")[0]] += value
    terminalreporter.section("CPU time")
    for file, seconds in files.most_common(int(os.environ.get("TOPFILES", "10"))):
        terminalreporter.write_line(f"{seconds:6.1f} s  {file}")
    terminalreporter.write_line(f"{files.total():6.1f} s  all tests")
