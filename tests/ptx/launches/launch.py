"""A launch on a GPU as a record: all that a machine for PTX needs to compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
POINTER_BYTES = 8


@dataclass(frozen=True)
class Argument:
    """What a launch passes for one parameter: its bytes. Of a pointer also how many bytes, from there on, are a tensor's."""

    data: bytes
    reach: int | None = None


@dataclass(frozen=True)
class Launch:
    """One launch of `entry`. `shared_bytes`: the dynamic shared memory of a block, beside what the PTX declares.

    The tensors that arguments point to live for as long as the call that launches.
    """

    ptx: str = field(repr=False)
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arguments: tuple[Argument, ...]


Machine = Callable[[Launch], None]
"""Computes what a launch asks for, or notes it."""


def pointer(x: torch.Tensor) -> Argument:
    """A tensor as an argument: from its first element to its last in memory."""
    steps = sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
    return Argument(x.data_ptr().to_bytes(POINTER_BYTES, "little"), (1 + steps) * x.element_size() if x.numel() else 0)


def target(ptx: str) -> str:
    """The kind of GPU that PTX is for, such as `sm_80`."""
    named = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert named, "no .target"
    return named[1]


def parameter_bytes(ptx: str, entry: str) -> tuple[int, ...]:
    """The size of each parameter of `entry`, in order."""
    declared = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", ptx, re.DOTALL)
    assert declared, f"no .entry {entry}"
    return tuple(BYTES[bits] for bits in re.findall(r"\.param\s+\.[a-z]+(\d+)\b", declared[1]))
