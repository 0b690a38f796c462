"""Which CUDA kernel computes what: one table, first match wins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dilkit.device import Capability

ROLES = ("forward", "dots", "dquery", "dkeyvalue")
"""Attention itself; `rowsum(dout * out)`; the gradient of queries; the gradients of keys and values."""

HEAD_DIMS = (16, 32, 64, 96, 128)
"""What kernels are compiled for; a head_dim between two of them takes the larger."""

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The macro `STORAGE` by dtype."""

OLDEST: Capability = (5, 2)
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is compiled and launched.

    `threads` of a block; `blocks` resident on a multiprocessor, that registers are limited for; `tile_rows`: rows of a tile,
    at most; `shared_bytes`: dynamic shared memory of a block, beside what the source declares.
    """

    source: str
    name: str
    threads: int
    blocks: int
    tile_rows: int
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0

    @property
    def macros(self) -> dict[str, int]:
        """Every macro that the source is compiled with."""
        return {"THREADS": self.threads, "BLOCKS": self.blocks, "TILE_ROWS": self.tile_rows, **dict(self.defines)}


@dataclass(frozen=True)
class Entry:
    """A row of the table: the kernel `name` of the file `source` serves `role` for `dtypes` from capability `since` on, for
    `head_dims` (of `HEAD_DIMS`), in blocks and tiles of these sizes."""

    role: str
    source: str
    name: str
    dtypes: tuple[str, ...]
    since: Capability
    threads: int
    blocks: int
    tile_rows: int
    shared_bytes: int = 0
    head_dims: tuple[int, ...] = HEAD_DIMS


ALL = tuple(STORAGE)
FORWARD = "forward", "mma_forward.cu", "mma_forward"
DQUERY = "dquery", "mma_backward.cu", "mma_dquery"
DKEYVALUE = "dkeyvalue", "mma_backward.cu", "mma_dkeyvalue"

TABLE = (
    Entry(*FORWARD, ("float16",), (7, 5), threads=128, blocks=2, tile_rows=64),
    Entry(*FORWARD, ("bfloat16",), (8, 0), threads=128, blocks=2, tile_rows=64),
    Entry(*DQUERY, ("float16",), (7, 5), threads=128, blocks=2, tile_rows=64),
    Entry(*DQUERY, ("bfloat16",), (8, 0), threads=128, blocks=2, tile_rows=64),
    Entry(*DKEYVALUE, ("float16",), (7, 5), threads=128, blocks=2, tile_rows=64),
    Entry(*DKEYVALUE, ("bfloat16",), (8, 0), threads=128, blocks=2, tile_rows=64),
    Entry("forward", "fp32_forward.cu", "fp32_forward", ALL, OLDEST, 64, 4, 64, head_dims=(16, 32, 64)),
    Entry("forward", "fp32_forward.cu", "fp32_forward", ALL, OLDEST, 128, 2, 64),
    Entry("dquery", "fp32_backward.cu", "fp32_dquery", ALL, OLDEST, 128, 3, 64, head_dims=(16, 32, 64)),
    Entry("dquery", "fp32_backward.cu", "fp32_dquery", ALL, OLDEST, 128, 2, 64),
    Entry("dkeyvalue", "fp32_backward.cu", "fp32_dkeyvalue", ALL, OLDEST, 128, 3, 64, head_dims=(16, 32, 64)),
    Entry("dkeyvalue", "fp32_backward.cu", "fp32_dkeyvalue", ALL, OLDEST, 128, 2, 64),
    Entry("dots", "row_dots.cu", "row_dots", ALL, OLDEST, threads=128, blocks=8, tile_rows=64),
)
"""Kernels on tensor cores before those that compute in fp32 on any device. `dots` goes over the tiles of `dquery`."""


REASONS = (
    (("float32",), OLDEST, "fp32 on CUDA cores"),
    (("float16",), (7, 5), "tensor cores"),
    (("bfloat16",), (8, 0), "tensor cores"),
    (("float16",), (7, 0), "fp32 arithmetic; tensor cores before 7.5 do not know the instruction that the kernels use"),
    (("float16",), (6, 2), "fp32 arithmetic; there are no tensor cores, and sums in fp16 would be wrong"),
    (("float16",), (6, 1), "fp32 arithmetic; the fp16 units of this generation are 1/64 as fast"),
    (("float16",), (6, 0), "fp32 arithmetic; there are no tensor cores, and sums in fp16 would be wrong"),
    (("float16",), OLDEST, "fp32 arithmetic; there are no fp16 units"),
    (("bfloat16",), OLDEST, "fp32 arithmetic; tensor cores know bf16 from 8.0 on"),
)
"""Why kernels compute as they do, by dtype and capability; first match wins."""


def reason(dtype: str, capability: Capability) -> str:
    """In what the kernels for `dtype` compute on a device of `capability`, and why."""
    return next(text for dtypes, since, text in REASONS if dtype in dtypes and since <= capability)


def padded(head_dim: int) -> int:
    """The least of `HEAD_DIMS` that holds `head_dim`. Raises ValueError where none does."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {HEAD_DIMS[-1]}; use another backend")


@lru_cache(maxsize=1024)
def kernel_for(role: str, dtype: str, head_dim: int, capability: Capability, vector: bool = True) -> Kernel:
    """The kernel of `TABLE` for a role, dtype, head_dim and compute capability. `vector`: whether all rows allow 16-byte loads.

    Raises ValueError for what no kernel serves.
    """
    size = padded(head_dim)
    for entry in TABLE:
        if entry.role == role and dtype in entry.dtypes and entry.since <= capability and size in entry.head_dims:
            defines = (("HEAD_DIM", size), ("STORAGE", STORAGE[dtype]), ("VECTOR", int(vector)))
            sizes = entry.threads, entry.blocks, entry.tile_rows
            return Kernel(entry.source, entry.name, *sizes, defines, entry.shared_bytes)
    shown = f"{capability[0]}.{capability[1]}"
    raise ValueError(f"{role} of {dtype} with head_dim={head_dim} on capability {shown}: no kernel; use another backend")
