"""A table that maps calls to CUDA kernels; the first match wins."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dilkit.backends.tiles.schedule import MOST_ROWS
from dilkit.device import Capability, why_float32

HEAD_DIMS = (16, 32, 48, 64, 96, 128)
"""Head dims that kernels are compiled for; a head_dim between two of them takes the larger."""

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}
"""The macro `STORAGE` by dtype."""

OLDEST: Capability = (5, 2)

CHANGED_THREADS = 256
"""Threads per multiprocessor to limit registers for in kernels with a softcap or a bias: each has as many as possible."""


@dataclass(frozen=True)
class CudaKernel:
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
class Config:
    """Build options of a kernel for `head_dims`, for capabilities from `since` to below `before`: see `CudaKernel`.

    `shared_rows`: rows of the padded head_dim in dynamic shared memory, 2 bytes an element. `changed`: True for kernels
    with a softcap or a bias, which need more registers, False for the others, None for both.
    """

    head_dims: tuple[int, ...]
    threads: int
    blocks: int
    tile_rows: int
    shared_rows: int = 0
    defines: tuple[tuple[str, int], ...] = ()
    since: Capability = OLDEST
    before: Capability = (99, 0)
    changed: bool | None = None

    def serves(self, head_dim: int, capability: Capability, changed: bool) -> bool:
        """True if this entry applies to the padded head_dim and the capability."""
        return head_dim in self.head_dims and self.since <= capability < self.before and self.changed in (None, changed)

    def resident(self, changed: bool) -> int:
        """Return how many blocks on a multiprocessor the kernel's registers are limited for."""
        return min(self.blocks, CHANGED_THREADS // self.threads) if changed else self.blocks


@dataclass(frozen=True)
class KernelFamily:
    """A row of the table: kernel `name` of file `source` serves `role`, each dtype from a capability on.

    The first of `configs` that fits is taken.
    """

    role: str
    source: str
    name: str
    dtypes: dict[str, Capability]
    configs: tuple[Config, ...]


ANYWHERE: dict[str, Capability] = dict.fromkeys(STORAGE, OLDEST)
TENSOR_CORES: dict[str, Capability] = {"float16": (7, 5), "bfloat16": (8, 0)}

TWO_SLOTS, NOT_HELD = (("SLOTS", 2),), (("HELD", 0),)
AMPERE: Capability = (8, 0)

MMA_FORWARD = (
    Config((128,), 256, 1, 128, 192, since=(12, 0)),
    Config((96,), 256, 1, 128, 192, since=(12, 0), changed=True),
    Config((96,), 128, 2, 128, 192, since=(12, 0)),
    Config((96, 128), 128, 2, 128, 320, NOT_HELD, since=(9, 0)),
    Config((128,), 256, 1, 128, 192, since=(8, 9)),
    Config((128,), 128, 2, 128, 256, TWO_SLOTS, since=(8, 7)),
    Config((128,), 256, 1, 128, 192, since=(8, 6)),
    Config((128,), 128, 2, 128, 256, TWO_SLOTS, since=AMPERE),
    Config((16, 32, 48, 64, 96), 128, 2, 128, 192, since=AMPERE),
    Config((96, 128), 256, 1, 128, 192),
    Config((16, 32, 48, 64), 128, 2, 128, 192),
    Config((96, 128), 128, 2, 64, 192),
    Config((16, 32, 48, 64), 128, 4, 64, 192, since=AMPERE),
    Config((16, 32, 48, 64), 128, 2, 64, 192),
)
MMA_BACKWARD = (
    Config((64,), 128, 2, 64, since=(10, 0), changed=True),
    Config((32,), 128, 3, 128, defines=(("SPARE", 1),), since=(10, 0)),
    Config((64,), 128, 2, 128, defines=(("SPARE", 2),), since=(9, 0)),
    *(Config((16,), 128, 4, 128), Config((32,), 128, 3, 128), Config((48,), 128, 2, 128)),
    Config((64,), 128, 2, 128, since=AMPERE),
    *(
        Config((16, 32), 128, 4, 64),
        Config((48, 64), 128, 3, 64),
        Config((96,), 128, 2, 64),
        Config((128,), 128, 2, 64, since=AMPERE),
    ),
    Config((128,), 64, 3, 32),
)
MMA_DQUERY_PAIRS = tuple(
    Config((128,), 128, 2, 64, 192, since=since, before=before, changed=False)
    for since, before in ((AMPERE, (8, 6)), ((8, 7), (8, 9)), ((9, 0), (12, 0)))
)
"""GPUs whose shared memory has room for two blocks of 54 KB. On others products take longer than the loads of `mma_dquery`."""
MMA_DQUERY = Config((96,), 128, 3, 64, since=AMPERE), *MMA_BACKWARD
FP32_FORWARD = Config((32, 64), 128, 2, 64, changed=True), Config((16, 32, 48, 64), 64, 4, 64), Config((96, 128), 128, 2, 64)
FP32_DQUERY = (
    Config(HEAD_DIMS, 128, 3, 64, since=(12, 0)),
    Config((16, 32, 48, 64), 128, 4, 64, since=(9, 0)),
    Config(HEAD_DIMS, 128, 3, 64),
)
FP32_DKEYVALUE = Config((16, 32, 48, 64), 128, 3, 64), Config((96, 128), 128, 2, 64)

TABLE = (
    KernelFamily("forward", "mma_forward.cu", "mma_forward", TENSOR_CORES, MMA_FORWARD),
    KernelFamily("dquery", "mma_dquery_pairs.cu", "mma_dquery_pairs", TENSOR_CORES, MMA_DQUERY_PAIRS),
    KernelFamily("dquery", "mma_dquery.cu", "mma_dquery", TENSOR_CORES, MMA_DQUERY),
    KernelFamily("dkeyvalue", "mma_dkeyvalue.cu", "mma_dkeyvalue", TENSOR_CORES, MMA_BACKWARD),
    KernelFamily("forward", "fp32_forward.cu", "fp32_forward", ANYWHERE, FP32_FORWARD),
    KernelFamily("dquery", "fp32_dquery.cu", "fp32_dquery", ANYWHERE, FP32_DQUERY),
    KernelFamily("dkeyvalue", "fp32_dkeyvalue.cu", "fp32_dkeyvalue", ANYWHERE, FP32_DKEYVALUE),
    KernelFamily("stored", "attend_stored.cu", "attend_stored", ANYWHERE, (Config(HEAD_DIMS, 128, 2, 64),)),
    KernelFamily("dots", "row_dots.cu", "row_dots", ANYWHERE, (Config(HEAD_DIMS, 128, 8, 64),)),
)
"""Kernels on tensor cores before those that compute in fp32 on any device, tall tiles before low ones. The sources say why the
sizes are what they are."""


def reason(dtype: str, capability: Capability) -> str:
    """Return in words which units and precision the kernels for `dtype` compute with on a device of `capability`."""
    if dtype == "float32":
        return "fp32 on CUDA cores"
    if capability >= TENSOR_CORES[dtype]:
        return "tensor cores"
    if dtype == "float16" and capability >= (7, 0):
        return "fp32 arithmetic; tensor cores before 7.5 do not know the instruction that the kernels use"
    return f"fp32 arithmetic; {why_float32(dtype, capability)}"


def padded(head_dim: int) -> int:
    """Round `head_dim` up to one of `HEAD_DIMS`. Raises ValueError beyond the largest."""
    for size in HEAD_DIMS:
        if head_dim <= size:
            return size
    raise ValueError(f"head_dim={head_dim}: kernels are made for at most {HEAD_DIMS[-1]}; use another backend")


@lru_cache(maxsize=1024)
def kernel_for(
    role: str,
    dtype: str,
    head_dim: int,
    capability: Capability,
    vector: bool = True,
    most_rows: int = MOST_ROWS,
    packed: bool = False,
    dropout: bool = False,
    scores: tuple[tuple[str, int], ...] = (),
) -> CudaKernel:
    """Return the kernel of `TABLE` for role, dtype, head_dim and capability, with at most `most_rows` rows in a tile.

    `vector`: whether all rows allow 16-byte loads. `packed`: whether sequences are packed one after the other.
    `dropout`: whether weights are dropped. `scores`: the macros of `dilkit.backends.cuda.scores`.

    Raises ValueError for what no kernel serves.
    """
    size = padded(head_dim)
    asked = tuple((name, 1) for name, wanted in (("PACKED", packed), ("DROPOUT", dropout)) if wanted)
    defines = ("HEAD_DIM", size), ("STORAGE", STORAGE[dtype]), ("VECTOR", int(vector)), *asked, *scores
    changed = scores != ()
    for family in TABLE:
        if family.role != role or dtype not in family.dtypes or capability < family.dtypes[dtype]:
            continue
        for c in family.configs:
            if c.serves(size, capability, changed) and c.tile_rows <= most_rows:
                sizes, shared = (c.threads, c.resident(changed), c.tile_rows), c.shared_rows * size * 2
                return CudaKernel(family.source, family.name, *sizes, (*defines, *c.defines), shared)
    shown = f"{capability[0]}.{capability[1]}"
    raise ValueError(f"{role} of {dtype} with head_dim={head_dim} on capability {shown}: no kernel; use another backend")
