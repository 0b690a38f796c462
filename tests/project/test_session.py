"""A run of the tests leaves the process as it should end."""

import pytest
from helpers.project import ROOT, python

RUN = """
import atexit, gc, pytest, sys, types
sys.modules["triton"] = types.ModuleType("triton")
atexit.register(lambda: print(f"{gc.get_freeze_count()} objects frozen"))  # the last to be called
print(f"ended with {pytest.main(['-q', '-p', 'no:cacheprovider', 'tests/core/test_environment.py']):d}")
"""


@pytest.mark.slow
def test_nothing_stays_frozen_where_triton_is_loaded() -> None:
    """It says at exit which of its modules were not freed, as nothing is that is frozen."""
    assert python(RUN, ROOT).splitlines()[-2:] == ["ended with 0", "0 objects frozen"]
