"""Models of Hugging Face's transformers on dilated attention: `register`, `convert`, `load`, `context_parallel`, `dilated_cache`.

    registration.py the names that transformers looks the functions up by
    choice.py       the attention that a model is made with: one that would not ask is refused
    patterns.py     the pattern of a layer, by the model's configuration or the call of `register`
    masks.py        the mask function: which keys are tokens, and which rows are one sequence; its result is in token_mask.py
    attention.py    the attention function: which call of dilkit computes what a layer asks for
    heads.py        the heads of the model that a layer holds, where ranks share them out
    checks.py       calls that are refused
    packing.py      padded batches as packed sequences
    biases/         position biases of T5, Bloom and MPT, of which no tensor of all pairs is made
    cross_attention.py of T5's decoder to its encoder, which torch computes
    cached.py       the last rows of sequences against a cache
    proof/          a tiny model of a class beside eager attention, for versions of transformers that are not tested
    conversion.py   dilated attention in a model that is there
    loading.py      a saved model with the attention that its configuration has a pattern for
    context/        sequences that are cut over ranks
    continuous/     batches of continuous batching, whose rows lie in a pool of transformers
    generation.py   a cache that keeps what later rows can still see; its layers are in dilated_layer.py

Names are loaded at first use; transformers is imported by the calls alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_HOMES = {
    **dict.fromkeys(["Conversion", "ConvertedLayer", "convert"], "conversion"),
    **dict.fromkeys(["ContextParallel", "context_parallel"], "context.parallel"),
    "dilated_cache": "generation",
    "load": "loading",
    "register": "registration",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from dilkit.integrations.transformers.context.parallel import ContextParallel as ContextParallel
    from dilkit.integrations.transformers.context.parallel import context_parallel as context_parallel
    from dilkit.integrations.transformers.conversion import Conversion as Conversion
    from dilkit.integrations.transformers.conversion import ConvertedLayer as ConvertedLayer
    from dilkit.integrations.transformers.conversion import convert as convert
    from dilkit.integrations.transformers.generation import dilated_cache as dilated_cache
    from dilkit.integrations.transformers.loading import load as load
    from dilkit.integrations.transformers.registration import register as register

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
