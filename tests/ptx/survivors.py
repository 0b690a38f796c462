"""Mutations that nothing notices, each with the reason why it is no fault, or why no fault of its kind can be seen."""

from __future__ import annotations

SURVIVORS: dict[str, str] = {
    "mma_forward: counter 0": "The first tile of a block is never the last one: a counter is used where there are more tiles "
    "than blocks. What takes the last number sets the counter back in the other copy of the code.",
}
