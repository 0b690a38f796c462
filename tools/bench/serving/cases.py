"""What the suite of serving measures: sequences to pack, steps of decoding, a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field

from dilkit.pattern import Pattern
from dilkit.tools.bench.serving.llama import LlamaConfig
from dilkit.tools.bench.suite import Sizes

PACKED = Pattern([1024, 2048, 4096], [1, 2, 4])
DECODED = Pattern([2048, 8192, 32768], [1, 4, 16])
KEPT = Pattern([2048, 4096, 8192, 16384, 32768], [1, 2, 4, 6, 12])
GENERATED = Pattern.streaming_llm(window=1024, sinks=4)
PREFILLED = Pattern([1024, 4096, 16384], [1, 4, 16])


@dataclass(frozen=True)
class ServingSizes(Sizes):
    """So many `sequences` of `shortest` to `longest` tokens are packed.

    On one thread, steps of the pattern `kept` follow on `few` tokens, a `thousand` and `full`; `served` sequences of such lengths
    have a step together, with so many `kv_heads`. A model of transformers, with as many, whose layers see `generated`, writes so
    many tokens (`written`) after `read`.

    So many `steps` of decoding are a sample; before them, tokens were `seen`; a cache of all keys is as long as `full`. A `model`
    gets a `prompt` of so many tokens, and is `checked` on so many of its beginning.
    """

    heads: int = 8
    head_dim: int = 64
    threads: int = 4
    packed: Pattern = PACKED
    sequences: int = 64
    shortest: int = 64
    longest: int = 4096
    decoded: Pattern = DECODED
    steps: int = 64
    full: int = 131_072
    seen: tuple[int, ...] = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
    kept: Pattern = KEPT
    few: int = 16
    thousand: int = 1_000
    served: int = 32
    served_shortest: int = 100
    served_longest: int = 30_000
    kv_heads: tuple[int, ...] = (8, 2)
    generated: Pattern = GENERATED
    read: int = 16_384
    written: int = 32
    prefilled: Pattern = PREFILLED
    model: LlamaConfig = field(default_factory=LlamaConfig)
    prompt: int = 16_384
    checked: int = 1024
