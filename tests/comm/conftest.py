"""Threads of ranks."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def on_one_core(request) -> Iterator[None]:
    """Run a quick test's threads on one core, another for each worker.

    Ranks of a small problem pass Python's lock at every operator, which takes twice their CPU time over several cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if not hasattr(os, "sched_setaffinity") or request.node.get_closest_marker("slow"):
        yield
    else:
        cores = os.sched_getaffinity(0)
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
        yield
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)
