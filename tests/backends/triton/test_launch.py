"""Launches through Triton."""

from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from threading import Event
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: make stages, on Linux")

from helpers.triton_compile import FakeDriver, asked_for
from triton.runtime import driver

from dilkit import Pattern, SlidingWindow
from dilkit.backends.triton import launch
from dilkit.backends.triton.backend import TritonTiles
from dilkit.backends.triton.launch import DeviceLauncher, compiling, kernel
from dilkit.backends.triton.sizes import Sizes, sizes_for
from dilkit.backends.triton.tiles import View
from dilkit.inputs import Inputs
from dilkit.problem import Problem

SIZES = Sizes(16, 16, 4, 1)
SEGMENTS = Pattern([64, 256], [1, 2])
WINDOW = Pattern.of(SlidingWindow(40))


class AskingLauncher(DeviceLauncher):
    def sizes(self, role, problem, low):
        return sizes_for(role, problem.dtype, problem.head_dim, (9, 0), low)

    def launch(self, role, sizes, programs, arguments, constants):
        kernel(role).warmup(*arguments, **constants, **compiling(sizes), grid=(programs,))


@pytest.fixture
def asked():
    with asked_for() as found:
        yield found


@pytest.mark.parametrize("pattern", [SEGMENTS, WINDOW], ids=["segments", "window"])
@pytest.mark.parametrize("batch", [1, 2])
def test_nothing_is_compiled_anew_for_another_length(asked, pattern, batch):
    backend, found = TritonTiles(AskingLauncher()), []
    for seq in (304, 301, 320, 333):
        asked.clear()
        fields = dict(heads=4, kv_heads=2, head_dim=24, batch=batch, dtype="float16", is_causal=True)
        problem = Problem(pattern=pattern, seq=seq, key_padding_mask=True, requires_grad=True, **fields)
        q, k, v = (torch.zeros(batch, seq, heads, 24, dtype=torch.float16) for heads in (4, 2, 2))
        mask = torch.zeros(batch, seq, dtype=torch.bool)
        out, lse = backend.forward(Inputs(q, k, v, key_padding_mask=mask), problem)
        backend.backward(out, Inputs(q, k, v, key_padding_mask=mask), out, lse, problem)
        found.append(set(asked))
    assert {name.split()[0] for name in found[0]} == {"forward", "dots", "dquery", "dkeyvalue"}
    assert set.union(*found) == found[0]


class Loading:
    """A kernel as Triton keeps it: `module` is None until the first launch has loaded it."""

    def __init__(self):
        self.module, self.launched, self.broken, self.go_on = None, 0, 0, Event()
        self._loading = False

    def warmup(self, *arguments, grid, **options):
        return SimpleNamespace(module=self.module)

    def __getitem__(self, grid):
        return self._run

    def _run(self, *arguments, **options):
        if self.module is None and self._loading:
            self.broken += 1  # there is a launcher already, and no function yet
        elif self.module is None:
            self._loading = True
            self.go_on.wait(0.2)  # other threads run
            self.module = object()
        self.launched += 1


@pytest.fixture
def loading(monkeypatch):
    found = Loading()
    monkeypatch.setattr(launch, "kernel", lambda role: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(launch, "_LAUNCHED", set())
    return found


ARGUMENTS = (SimpleNamespace(data=torch.zeros(1)),)


def test_nothing_is_loaded_while_a_graph_is_captured(loading, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(launch, "capturing", lambda device: True)
        with pytest.raises(RuntimeError, match=r"kernel forward is not loaded on cpu.*make the same call once before"):
            DeviceLauncher().launch("forward", SIZES, 1, ARGUMENTS, {})
    assert loading.launched == 0
    DeviceLauncher().launch("forward", SIZES, 1, ARGUMENTS, {})
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    DeviceLauncher().launch("forward", SIZES, 1, ARGUMENTS, {})
    assert loading.launched == 2


def test_a_kernel_is_loaded_by_one_thread(loading):
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(DeviceLauncher().launch, "forward", SIZES, 1, ARGUMENTS, {}) for _ in range(4)]:
            done.result()
    assert (loading.launched, loading.broken) == (4, 0)


def test_devices_wait_for_each_other_at_first_launches_alone(loading, monkeypatch):
    busy, go_on, order = Event(), Event(), []

    def run(*arguments, device, waits=False, **options):
        order.append(f"{device} begins")
        if waits:
            busy.set()
            go_on.wait(5)
        order.append(f"{device} ends")

    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(loading, "_run", run)
    given = {name: (SimpleNamespace(data=SimpleNamespace(device=torch.device(name))),) for name in ("cuda:0", "cuda:1")}

    def launch_on(name, **constants):
        DeviceLauncher().launch("forward", SIZES, 1, given[name], dict(device=name, **constants))

    with ThreadPoolExecutor(2) as threads:
        for first in (True, False):
            slow = threads.submit(launch_on, "cuda:0", waits=True)
            assert busy.wait(5)
            other = threads.submit(launch_on, "cuda:1")
            waiting = wait([other], 0.2 if first else 5).not_done
            assert bool(waiting) == first
            go_on.set()
            slow.result()
            other.result()
            busy.clear()
            go_on.clear()
    in_turn = [f"cuda:{i} {step}" for i in range(2) for step in ("begins", "ends")]
    assert order == [*in_turn, in_turn[0], *in_turn[2:], in_turn[1]]


def test_what_triton_has_compiled_but_not_loaded_is_told_apart():
    """Triton's kernels have no module before they are launched."""
    x, numbers = torch.zeros(1, 16, 1, 16), torch.zeros(1, 1, 16)
    driver.set_active(FakeDriver(80))
    try:
        view, constants = View(x, *x.stride()[:3]), dict(DIM=16, SIZE=16, ROWS=16)
        made = kernel("dots").warmup(view, view, numbers, 16, 1, **constants, **compiling(SIZES), grid=(1,))
        assert made.module is None
        with pytest.raises(RuntimeError, match="kernel dots is not loaded"):
            launch._expect_loaded("dots", x.device, made)
    finally:
        driver.set_active(None)
