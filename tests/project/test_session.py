"""A run of the tests leaves the process as it should end."""

import pytest
from helpers.project import ROOT, python

RUN = """
import gc, pytest
ended = pytest.main(["-q", "-p", "no:cacheprovider", "tests/core/test_environment.py"])
print(f"ended with {ended:d}, {gc.get_freeze_count()} objects frozen")
"""


@pytest.mark.slow
def test_nothing_stays_frozen_at_the_end() -> None:
    assert python(RUN, ROOT).splitlines()[-1] == "ended with 0, 0 objects frozen"
