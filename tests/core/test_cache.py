"""The byte-bounded cache."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from dilkit import plan
from dilkit.plan import ENTRY_BYTES, ByteLRU


@pytest.fixture
def eager_switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@dataclass(eq=False)
class Blob:
    nbytes: int
    name: object = field(default=None)


def cache_of(blobs, nbytes=100):
    return ByteLRU(lambda: blobs * (nbytes + ENTRY_BYTES))


def keys_of(cache, keys):
    return [key for key in keys if cache.get(key, lambda: Blob(2**40)).nbytes < 2**40]


def test_what_make_raises_passes_through_and_nothing_is_kept():
    cache = cache_of(1)
    with pytest.raises(KeyError, match="nothing there"):
        cache.get("a", lambda: {}["nothing there"])
    assert cache.info().entries == 0
    assert cache.get("a", lambda: Blob(1)).nbytes == 1


def test_make_may_use_the_cache_itself():
    cache = cache_of(2)
    assert cache.get("outer", lambda: Blob(cache.get("inner", lambda: Blob(7)).nbytes)).nbytes == 7
    assert cache.info().entries == 2


def test_a_value_that_is_dropped_may_use_the_cache_as_it_dies():
    cache = cache_of(2)

    class Last(Blob):
        def __del__(self):
            cache.get("last words", lambda: Blob(100))

    cache.get("a", lambda: Last(100))
    for key in "bc":
        cache.get(key, lambda: Blob(100))
    assert keys_of(cache, ["a", "b", "c", "last words"]) == ["c", "last words"]
    assert cache.info().bytes == cache.info().limit


def test_clear_drops_values_and_counts():
    cache = cache_of(2)
    held = weakref.ref(cache.get("a", lambda: Blob(100)))
    cache.clear()
    gc.collect()
    assert held() is None
    assert cache.info()[:4] == (0, 0, 0, 0)


@given(limit=st.integers(0, 20), sizes=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 12)), max_size=60))
def test_agrees_with_a_model_for_any_sequence_of_calls(limit, sizes):
    cache = ByteLRU(lambda: limit * ENTRY_BYTES)
    model = {}
    for key, units in sizes:
        if key in model:
            model[key] = model.pop(key)
        elif 1 + units <= limit:
            model[key] = 1 + units
            while sum(model.values()) > limit:
                del model[next(iter(model))]
        cache.get(key, lambda: Blob(units * ENTRY_BYTES))  # noqa: B023  (called at once)
        assert cache.info().bytes == sum(model.values()) * ENTRY_BYTES
    assert keys_of(cache, range(9)) == sorted(model)


@pytest.mark.usefixtures("eager_switching")
def test_threads_never_exceed_the_limit_and_never_get_another_key_s_value():
    cache = ByteLRU(lambda: 5000 + 20 * ENTRY_BYTES)
    start, over = threading.Barrier(8), []

    def work(seed):
        start.wait()
        for step in range(2000):
            key = (seed * 7919 + step * step) % 61
            assert cache.get(key, lambda: Blob(key * 10, key)).name == key  # noqa: B023  (called at once)
            if cache.info().bytes > cache.info().limit:
                over.append(cache.info())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    info = cache.info()
    assert not over
    assert info.hits + info.misses == 8 * 2000
    held = keys_of(cache, range(61))
    assert info.bytes == sum(key * 10 + ENTRY_BYTES for key in held) <= info.limit


def test_threads_that_make_the_same_key_together_all_get_the_one_that_is_kept():
    cache = cache_of(4)
    making = threading.Barrier(4)

    def make():
        making.wait()  # all four are past the look-up before any of them is done
        return Blob(100)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: cache.get("same", make), range(4)))
    assert len(set(map(id, got))) == 1
    assert cache.info()[:4] == (0, 4, 1, 100 + ENTRY_BYTES)


@pytest.fixture
def fresh():
    plan.cache_clear()
    yield
    plan.cache_clear()


@pytest.mark.usefixtures("fresh")
class TestTheCacheOfTheProcess:
    def test_its_limit_is_the_environment_variable_read_live(self, monkeypatch):
        monkeypatch.setenv("DILKIT_CACHE_BYTES", str(3 * ENTRY_BYTES))
        for key in range(5):
            plan.cached(("test", key), lambda: Blob(0))
        assert plan.cache_info() == (0, 5, 3, 3 * ENTRY_BYTES, 3 * ENTRY_BYTES)
        monkeypatch.delenv("DILKIT_CACHE_BYTES")
        assert plan.cache_info().limit == 128 * 1024**2

    def test_zero_turns_it_off(self, monkeypatch):
        monkeypatch.setenv("DILKIT_CACHE_BYTES", "0")
        assert plan.cached("test", lambda: Blob(0)) is not plan.cached("test", lambda: Blob(0))
        assert plan.cache_info() == (0, 2, 0, 0, 0)
