"""What the suite of scores measures them at."""

from __future__ import annotations

from dataclasses import dataclass

from dilkit.bias.form import BiasForm
from dilkit.tools.bench.configuration import Configuration
from dilkit.tools.bench.cpu.cases import CONFIGURATIONS
from dilkit.tools.bench.suite import Sizes

PLANE = BiasForm(dims=2, metric="euclidean", placed=True)


@dataclass(frozen=True)
class ScoresSizes(Sizes):
    """Biases by kind at `configuration`; a slide of `tiles`, of which torch has room for so many `tile_heads`; a layer of
    `layer_seq` tokens with `layer_heads`, `layer_kv_heads` and a `softcap` as in Gemma 2. `table`: entries of one by distance.
    """

    configuration: Configuration = CONFIGURATIONS["A"]
    head_dim: int = 64
    table: int = 257
    tiles: int = 20_000
    tile_heads: int = 2
    layer_seq: int = 8192
    layer_heads: int = 8
    layer_kv_heads: int = 4
    layer_head_dim: int = 256
    softcap: float = 50.0
    threads: int = 4
