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
class Sizes:
    """How a kernel is compiled for `head_dims`, on devices from capability `since` on and before `before`: see `Kernel`.

    `shared_rows`: rows of the padded head_dim in dynamic shared memory, 2 bytes an element.
    """

    head_dims: tuple[int, ...]
    threads: int
    blocks: int
    tile_rows: int
    shared_rows: int = 0
    defines: tuple[tuple[str, int], ...] = ()
    since: Capability = OLDEST
    before: Capability = (99, 0)


@dataclass(frozen=True)
class Entry:
    """A row of the table: the kernel `name` of the file `source` serves `role`; each dtype from a capability on. The first of
    `sizes` that fits is taken."""

    role: str
    source: str
    name: str
    dtypes: dict[str, Capability]
    sizes: tuple[Sizes, ...]


ANYWHERE: dict[str, Capability] = dict.fromkeys(STORAGE, OLDEST)
TENSOR_CORES: dict[str, Capability] = {"float16": (7, 5), "bfloat16": (8, 0)}

TWO_SLOTS, NOT_HELD = (("SLOTS", 2),), (("HELD", 0),)
AMPERE: Capability = (8, 0)

MMA_FORWARD = (
    Sizes((128,), 256, 1, 128, 192, since=(12, 0)),
    Sizes((96,), 128, 2, 128, 192, since=(12, 0)),
    Sizes((96, 128), 128, 2, 128, 320, NOT_HELD, since=(9, 0)),
    Sizes((128,), 256, 1, 128, 192, since=(8, 9)),
    Sizes((128,), 128, 2, 128, 256, TWO_SLOTS, since=(8, 7)),
    Sizes((128,), 256, 1, 128, 192, since=(8, 6)),
    Sizes((128,), 128, 2, 128, 256, TWO_SLOTS, since=AMPERE),
    Sizes((16, 32, 64, 96), 128, 2, 128, 192, since=AMPERE),
    Sizes((96, 128), 256, 1, 128, 192),
    Sizes((16, 32, 64), 128, 2, 128, 192),
    Sizes((96, 128), 128, 2, 64, 192),
    Sizes((16, 32, 64), 128, 4, 64, 192, since=AMPERE),
    Sizes((16, 32, 64), 128, 2, 64, 192),
)
MMA_BACKWARD = (
    *(Sizes((16,), 128, 4, 128), Sizes((32,), 128, 3, 128), Sizes((64,), 128, 2, 128, since=AMPERE)),
    *(Sizes((16, 32), 128, 4, 64), Sizes((64,), 128, 3, 64), Sizes((96,), 128, 2, 64), Sizes((128,), 128, 2, 64, since=AMPERE)),
    Sizes((128,), 64, 3, 32),
)
MMA_DQUERY = Sizes((96,), 128, 3, 64, since=AMPERE), *MMA_BACKWARD
FP32_FORWARD = Sizes((16, 32, 64), 64, 4, 64), Sizes((96, 128), 128, 2, 64)
FP32_DQUERY = (
    Sizes(HEAD_DIMS, 128, 3, 64, 0, (("OF_KEYS", 0),), since=(12, 0)),
    Sizes((16, 32, 64), 128, 4, 64, 0, (("OF_KEYS", 0),), since=(9, 0)),
    Sizes(HEAD_DIMS, 128, 3, 64, 0, (("OF_KEYS", 0),)),
)
FP32_DKEYVALUE = Sizes((16, 32, 64), 128, 3, 64, 0, (("OF_KEYS", 1),)), Sizes((96, 128), 128, 2, 64, 0, (("OF_KEYS", 1),))

TABLE = (
    Entry("forward", "mma_forward.cu", "mma_forward", TENSOR_CORES, MMA_FORWARD),
    Entry("dquery", "mma_backward.cu", "mma_dquery", TENSOR_CORES, MMA_DQUERY),
    Entry("dkeyvalue", "mma_backward.cu", "mma_dkeyvalue", TENSOR_CORES, MMA_BACKWARD),
    Entry("forward", "fp32_forward.cu", "fp32_forward", ANYWHERE, FP32_FORWARD),
    Entry("dquery", "fp32_backward.cu", "fp32_dquery", ANYWHERE, FP32_DQUERY),
    Entry("dkeyvalue", "fp32_backward.cu", "fp32_dkeyvalue", ANYWHERE, FP32_DKEYVALUE),
    Entry("dots", "row_dots.cu", "row_dots", ANYWHERE, (Sizes(HEAD_DIMS, 128, 8, 64),)),
)
"""Kernels on tensor cores before those that compute in fp32 on any device, tall tiles before low ones. The sources say why the
sizes are what they are."""

MOST_ROWS, LOW_ROWS = 128, 64
"""Of a tall tile and of a low one."""

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
def kernel_for(
    role: str, dtype: str, head_dim: int, capability: Capability, vector: bool = True, most_rows: int = MOST_ROWS
) -> Kernel:
    """The kernel of `TABLE` for a role, dtype, head_dim and compute capability, with tiles of at most `most_rows` rows.

    `vector`: whether all rows allow 16-byte loads.

    Raises ValueError for what no kernel serves.
    """
    size = padded(head_dim)
    defines = ("HEAD_DIM", size), ("STORAGE", STORAGE[dtype]), ("VECTOR", int(vector))
    for entry in TABLE:
        if entry.role != role or dtype not in entry.dtypes or capability < entry.dtypes[dtype]:
            continue
        for s in entry.sizes:
            if size in s.head_dims and s.since <= capability < s.before and s.tile_rows <= most_rows:
                blocks = s.threads, s.blocks, s.tile_rows
                return Kernel(entry.source, entry.name, *blocks, (*defines, *s.defines), s.shared_rows * size * 2)
    shown = f"{capability[0]}.{capability[1]}"
    raise ValueError(f"{role} of {dtype} with head_dim={head_dim} on capability {shown}: no kernel; use another backend")
