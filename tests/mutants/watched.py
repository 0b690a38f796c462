"""A pytest plugin: coverage tells the lines that each file of tests reaches."""

from coverage import Coverage


def pytest_runtest_logstart(nodeid: str):
    if watching := Coverage.current():
        watching.switch_context(nodeid.split("::")[0])
