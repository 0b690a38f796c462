"""Fixtures that tests of the core share."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

LARGE = 64 * 2**20


@pytest.fixture(autouse=True)
def _registered_for_one_test() -> Iterator[None]:
    yield
    if "transformers" in sys.modules and (ours := sys.modules.get("dilkit.integrations.transformers.registration")):
        package = ours.transformers()
        for interface in (package.AttentionInterface, package.AttentionMaskInterface):
            known = interface._global_mapping
            for name in [
                name for name, function in known.items() if getattr(function, "func", None) in (ours.attend, ours.tokens_seen)
            ]:
                del known[name]


@pytest.fixture
def freed_memory_goes_back():
    """Return freed memory at once, or a library's allocator settings hide peaks."""
    if not Path("/proc/self/status").exists():
        return
    x = torch.ones(LARGE, dtype=torch.uint8)
    held = resident()
    del x
    if held - resident() < LARGE // 2:
        pytest.skip("in this process the allocator keeps what is freed")


def resident() -> int:
    (kilobytes,) = re.findall(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) * 1024
