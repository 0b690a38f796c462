"""Launches over torch's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from ptx.emulator import Emulator, Span


def launch(emulator: Emulator, ptx: str, values: Sequence[Any], memory: Iterable[Span] = (), **sizes: Any) -> None:
    """Launch a kernel on the emulator, where `values` may be tensors: each passes its address, and may be touched as a whole.

    Launches do not tell which tensors are only read.
    """
    arguments = [np.uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value for value in values]
    emulator.launch(ptx, arguments, memory=[*spans_of(values), *memory], **sizes)


def spans_of(values: Sequence[Any]) -> Iterator[Span]:
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.numel():
            last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
            yield value.data_ptr(), (1 + last) * value.element_size(), f"argument {number}", False
