"""A pytest plugin: CPU time of each file of tests, children included, limited to `cpu_seconds_a_file` of pyproject.toml."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CPU_TIME = "dilkit_cpu_time"
COMPILED = "compiled for all files"
SHOWN = 10
LIMIT = "cpu_seconds_a_file"


class _Clock:
    read = 0.0
    added = 0.0
    compiled = 0.0


def add(seconds: float):
    """Count what a process used that this one does not wait for."""
    _Clock.added += seconds


def spent() -> float:
    """Seconds of CPU time that this process and its ended children have used, and what was added."""
    return sum(os.times()[:4]) + _Clock.added


@contextmanager
def compiling() -> Iterator[None]:
    before = spent()
    try:
        yield
    finally:
        _Clock.compiled += spent() - before


def pytest_addoption(parser):
    parser.addoption("--limit-cpu-time", action="store_true", help=f"fail if a file takes more than {LIMIT}")
    parser.addini(LIMIT, "seconds of CPU time that a file of tests may take in a run with --limit-cpu-time")


def pytest_runtest_logstart():
    _Clock.read, _Clock.compiled = spent(), 0.0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    outcome = yield
    report, now = outcome.get_result(), spent()
    own = now - _Clock.read - _Clock.compiled
    report.user_properties = [*report.user_properties, (CPU_TIME, own), (COMPILED, _Clock.compiled)]
    _Clock.read, _Clock.compiled = now, 0.0


def pytest_sessionfinish(session):
    config = session.config
    if config.getoption("--limit-cpu-time") and _above(config, _by_file(config, CPU_TIME)):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    files, compiled = _by_file(config, CPU_TIME), _by_file(config, COMPILED).total()
    terminalreporter.section("seconds of CPU time")
    for file, seconds in files.most_common(SHOWN):
        terminalreporter.write_line(f"{seconds:7.1f}  {file}")
    terminalreporter.write_line(f"{compiled:7.1f}  {COMPILED}")
    terminalreporter.write_line(f"{files.total() + compiled:7.1f}  all {len(files)} files")
    if config.getoption("--limit-cpu-time"):
        for file in _above(config, files):
            terminalreporter.write_line(f"{file} took more CPU time than {LIMIT} of pyproject.toml allows", red=True)


def _by_file(config, name: str) -> Counter[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    files = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports) if reporter else ():
        for key, value in getattr(report, "user_properties", ()):
            if key == name:
                files[report.nodeid.partition("::")[0]] += value
    return files


def _above(config, files: Counter[str]) -> list[str]:
    limit = float(config.getini(LIMIT))
    return [file for file, seconds in files.most_common() if seconds > limit]
