"""Kernel resources from the compiler's log: registers, spills, stack and shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """Resources of a kernel: registers, bytes of stack and of spills of a thread; bytes of static shared memory of a block."""

    name: str
    architecture: str
    registers: int
    stack: int
    spills: int
    shared: int


def usages(log: str) -> dict[str, Usage]:
    """Parse a log of `--ptxas-options=-v`: its kernels by name. Raises ValueError for a log without any."""
    usage_by_kernel = {}
    for match in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        usage_by_kernel[match["name"]] = Usage(
            name=match["name"],
            architecture=match["architecture"],
            registers=int(match["registers"]),
            stack=int(match["stack"]),
            spills=int(match["stores"]) + int(match["loads"]),
            shared=int(shared[1]) if shared else 0,
        )
    if not usage_by_kernel:
        raise ValueError(f"no kernel is reported in the compiler's log: {log!r}")
    return usage_by_kernel
