"""Forks: while another thread is in the middle of something, and before the first call.

A child has only the thread that forked: a lock of another thread is held for ever. torch's operators may hang in a child if the
parent's main thread has used several OpenMP threads; dilkit must not add to that.
"""

import sys
import threading
import time
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
import torch
from helpers.forks import in_child
from helpers.launch import fork

import dilkit
from dilkit import Backend, Limits, Pattern, dilated_attention, plan, registry

pytestmark = pytest.mark.surroundings

SHORT = 20.0


@contextmanager
def halfway(thread, inside, go_on):
    thread.start()
    try:
        assert inside.wait(SHORT)
        yield
    finally:
        go_on.set()
        thread.join()


@pytest.fixture
def inside():
    return threading.Event()


@pytest.fixture
def go_on():
    return threading.Event()


class Slow(Backend):
    name, limits = "slow", Limits(devices=frozenset())

    def __init__(self, inside):
        inside.set()
        time.sleep(0.3)

    def forward(self, *args):
        raise NotImplementedError


def test_a_fork_waits_until_backends_are_loaded(inside, monkeypatch):
    known = [*registry.entry_points(group=registry.GROUP), EntryPoint("slow", "plugin_slow:made", registry.GROUP)]
    monkeypatch.setitem(sys.modules, "plugin_slow", SimpleNamespace(made=lambda: Slow(inside)))
    monkeypatch.setattr(registry, "entry_points", lambda group: known)
    monkeypatch.setattr(registry, "_declared", None)

    def complete():
        assert {"slow", "native", "sdpa", "reference"} <= set(dilkit.list_backends())

    with halfway(threading.Thread(target=dilkit.list_backends), inside, threading.Event()):
        assert in_child(complete, SHORT) == "done"


class SlowKey:
    """A key of the cache. Another thread stops in its second comparison, where it has the lock."""

    def __init__(self, inside, go_on):
        self.events, self.compared = (inside, go_on), 0

    def __hash__(self):
        return 1

    def __eq__(self, other):
        inside, go_on = self.events
        self.compared += 1
        if self.compared == 2:
            inside.set()
            go_on.wait(SHORT)
        return False


class Table:
    nbytes = 8


def test_a_fork_while_a_thread_adds_to_the_cache(inside, go_on):
    plan.cached(SlowKey(inside, go_on), Table)
    add = threading.Thread(target=plan.cached, args=(SlowKey(inside, go_on), Table))
    try:
        with halfway(add, inside, go_on):
            assert in_child(lambda: plan.cached("test of forks", Table), SHORT) == "done"
    finally:
        plan.cache_clear()


AFTER = """
import os, signal, sys, time
import torch
assert "dilkit.backends.native._native" not in sys.modules
torch.set_num_threads(4)
x = torch.ones(1, 4096, 2, 32)
(x * 2).sum()  # by several threads
child = os.fork()
if not child:
    from dilkit import Pattern, dilated_attention
    y = dilated_attention(x, x, x, Pattern([512, 4096], [1, 4]), backend="native")
    os._exit(0 if (y.numpy() == 1).all() and torch.get_num_threads() == 4 else 1)
end = time.monotonic() + 60
while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
    time.sleep(0.02)
if not done[0]:
    os.kill(child, signal.SIGKILL)
print(done[1] if done[0] else "hung")
"""


def test_a_child_that_loads_the_kernel_itself(tmp_path):
    """The kernel, loaded after the fork, must not use threads that the child lacks."""
    program = tmp_path / "after.py"
    program.write_text(AFTER)
    # Python 3.12 and newer warn of forks while there are threads: that they do no harm is what is tested.
    assert fork([str(program)]).finish(90.0).text.splitlines()[-1] == "0"


def test_many_forks_while_threads_compute():
    """Each computes new problems, so that the child makes everything for them."""

    def call(seq, segment):
        x = torch.ones(1, seq, 2, 8)
        return dilated_attention(x, x, x, Pattern([segment, 16 * segment], [1, 2]), backend="native")

    def again():
        seq = 100
        while not over.is_set():
            call(seq := seq % 997 + 1, 8 + seq % 31)

    def new():
        torch.set_num_threads(1)  # or torch's own operators may hang
        assert torch.allclose(call(1200 + forks, 60 + forks), torch.ones(()))

    over, ended = threading.Event(), []
    call(64, 8)
    threads = [threading.Thread(target=again) for _ in range(2)]
    for thread in threads:
        thread.start()
    for forks in range(12):  # noqa: B007  (the child reads it)
        ended.append(in_child(new, SHORT))
    over.set()
    for thread in threads:
        thread.join()
    assert ended == ["done"] * 12
