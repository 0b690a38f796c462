"""The schemas of the torch operators behind `dilated_attention`, made of the fields of `Inputs`."""

from __future__ import annotations

import torch

from dilkit.inputs import LEARNED, Inputs

_PARTS = {"dropout": ("dropout_seed", "dropout_places"), "bias": ("bias", "positions"), "cache_seqlens": ()}
"""The tensors in a field of `Inputs` that is none itself. A call against a cache has an operator of its own, in `kvcache.py`."""
TENSORS = tuple(name for field in Inputs._fields for name in _PARTS.get(field, (field,)))
"""The tensors of a call as the operators name them: query, key, value, and others that may be missing."""
GRADIENTS = "query", "key", "value", *LEARNED
"""Tensors whose gradients the backward operator returns; an empty tensor stands for one that is not wanted."""

# max_seqlen is a size that torch.compile may not know, so that it cannot be a part of the text.
_SEQUENCES = "Tensor? cu_seqlens=None, SymInt? max_seqlen=None"
_OTHERS = "".join(f", {_SEQUENCES if name == 'cu_seqlens' else f'Tensor? {name}=None'}" for name in TENSORS[4:])
_OPTIONS = f"Tensor? key_padding_mask, float scale, str call{_OTHERS}"
_QKV = "Tensor query, Tensor key, Tensor value"

library = torch.library.Library("dilkit", "DEF")
library.define(f"dilated_attention({_QKV}, {_OPTIONS}) -> (Tensor, Tensor)")
_RESULTS = ", ".join(["Tensor"] * len(GRADIENTS))
library.define(f"dilated_attention_backward(Tensor dout, {_QKV}, Tensor out, Tensor lse, {_OPTIONS}) -> ({_RESULTS})")
forward_op = torch.ops.dilkit.dilated_attention.default
backward_op = torch.ops.dilkit.dilated_attention_backward.default
