"""A batch of continuous batching as a layer gets it: which rows are whose, and where the pool has what came before.

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
        return self.before + self.rows.stop - self.rows.start

    @property
    def is_prompt(self) -> bool:
        """Whether the rows see none of those before, and are worth a kernel of their own."""
        return self.before == 0 and self.rows.stop - self.rows.start > 1


@dataclass(frozen=True)
class LayerBatch:
    """What transformers says of a batch to layer number `layer`, whose rows an `allocator` keeps."""

    layer: int
    allocator: Any
    ends_of_rows: Tensor
    ends_of_keys: Tensor
    read_index: Tensor
    write_index: Tensor

    @classmethod
    def of(cls, layer: int, options: dict[str, Any]) -> LayerBatch:
        """That of the options of a call. Raises TypeError where they are not as transformers' manager gives them."""
        try:
            allocator = options["cache"].layer_to_allocator[layer]
            ends, place = options["cu_seq_lens_k"], allocator.index
            ends_of_keys = ends if isinstance(ends, Tensor) else ends[allocator.layer_type]
            tensors = options["cu_seq_lens_q"], ends_of_keys, options["read_index"][place], options["write_index"][place]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise TypeError(
                f"cache={type(options['cache']).__name__}, and the arguments beside it, are not as transformers' continuous "
                f"batching gives them to layer {layer} ({type(error).__name__}: {error}); call generate_batch"
            ) from error
        return cls(layer, allocator, *tensors)

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """The keys and the values of the layer, `(rows, kv_heads, head_dim)`, in the rows that `read_index` names."""
        keys, values = self.allocator._kv_token_views[self.layer]
        return keys, values

    def layout(self, heads: int) -> Layout:
        """Sizes of the rows that the pool takes."""
        keys = self.pool[0]
        return Layout(1, heads, *keys.shape[1:], dtype=keys.dtype, device=keys.device, stored=keys.dtype)

    def sequences(self, total: int) -> list[BatchSequence]:
        """Those of `total` new rows. Raises ValueError where these and the tensors do not fit each other."""
        rows, keys = self.ends_of_rows.tolist(), self.ends_of_keys.tolist()
        if rows[0] != 0 or rows[-1] != total:
            raise ValueError(
                f"cu_seq_lens_q={rows} of {total} rows; from 0 to {total} is needed. Where transformers pads a batch, for CUDA graphs "
                "and torch.compile, give ContinuousBatchingConfig(use_cuda_graph=False) without configurations for compiling"
            )
        sequences = [
            BatchSequence(slice(start, stop), (last - first) - (stop - start), first)
            for (start, stop), (first, last) in zip(pairwise(rows), pairwise(keys), strict=True)
        ]
        kept = len(self.read_index)
        if any(x.rows.stop < x.rows.start or x.before < 0 or (x.before and x.first + x.before > kept) for x in sequences):
            raise ValueError(
                f"cu_seq_lens_q={rows}, cu_seq_lens_k={keys} and a read_index of {kept}: these are no batch; ascending numbers are "
                "needed, at least as many keys as rows in each sequence, and an index of all keys"
            )
        return sequences

    def store(self, key: Tensor, value: Tensor) -> None:
        """Keep new rows `(rows, kv_heads, head_dim)`, as transformers does where nothing is read."""
        nothing = torch.empty_like(self.read_index[:0])
        self.allocator.update(key, value, self.layer, nothing, self.write_index)
