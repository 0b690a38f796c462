"""Several calls at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.calls import Call, computed, tensors_of
from fuzz.checks import in_threads, require_right

from dilkit import plan


def together(world: Any, calls: list[dict[str, Any]], clears: int) -> None:
    """Each call in a thread of its own, while another thread clears the cache."""
    each = [Call.from_data(call) for call in calls]
    given = [tensors_of(one) for one in each]
    jobs: list[Callable[[], Any]] = [lambda one=one, x=x: computed(one, x) for one, x in zip(each, given, strict=True)]
    found = in_threads([*jobs, lambda: [plan.cache_clear() for _ in range(clears)]])
    for one, tensors, result in zip(each, given, found, strict=False):
        require_right(one, tensors, result)
