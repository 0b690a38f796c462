"""A run of the tests leaves the process as it should end."""

import pytest
from helpers.project import ROOT, python

RUN = """
import gc, pytest, sys, types
sys.modules["triton"] = types.ModuleType("triton")
ended = pytest.main(["-q", "-p", "no:cacheprovider", "tests/core/test_environment.py"])
print(f"ended with {ended:d}, {gc.get_freeze_count()} objects frozen")
"""


@pytest.mark.slow
def test_nothing_stays_frozen_where_triton_is_loaded() -> None:
    """It says at exit which of its modules were not freed, as nothing is that is frozen."""
    assert python(RUN, ROOT).splitlines()[-1] == "ended with 0, 0 objects frozen"
