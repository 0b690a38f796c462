"""Measures the host's CPU time in calls of GPU backends whose kernels do nothing."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from helpers.cuda_fakes import RecordingLauncher
from torch import Tensor

from dilkit import Backend, Device, Inputs, Pattern, Problem
from dilkit.backends.cuda.backend import CupyRaw
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.sdpa.kernels import KERNELS

SIZES: Any = dict(pattern=Pattern([64, 128, 256, 512, 1024], [1, 2, 4, 8, 16]), seq=256, heads=8, head_dim=8, dtype="bfloat16")


class IdleRows:
    def merge(self, *views: Tensor): ...

    add = merge


class IdleLauncher(RecordingLauncher):
    def launch(self, kernel, blocks: int, arguments, device: torch.device): ...


@lru_cache(maxsize=64)
def _rows(batch: int, heads: int, rows: int, width: int) -> Tensor:
    """Results in the order in which kernels of CUDA write them."""
    return torch.zeros(batch, rows, heads, width, dtype=torch.bfloat16).transpose(1, 2)


_sums = lru_cache(maxsize=64)(torch.zeros)


def _forward(q: Tensor, *others) -> tuple[Tensor, Tensor]:
    return _rows(*q.shape), _sums(q.shape[:3])


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(*q.shape), _rows(*k.shape), _rows(*k.shape)


def _microseconds(call: Callable[[], Any], repeats: int) -> float:
    samples = []
    for _ in range(20 + repeats):
        begin = time.thread_time_ns()
        call()
        samples.append(time.thread_time_ns() - begin)
    return round(statistics.median(samples[20:]) / 1000, 1)  # without those that fill caches


def measure(repeats: int) -> dict[str, float]:
    flash = next(kernel for kernel in KERNELS if kernel.name == "flash")
    sdpa = SDPA((replace(flash, forward=_forward, backward=_backward),), IdleRows())
    backends: tuple[Backend, ...] = sdpa, CupyRaw(IdleLauncher(264), (9, 0))
    posed, found = Problem(**SIZES, device=Device.assume("sm_90"), requires_grad=True), dict[str, float]()
    q, k, v, dout = torch.zeros(4, 1, posed.seq, posed.heads, posed.head_dim, dtype=torch.bfloat16).unbind()
    for backend in backends:
        problem, inputs = posed.with_encoded(backend.encode(posed)), Inputs(q, k, v)
        results = backend.forward(inputs, problem)
        found[f"{backend.name} forward"] = _microseconds(partial(backend.forward, inputs, problem), repeats)
        found[f"{backend.name} backward"] = _microseconds(partial(backend.backward, dout, inputs, *results, problem), repeats)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=500, help="calls of each pass (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="for a program")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(args.repeats)
    print(json.dumps(times) if args.json else "\n".join(f"{name:20} {value:8.1f} us" for name, value in times.items()))
