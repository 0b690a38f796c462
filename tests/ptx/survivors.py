"""Mutations that nothing notices, each with the reason why it is no fault, or why no fault of its kind can be seen."""

from __future__ import annotations

SURVIVORS: dict[str, str] = {}
