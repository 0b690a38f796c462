"""`DilatedLayer`: a `DilatedCache` as the layer of a cache of transformers."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from dilkit.checks import integer
from dilkit.decoding import DilatedCache
from dilkit.integrations.transformers.sequences import KEPT_BY
from dilkit.pattern import Pattern

_CacheLayer: Any = importlib.import_module("transformers.cache_utils").CacheLayerMixin


class DilatedLayer(_CacheLayer):  # type: ignore[misc]
    """The cache of one layer: `cache`, a `DilatedCache`, None before its first tokens.

    The attention function finds it as an attribute of the keys that `update` hands on.
    """

    def __init__(self, rollback: int) -> None:
        super().__init__()
        self.rollback, self.is_croppable = rollback, rollback > 0
        self.cache: DilatedCache | None = None
        self.handed_on = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.handed_on:
            raise ValueError(
                "the attention of the tokens before did not find this cache: it is another attn_implementation than dilkit's, or "
                "the model changes keys after they are cached, as DeepSeek does its latents; give a DynamicCache"
            )
        self.is_initialized = self.handed_on = True
        key_states = key_states.view_as(key_states)  # whose attribute goes when it does
        setattr(key_states, KEPT_BY, self)
        return key_states, value_states

    def claim(self) -> None:
        """Note that the attention function has the keys that `update` handed on. Raises ValueError if it had them already."""
        if not self.handed_on:
            raise ValueError(
                "several attention calls of the model share the keys of one layer (num_kv_shared_layers, or attention computed "
                "twice), which a dilated_cache() would add once for each; give a DynamicCache"
            )
        self.handed_on = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, **options: Any) -> Tensor:
        if self.cache is None:
            self.cache = DilatedCache(pattern, key.shape[2], rollback=self.rollback)
        elif self.cache.pattern != pattern:
            raise ValueError(
                f"the cache was filled under {self.cache.pattern}, and the pattern of the layer is {pattern}; go on with that of "
                "the cache, or from an empty dilated_cache()"
            )
        return self.cache.attend(query, key, value, **options)

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.cache, self.handed_on, self.is_initialized = None, False, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens."""
        if integer("tokens_to_remove", tokens_to_remove) > 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} must be at most 0: crop(-2) forgets the last two tokens")
        if self.cache is not None:
            self.cache.crop(self.cache.seen + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.cache is not None:
            self.cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None and self.cache._layout is not None:
            count = integer("repeats", repeats, at_least=1)
            self.cache.reorder([i for i in range(self.cache._layout.batch) for _ in range(count)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)
