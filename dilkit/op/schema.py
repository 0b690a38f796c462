"""The schemas of the torch operators behind `dilated_attention`, and the text that encodes their arguments beside tensors.

The pattern is passed as JSON text, so that further kinds of branches need no new schema.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from dilkit.bias.form import BiasForm
from dilkit.checks import shown
from dilkit.pattern import Pattern

library = torch.library.Library("dilkit", "DEF")
library.define(
    "dilated_attention(Tensor query, Tensor key, Tensor value, "
    "Tensor? key_padding_mask, float scale, str call, Tensor? sink=None, Tensor? cu_seqlens=None, SymInt? max_seqlen=None, "
    "Tensor? dropout_seed=None, Tensor? dropout_places=None, Tensor? bias=None, Tensor? positions=None, "
    "Tensor? block_layout=None) -> (Tensor, Tensor)"
)
library.define(
    "dilated_attention_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor? key_padding_mask, float scale, str call, Tensor? cu_seqlens=None, SymInt? max_seqlen=None, "
    "Tensor? dropout_seed=None, Tensor? dropout_places=None, Tensor? bias=None, Tensor? positions=None, "
    "Tensor? block_layout=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
forward_op = torch.ops.dilkit.dilated_attention.default
backward_op = torch.ops.dilkit.dilated_attention_backward.default

_FORMAT = "8"
"""The first letter of every call: change it with `encode_call` and with what autograd does in `dilkit.op.rules`, because
torch.compile keeps whole graphs on disk and finds them again by such constants."""
_DIGITS = "01"


def encode_call(
    pattern: Pattern,
    is_causal: bool,
    requires_grad: bool,
    backend: str,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    bias: BiasForm | None = None,
) -> str:
    """All arguments of an operator except tensors and scale as one text: every schema argument costs microseconds a call."""
    scores = f"{softcap or ''},{'' if bias is None else bias.encode()}" if softcap or bias is not None else ""
    flags = _DIGITS[is_causal] + _DIGITS[requires_grad]  # a format takes longer
    return f"{_FORMAT}{flags}{backend};{dropout_p or ''};{scores};{pattern.to_json()}"


def _parts(call: str) -> list[str]:
    """Flags with names, dropout and pattern. Raises ValueError for a text of another form."""
    parts = call.split(";", 3)
    if len(parts) != 4:
        raise ValueError(
            f"call={shown(call)} is not of the form 'flags and backends;dropout;scores;pattern' that encode_call writes"
        )
    return parts


def decode_call(call: str) -> tuple[Pattern, bool, bool]:
    """The pattern, `is_causal` and `requires_grad` of a call."""
    return Pattern.from_json(_parts(call)[3]), call[1] == "1", call[2] == "1"


def dropout_asked(call: str) -> float:
    """The probability with which a call drops weights."""
    return float(_parts(call)[1] or 0.0)


def scores_asked(call: str) -> tuple[float, BiasForm | None]:
    """The softcap, 0 for none, and the form of the bias of a call."""
    if not (text := _parts(call)[2]):
        return 0.0, None
    softcap, _, bias = text.partition(",")
    return float(softcap or 0.0), BiasForm.decode(bias) if bias else None


def without_dropout(call: str) -> str:
    """`call` with every weight."""
    names, _, scores, text = _parts(call)
    return f"{names};;{scores};{text}"


@lru_cache(maxsize=1024)
def with_learned_bias(call: str) -> str:
    """`call`, which has a bias, with a gradient of its weights."""
    names, dropout_p, scores, text = _parts(call)
    softcap, _, bias = scores.partition(",")
    learned = replace(BiasForm.decode(bias), learned=True).encode()
    return f"{names[:2]}{_DIGITS[True]}{names[3:]};{dropout_p};{softcap},{learned};{text}"


def with_pattern(call: str, text: str) -> str:
    """`call` for the pattern with the JSON text `text`."""
    names, dropout_p, scores, _ = _parts(call)
    return f"{names};{dropout_p};{scores};{text}"


def backends_asked(call: str) -> str:
    """The names of the backends that a call requests, comma-separated; empty for the automatic choice."""
    return call[3 : call.index(";")]


def asks_for_backends(call: str) -> bool:
    """Whether a call requests backends, and leaves nothing to the automatic choice."""
    return call[3:4] != ";"


def asking_for(call: str, names: str) -> str:
    """`call`, which requests no backend, with a request for `names`."""
    return call[:3] + names + call[3:]
