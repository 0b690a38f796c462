"""How numbers are written, by unit."""

from __future__ import annotations

from collections.abc import Callable

from dilkit.tools.console.text import in_bytes, in_seconds, in_thousands


def _tokens(value: float) -> str:
    """16K, 1,000 or 1M: powers of two by 1024, others by a thousand."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:,.0f}K"
    return in_thousands(value) if value < 1e6 else f"{value / 1e6:,.3g}M"


UNITS: dict[str, Callable[[float], str]] = {
    "bytes": lambda value: in_bytes(round(value)),
    "gflops": lambda value: f"{value:,.3g} GFLOP/s" if value < 1000 else f"{value / 1000:,.3g} TFLOP/s",
    "kb": lambda value: f"{value:,.3g} kB",
    "number": lambda value: f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}",
    "seconds": in_seconds,
    "times": lambda value: f"{value:,.3g}x" if value < 1000 else f"{value:,.0f}x",
    "tokens": _tokens,
}
