"""A pytest plugin: `--gpu-day FILE` keeps a row for each test; those that passed with equal code and device do not run again."""

import hashlib
import re
from collections import defaultdict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

KIND, NOTE, PASSED, RECORDER = "suite-gpu-day", "gpu_day", "gpu_day_passed", "gpu-day-recorder"
VERDICTS = {"passed": "measured", "skipped": "absent", "failed": "failed"}
ROOT = Path(__file__).parents[2]
CODE = ("dilkit", "backends", "comm", "tools", "tests/gpu", "tests/helpers")
OF_TESTS = (
    "dilkit",
    "backends",
    "comm",
    "tools/measure",
    "tools/commands",
    "tests/gpu/conftest.py",
    "tests/helpers/gpu_calls.py",
)
FOLDERS = {"cupy_raw": "backends/cuda", "triton": "backends/triton", "numba_cuda": "backends/numba", "flex": "backends/flex"}
"""All code; that of every test; by backend the code that other backends do not run."""


def pytest_addoption(parser):
    parser.addoption("--gpu-day", metavar="FILE", type=Path, help="write a row for each test into FILE; skip what passed by it")
    parser.addoption("--gpu-oracle", metavar="FILE", type=Path, help="results of the oracle, of `run.py --prepare`")
    parser.addoption("--gpu-device", default="cuda:0", metavar="DEVICE", help="where tests of GPUs run; cpu: a rehearsal")


def pytest_configure(config):
    if (path := config.getoption("--gpu-day")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path, config.getoption("--gpu-device")), RECORDER)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Send earlier passes to a worker of pytest-xdist, which must collect the same tests."""
    recorder = node.config.pluginmanager.get_plugin(RECORDER)
    node.workerinput[PASSED] = recorder.passed if recorder else []


def pytest_collection_modifyitems(config, items: list[Any]):
    recorder = config.pluginmanager.get_plugin(RECORDER)
    passed = {*(recorder.passed if recorder else getattr(config, "workerinput", {}).get(PASSED, ()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]


class Recorder:
    """The file and its content. Raises UsageError for a file of another device."""

    def __init__(self, path: Path, device_name: str):
        from dilkit.device import cuda_driver, device_named
        from dilkit.tools.results.file import new_result, read_result
        from dilkit.tools.results.rows import RowsResult

        device = device_named(device_name)
        facts = dict(driver=cuda_driver() if device.type == "cuda" else 0)
        self.path, self.failures = path, defaultdict[str, list[str]](list)
        self.result = new_result(RowsResult, device, kind=KIND, suite="gpu-day", repeats=1, facts=facts)
        before = read_result(path, RowsResult, KIND) if path.exists() else self.result
        here, there = self.result.environment, before.environment
        if here.device_name != there.device_name:
            raise pytest.UsageError(f"--gpu-day: {path} is of another device ({there.device_name}); name another file")
        if (facts, here.torch) == (before.facts, there.torch):
            fresh = {row.case["name"] for row in before.rows if row.values.get("code") == digest_of_test(row.case["name"])}
            rows = tuple(row for row in before.rows if row.case["name"] in fresh)
            self.result = replace(self.result, rows=rows, steps=before.steps)
        self.passed = [row.case["name"] for row in self.result.rows if row.values.get("ended") == "passed"]

    def pytest_collection_finish(self, session):
        self.pytest_xdist_node_collection_finished(None, [item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids: list[str]):
        from dilkit.tools.bench.suites.gpu_day import CORRECTNESS

        self.result = replace(
            self.result, steps=tuple(dict.fromkeys([*self.result.steps, *((CORRECTNESS, name) for name in ids)]))
        )

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.failures[report.nodeid] += [first_line(report.longrepr)] * report.failed
            self.keep(report, self.failures[report.nodeid])

    def keep(self, report, failures: list[str]):
        from dilkit.tools.bench.suites.gpu_day import CORRECTNESS, NOTED, TARGETS
        from dilkit.tools.results.environment import now
        from dilkit.tools.results.file import write_result
        from dilkit.tools.results.rows import ResultRow

        case, ended = dict(name=report.nodeid), "failed" if failures else report.outcome
        found = "; ".join(failures) or (first_line(report.longrepr) if report.skipped else "")
        values = dict(ended=ended, seconds=report.duration, found=found, code=digest_of_test(report.nodeid))
        rows = [row for row in self.result.rows if row.case["name"] != report.nodeid]
        rows.append(ResultRow(table=CORRECTNESS, case=case, verdict=VERDICTS[ended], reasons=tuple(failures), values=values))
        for what, text, numbers in (note for key, note in report.user_properties if key == NOTE):
            rows.append(ResultRow(table=NOTED, case=case | dict(what=what), values=dict(found=text) | numbers))
        result = replace(self.result, rows=tuple(rows), date=now(), done=sum(row.table == CORRECTNESS for row in rows))
        self.result = replace(result, figures=tuple(target.judge(result) for target in TARGETS))
        write_result(self.result, self.path)


def first_line(found) -> str:
    crash = getattr(found, "reprcrash", None)
    text = found[2].removeprefix("Skipped: ") if isinstance(found, tuple) else crash.message if crash else str(found)
    return next((line.strip() for line in text.splitlines() if line.strip()), "no words")


def digest_of_test(name: str) -> str:
    """Return a digest of the code that a test runs: what only backends run that its name does not have is left out."""
    named = FOLDERS.keys() & re.split(r"[\[\]-]", name)
    others = (folder for backend, folder in FOLDERS.items() if named and backend not in named)
    return files_digest(*OF_TESTS, name.partition("::")[0], without=tuple(others))


@lru_cache
def files_digest(*folders: str, without: tuple[str, ...] = ()) -> str:
    """Return a digest of the Python, CUDA and compiled code in files and folders of the checkout."""
    paths = [path for folder in folders for path in ((ROOT / folder).rglob("*") if (ROOT / folder).is_dir() else [ROOT / folder])]
    files = {path for path in paths if path.suffix in (".py", ".so", ".cu", ".cuh") and path.is_file()}
    kept = sorted(path for path in files if not any(path.is_relative_to(ROOT / folder) for folder in without))
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in kept)).hexdigest()[:16]
