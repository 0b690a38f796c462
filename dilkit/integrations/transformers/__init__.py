"""Models of transformers on dilated attention: `register`, `convert`, `explain`, `load`, `context_parallel`, `dilated_cache`.

transformers asks masks.py once for a kind of layer, then attention.py in each layer. Names are loaded at first use; transformers
is imported by the calls alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dilkit.lazy import lazy_names

_NAMES = {
    "context.parallel": "ContextParallel context_parallel",
    "conversion": "Conversion ConvertedLayer convert",
    "explanation": "ModelTrace explain",
    "generation": "dilated_cache",
    "relative": "convert_relative",
    "registration": "load register",
}

__all__ = sorted(" ".join(_NAMES.values()).split())

if TYPE_CHECKING:
    from dilkit.integrations.transformers.context.parallel import (
        ContextParallel as ContextParallel,
        context_parallel as context_parallel,
    )
    from dilkit.integrations.transformers.conversion import (
        Conversion as Conversion,
        ConvertedLayer as ConvertedLayer,
        convert as convert,
    )
    from dilkit.integrations.transformers.explanation import ModelTrace as ModelTrace, explain as explain
    from dilkit.integrations.transformers.generation import dilated_cache as dilated_cache
    from dilkit.integrations.transformers.registration import load as load, register as register
    from dilkit.integrations.transformers.relative import convert_relative as convert_relative

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
