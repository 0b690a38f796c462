"""Settings that later steps run under."""

from __future__ import annotations

import os
from typing import Any

import torch
from fuzz.checks import require

from dilkit import plan


def set_to(world: Any, name: str, value: str) -> None:
    """An environment variable, or the number of threads of torch."""
    if name == "threads":
        torch.set_num_threads(int(value))
    else:
        os.environ[name] = value


def clear(world: Any) -> None:
    """Empty the pattern cache."""
    plan.cache_clear()
    info = plan.cache_info()
    require(info.entries == info.bytes == 0, f"the cache is not empty: {info}")
