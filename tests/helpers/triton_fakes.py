"""A substitute for the launcher of kernels in Triton."""

from typing import Any

import pytest
import torch

from dilkit.backends.triton.sizes import Sizes, sizes_for, step_sizes
from dilkit.problem import Problem


def need_triton():
    pytest.importorskip("triton", reason="triton is not installed: make stages, on Linux")


class Recorder:
    def __init__(self):
        self.launches: list[tuple[str, Sizes, int, tuple[Any, ...], dict[str, Any]]] = []

    def sizes(self, role: str, problem: Problem, low: bool) -> Sizes:
        return step_sizes(problem) if role == "stored" else sizes_for(role, problem.dtype, problem.head_dim, (9, 0), low)

    def resident(self, sizes: Sizes, device: torch.device) -> int:
        return 64

    def counter(self, device: torch.device) -> int:
        return 2**40

    def launch(self, *given):
        self.launches.append(given)
