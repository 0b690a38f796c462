"""Backends that are all limits, or wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from dilkit import Backend, Limits, register_backend, unregister_backend
from dilkit.backends.flex.backend import Flex
from dilkit.backends.native.backend import Native
from dilkit.backends.reference import Reference
from dilkit.backends.sdpa.backend import SDPA
from dilkit.backends.tiles.relations import FORMS


class Fake(Backend):
    def __init__(self, name: str, priority: int, limits: Limits = Limits(devices=None)):  # noqa: B008
        self.name, self.priority, self.limits = name, priority, limits

    def forward(self, *args):
        raise AssertionError("nothing is computed here")


class Doubles(Reference):
    def forward(self, *inputs):
        out, lse = super().forward(*inputs)
        return out * 2, lse


class Picky(Doubles):
    """A backend that takes next to nothing, and gets that wrong."""

    name = "picky"
    priority = -1
    limits = Limits(dtypes=frozenset({"float16"}), max_head_dim=16, varlen=True, kv_cache=True)

    def __init__(self):
        super().__init__(name="picky")


@contextmanager
def registered(backend: Backend) -> Iterator[str]:
    register_backend(backend, replace=True)
    try:
        yield backend.name
    finally:
        unregister_backend(backend.name)


def family(cupy: bool = True) -> dict[str, Backend]:
    """Return dilkit's backends by name, fakes for CUDA alone: all is installed, except CuPy on demand."""
    dtypes = frozenset({"float32", "bfloat16", "float16"})
    options = dict(dropout=True, forms=FORMS, stored=dtypes | {"int8"})
    limits = Limits(devices=frozenset({"cuda"}), dtypes=dtypes, max_head_dim=128, **options)
    raw = Fake("cupy_raw", 15, limits)
    raw.requires, raw.extra = () if cupy else ("cupy",), "cuda"
    readable = Fake("numba_cuda", 5, Limits(devices=frozenset({"cuda"}), dtypes=frozenset({"float32"})))
    triton = Fake("triton", 4, replace(limits, min_capability=(8, 0)))
    return {backend.name: backend for backend in (Native(), SDPA(), Flex(), Reference(), raw, readable, triton)}
