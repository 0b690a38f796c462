"""Choices of a backend by argument, block and variable."""

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers.fakes import Fake

import dilkit
from dilkit import Device, Limits, NoBackendError, Pattern, Problem
from dilkit.selector import requested_backends, select, use_backend

PATTERN = Pattern([16, 32], [1, 2])


def problem():
    return Problem(pattern=PATTERN, seq=64, heads=4, head_dim=64, device=Device.assume("cpu"))


@pytest.fixture
def three(monkeypatch):
    monkeypatch.delenv("DILKIT_BACKEND", raising=False)
    nothing = Limits(dtypes=frozenset(), max_head_dim=0)
    names = {"one": 100, "two": 50, "none": 200}
    for name, priority in names.items():
        dilkit.register_backend(Fake(name, priority, nothing if name == "none" else Limits(devices=None)))
    yield
    for name in names:
        dilkit.unregister_backend(name)


def chosen(argument=None):
    return select(problem(), requested_backends(argument)).name


@pytest.mark.usefixtures("three")
def test_the_argument_wins_over_the_block_over_the_variable(monkeypatch):
    assert chosen() == "one"
    monkeypatch.setenv("DILKIT_BACKEND", " two ,one")
    assert chosen() == "two"
    with use_backend("one"):
        assert chosen() == "one"
        assert chosen("two") == "two"
        assert chosen(["none", "two"]) == "two"
        with use_backend("none", "two"):
            assert chosen() == "two"
        assert chosen() == "one"
    monkeypatch.setenv("DILKIT_BACKEND", "  ")
    assert chosen() == "one"


@pytest.mark.usefixtures("three")
def test_a_named_backend_that_cannot_raises_with_all_reasons(monkeypatch):
    x = torch.randn(1, 8, 2, 4)

    def expect(**options):
        with pytest.raises(NoBackendError) as caught:
            dilkit.dilated_attention(x, x, x, PATTERN, **options)
        for part in ("asked for: none", "none ", "refused", "dtype float32", "head_dim 4: at most 0", "not asked for"):
            assert part in str(caught.value)

    expect(backend="none")
    with use_backend("none"):
        expect()
    monkeypatch.setenv("DILKIT_BACKEND", "none")
    expect()


@pytest.mark.usefixtures("three")
def test_a_block_ends_with_an_exception_too():
    with pytest.raises(KeyError), use_backend("two"):
        raise KeyError
    assert chosen() == "one"


@pytest.mark.usefixtures("three")
def test_a_block_holds_for_its_thread_and_its_task_only():
    seen = []
    with use_backend("two"):
        thread = threading.Thread(target=lambda: seen.append(chosen()))
        thread.start()
        thread.join()
    assert seen == ["one"]

    async def task(name):
        with use_backend(name):
            await asyncio.sleep(0.001)
            return chosen()

    async def tasks():
        return await asyncio.gather(task("two"), task("one"), task("two"))

    assert asyncio.run(tasks()) == ["two", "one", "two"]


def block():
    with use_backend("two"):
        yield chosen()
        yield chosen()


@pytest.mark.usefixtures("three")
def test_a_generator_may_be_closed_where_it_was_not_begun():
    """Garbage collection may close it in another thread, an event loop in another context."""
    for elsewhere in (contextvars.copy_context().run, lambda close: ThreadPoolExecutor(1).submit(close).result()):
        begun = contextvars.copy_context()
        generator = block()
        assert begun.run(next, generator) == "two"
        elsewhere(generator.close)
        assert chosen() == "one"
        assert begun.run(chosen) == "two"


@pytest.mark.usefixtures("three")
def test_a_choice_made_before_is_not_kept_when_the_backends_change():
    assert chosen() == "one"
    dilkit.register_backend(Fake("newer", 300))
    assert chosen() == "newer"
    dilkit.unregister_backend("newer")
    assert chosen() == "one"
