"""A backend that is all limits."""

from __future__ import annotations

from typing import Any

from dilkit import Backend, Limits


class Fake(Backend):
    """A backend of nothing but a name, a priority and limits."""

    def __init__(self, name: str, priority: int, limits: Limits = Limits(devices=None)) -> None:  # noqa: B008
        self.name, self.priority, self.limits = name, priority, limits  # type: ignore[misc]

    def forward(self, *args: Any) -> Any:
        raise AssertionError("nothing is computed here")
