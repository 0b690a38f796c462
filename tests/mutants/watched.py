"""A pytest plugin: coverage tells the lines that each file of tests reaches."""

from __future__ import annotations

from coverage import Coverage


def pytest_runtest_logstart(nodeid: str) -> None:
    if watching := Coverage.current():
        watching.switch_context(nodeid.split("::")[0])
