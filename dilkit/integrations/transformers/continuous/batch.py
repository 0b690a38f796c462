"""A batch of continuous batching as a layer gets it: the rows of each sequence, and the places in the pool of those before.

cu_seq_lens_q    0 1       5                  rows of the batch: one of the first sequence, four of the second
cu_seq_lens_k    0             7           13 places of `read_index`: 6 rows before and 1 new, then 2 before and 4 new
read_index       p p p p p p . p p . . . .    rows of the pool in the order of tokens; empty where no sequence has any before
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dilkit.decoding.layout import Layout


@dataclass(frozen=True)
class BatchSequence:
    """New `rows` of a sequence, after `before` others that `read_index` names from `first` on."""

    rows: slice
    before: int
    first: int

    @property
    def length(self) -> int:
        """Rows in all."""
        return self.before + self.count

    @property
    def count(self) -> int:
        """New rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def is_prompt(self) -> bool:
        """True for two rows and more with none before: they are worth a kernel of their own."""
        return self.before == 0 and self.count > 1


@dataclass(frozen=True)
class LayerBatch:
    """The arguments that transformers hands to layer number `layer`, whose rows an `allocator` stores in a pool."""

    layer: int
    allocator: Any
    pool: tuple[Tensor, Tensor]
    """Keys and values, `(rows, kv_heads, head_dim)`, in the rows that `read_index` names."""
    ends_of_rows: Tensor
    ends_of_keys: Tensor
    read_index: Tensor
    write_index: Tensor

    @classmethod
    def of(cls, layer: int, options: dict[str, Any]) -> LayerBatch:
        """Read the options of a call. Raises TypeError where they are not as transformers' manager gives them."""
        try:
            allocator = options["cache"].layer_to_allocator[layer]
            ends, place, kind = options["cu_seq_lens_k"], allocator.index, allocator.layer_type  # no kind before 5.19
            ends_of_keys = ends if isinstance(ends, Tensor) else ends[kind]
            tensors = options["cu_seq_lens_q"], ends_of_keys, options["read_index"][place], options["write_index"][place]
            return cls(layer, allocator, allocator._kv_token_views[layer], *tensors)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise TypeError(
                f"cache={type(options['cache']).__name__}, and the arguments beside it, are not as transformers' continuous "
                f"batching gives them to layer {layer} ({type(error).__name__}: {error}); call "
                "generate_batch of transformers 5.19 or later"
            ) from error

    def layout(self, heads: int) -> Layout:
        """Return sizes of the rows that the pool takes."""
        keys = self.pool[0]
        kv_heads, head_dim = keys.shape[1:]
        return Layout(1, heads, kv_heads, head_dim, dtype=keys.dtype, device=keys.device, stored=keys.dtype)

    def sequences(self, total: int) -> list[BatchSequence]:
        """Return the sequences of `total` new rows. Raises ValueError where these and the tensors do not fit each other."""
        rows, keys, indexed = self.ends_of_rows.tolist(), self.ends_of_keys.tolist(), len(self.read_index)
        if rows[:1] != [0] or rows[-1] != total:
            raise ValueError(
                f"cu_seq_lens_q={rows} of {total} rows; from 0 to {total} is needed. Where transformers pads a batch, for CUDA "
                "graphs or torch.compile: ContinuousBatchingConfig(use_cuda_graph=False), without configurations for compiling"
            )
        sequences = [
            BatchSequence(slice(start, stop), (last - first) - (stop - start), first)
            for (start, stop), (first, last) in zip(pairwise(rows), pairwise(keys), strict=False)
        ]
        fits = all(x.rows.start <= x.rows.stop and x.before >= 0 <= x.first for x in sequences)
        if len(rows) != len(keys) or not fits or any(x.before and x.first + x.before > indexed for x in sequences):
            raise ValueError(
                f"cu_seq_lens_q={rows}, cu_seq_lens_k={keys} and a read_index of {indexed} are of no batch: ascending ones of "
                "one length are needed, at least as many keys as rows in each sequence, and an index of all keys"
            )
        return sequences

    def store(self, key: Tensor, value: Tensor) -> None:
        """Store new rows `(rows, kv_heads, head_dim)`, as transformers does where nothing is read."""
        nothing = torch.empty_like(self.read_index[:0])
        self.allocator.update(key, value, self.layer, nothing, self.write_index)
