"""What tests of the core share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

LARGE = 64 * 2**20


@pytest.fixture
def freed_memory_goes_back() -> None:
    """A library that another test has loaded may have told the allocator to keep what is freed: no peak can be measured then."""
    if not Path("/proc/self/status").exists():
        return
    x = torch.ones(LARGE, dtype=torch.uint8)
    held = resident()
    del x
    if held - resident() < LARGE // 2:
        pytest.skip("in this process the allocator keeps what is freed")


def resident() -> int:
    """Bytes of this process that are in memory."""
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024
