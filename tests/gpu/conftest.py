"""Backends, calls and the device for tests of GPUs."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.gpu_calls import TORCHS, small_problem
from helpers.gpu_day import NOTE
from helpers.stored_oracle import StoredOracle

from dilkit import Problem, environment
from dilkit.backends.sdpa.one_kernel import one_kernel_backends
from dilkit.device import cuda_count
from dilkit.testing import conformance
from dilkit.tools.measure.implementation import backend_implementations

OURS, REHEARSED = ("cupy_raw", "triton"), ("native",)


def pytest_generate_tests(metafunc):
    rehearsal = metafunc.config.getoption("--gpu-device") == "cpu"
    ours, of_torch = (REHEARSED, ["sdpa"]) if rehearsal else (OURS, ["sdpa", *TORCHS])
    choices: dict[str, Sequence[Any]] = dict(
        backend=ours,
        backends=[pytest.param([name], id=name) for name in ours] + [pytest.param(of_torch, id="torch")],
        dtype=("bfloat16", "float32")[: 1 if rehearsal else None],
        requires_grad=(False, True),
    )
    for name, values in choices.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=["forward", "with gradients"] if name == "requires_grad" else None)


@pytest.fixture(scope="session")
def device(request) -> str:
    name = str(request.config.getoption("--gpu-device"))
    if name != "cpu" and not cuda_count():
        pytest.skip("torch sees no CUDA device")
    return name


@pytest.fixture(scope="session")
def rehearsal(device: str) -> bool:
    """True on the CPU: at small sizes."""
    return device == "cpu"


@pytest.fixture
def cuda(rehearsal: bool):
    if rehearsal:
        pytest.skip("no CUDA device: a rehearsal")


@pytest.fixture
def asked(backend: str, dtype: str, requires_grad: bool, device: str) -> Problem:
    problem = small_problem(device, dtype=dtype, requires_grad=requires_grad)
    if reasons := backend_implementations([backend])[0].refusals(problem):
        pytest.skip("; ".join(reasons))
    return problem


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    return lambda what, found, **numbers: record_property(NOTE, (what, found, numbers))


@pytest.fixture(scope="session", autouse=True)
def stored_oracle(request, device: str) -> Iterator[StoredOracle | None]:
    if (path := request.config.getoption("--gpu-oracle")) is None:
        yield None
        return
    oracle = StoredOracle(path, device)
    with mock.patch.object(conformance, "expected", oracle.expected):
        yield oracle


@pytest.fixture(scope="session", autouse=True)
def _kernels_of_torch(device: str) -> Iterator[None]:
    """Each of torch's kernels is a backend of its own."""
    with one_kernel_backends(device.partition(":")[0]):
        yield


@pytest.fixture(autouse=True)
def _without_proofs(rehearsal: bool) -> Iterator[None]:
    """Ask for no proofs, and end a worker with a broken context: after an access out of bounds every call fails."""
    with environment.without_proofs():
        yield
    try:
        if not rehearsal:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise
