"""Workers of other processes, memory that is shared with them or cannot be written, and too little of it."""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.forks import in_child
from torch.utils.data import DataLoader, Dataset

from dilkit import Pattern, dilated_attention

PATTERN = Pattern([64, 512], [1, 4])
BACKENDS = ["native", "sdpa", "reference"]


@pytest.fixture
def one_thread():
    """Children of a process that has used several may hang in operators of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attend(x, backend=None):
    return dilated_attention(x, x, x, PATTERN, backend=backend)


def with_gradient(x, backend=None):
    leaf = x.detach().requires_grad_()
    out = attend(leaf, backend)
    return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]


class Items(Dataset):
    def __init__(self):
        self.x = torch.randn(3, 600, 2, 16, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return with_gradient(self.x[index : index + 1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))])
def test_workers_of_a_data_loader_compute_gradients(method):
    items = Items()
    loader = DataLoader(items, num_workers=2, batch_size=None, multiprocessing_context=method, timeout=100)
    for found, i in zip(loader, range(len(items)), strict=True):
        torch.testing.assert_close(tuple(found), items[i], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("one_thread")
def test_shared_tensors():
    x = torch.randn(2, 512, 2, 16)
    shared, out = x.clone().share_memory_(), torch.zeros_like(x).share_memory_()
    assert in_child(lambda: out.copy_(attend(shared, "native"))) == "done"
    assert torch.equal(out, attend(x, "native"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_memory_that_cannot_be_written(backend, tmp_path):
    """A write to it would end the process: inputs, and gradients that come in."""
    x = torch.randn(2, 512, 2, 16)
    path = tmp_path / "numbers"
    x.numpy().tofile(path)
    locked = torch.from_numpy(np.memmap(path, np.float32, "r", shape=tuple(x.shape)))
    mapped = torch.from_file(str(path), shared=False, size=x.numel()).view(x.shape)
    for given in (locked, mapped):
        torch.testing.assert_close(with_gradient(given, backend), with_gradient(x, backend), rtol=0, atol=1e-6)
        leaf = given.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(attend(leaf, backend), leaf, given)
        assert gradient.isfinite().all()
    assert np.array_equal(np.fromfile(path, np.float32), x.numpy().ravel())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_too_little_memory_is_an_error_and_the_next_call_is_right(backend):
    x = torch.randn(1, 33_000, 4, 64)  # larger than what malloc may keep for itself: 32 MiB
    expected = with_gradient(x, backend)

    def used():
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def limited():
        held, before = list[torch.Tensor](), used()
        while used() == before:  # what malloc has kept of tests before, where such a tensor would find room
            held.append(torch.empty_like(x))
        del held[-1:]
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used() + room, limits[1]))
        try:
            with pytest.raises((MemoryError, RuntimeError), match=r"memory|^$"):
                with_gradient(x, backend)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        torch.testing.assert_close(with_gradient(x, backend), expected)

    for room in (0, x.nbytes + 2**16, 2 * x.nbytes + 2**20):
        assert in_child(limited) == "done", room
