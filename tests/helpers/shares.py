"""A pytest plugin: `--share 2/4` runs a part of the tests, `--also FILE` other files too, `--not-passed` what has not passed."""

import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

LAST_RUN = "dilkit/last_run"
SHOWN = 10
MANY = 100
"""So many tests are cut even if they share a fixture."""


def pytest_addoption(parser):
    parser.addoption("--share", metavar="I/N", type=share, help="run the I-th of N shares of the tests")
    parser.addoption("--also", metavar="FILE", type=Path, help="beside the share, run the files of tests that FILE lists")
    parser.addoption("--not-passed", action="store_true", help="beside the share, run quick tests that the last run did not pass")


def share(text: str) -> tuple[int, int]:
    number, shares = map(int, text.split("/"))
    if not 1 <= number <= shares:
        raise ValueError
    return number, shares


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items: list[Any]):
    part, also, not_passed = (config.getoption(name) for name in ("--share", "--also", "--not-passed"))
    if not (part or also or not_passed):
        return
    chosen = of_share(items, *part) if part else set()
    if also:
        files = {*also.read_text(encoding="utf-8").split()}
        chosen |= {item.nodeid for item in items if file_of(item) in files}
    if not_passed:
        passed = {*config.cache.get(LAST_RUN, {}).get("passed", [])}
        chosen |= {item.nodeid for item in items if not item.get_closest_marker("slow")} - passed
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def of_share(items: list[Any], number: int, shares: int) -> set[str]:
    files = defaultdict(list)
    for item in items:
        files[file_of(item)].append(item)
    chosen = set()
    for name, tests in files.items():
        first = zlib.crc32(name.encode())  # the parts of other files begin with other shares
        step = 0 if len(tests) < MANY and any(map(shares_a_fixture, tests)) else shares / len(tests)
        chosen |= {test.nodeid for at, test in enumerate(tests) if (first + int(at * step)) % shares == number - 1}
    return chosen


def shares_a_fixture(item) -> bool:
    """True if a fixture that the test's own file defines is made once for the file."""
    found = [item.session._fixturemanager.getfixturedefs(name, item) or () for name in item.fixturenames]
    return any(fixture.scope == "module" and fixture.baseid == file_of(item) for fixtures in found for fixture in fixtures)


def file_of(item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    cache = getattr(session.config, "cache", None)
    if reporter is None or cache is None or session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    seconds = Counter()
    for report in (report for reports in reporter.stats.values() for report in reports if hasattr(report, "duration")):
        seconds[report.nodeid] += report.duration
    counts = {name: len(reporter.stats.get(name, ())) for name in ("passed", "skipped", "failed", "error")}
    passed = [report.nodeid for report in reporter.stats.get("passed", ())]
    cache.set(LAST_RUN, {"counts": counts, "slowest": dict(seconds.most_common(SHOWN)), "passed": passed})
