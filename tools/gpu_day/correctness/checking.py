"""Cases that are checked in several processes at once: the oracle on the CPU, and Triton's compiler, are what takes the time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager

import torch

from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.testing.conformance import Result, check
from dilkit.testing.problems import Case
from dilkit.threads import usable_cores
from dilkit.tools.gpu_day.step import Context

MOST = 16
"""Processes at once: each has a context of its own on the device."""


def checked(names: Sequence[str], cases: Sequence[Case], context: Context, seconds: float) -> Iterator[Result]:
    """What becomes of each backend on each case, in the order in which they end within `seconds`. What is slow leaves cases out;
    what hangs keeps this process from its end.
    """
    end, cores = time.monotonic() + seconds, usable_cores()
    workers = max(1, min(MOST, cores, len(cases)))
    how = multiprocessing.get_context("spawn"), _begin, (context.kind, max(1, cores // workers))
    pool = futures.ProcessPoolExecutor(workers, *how)
    try:
        running = {pool.submit(_results, tuple(names), case, context.device): case for case in cases}
        while running and (left := end - time.monotonic()) > 0:
            for job in futures.wait(running, left, futures.FIRST_COMPLETED).done:
                case, found = running.pop(job), job.result()
                yield from found
                if not found:
                    running[pool.submit(_results, tuple(names), case, context.device)] = case
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


_registered: list[AbstractContextManager[tuple[str, ...]]] = []
"""What keeps each of torch's kernels registered as a backend, in a process of the pool."""


def _begin(kind: str, threads: int) -> None:
    torch.set_num_threads(threads)
    _registered.append(one_kernel_backends(kind))
    _registered[0].__enter__()


def _results(names: tuple[str, ...], case: Case, device: str) -> list[Result]:
    """None of them where an earlier case has broken this process's context: another one then takes the case."""
    if not _usable(device):
        time.sleep(1)
        return []
    return [check(name, case, device) for name in names]


def _usable(device: str) -> bool:
    """Whether the context is as it should be: after an access to memory that is not there, every call fails."""
    try:
        if device != "cpu":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
