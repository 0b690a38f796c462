"""`explain`: the backend of each attention layer of a model in one call, or why a layer has another attention."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dilkit.integrations.transformers.conversion import computing, looked_up
from dilkit.integrations.transformers.kept_layers import KEEPS
from dilkit.integrations.transformers.patterns import LAYER_TYPES, kind_of
from dilkit.integrations.transformers.registration import is_registered
from dilkit.op._facts import tensor_key
from dilkit.op.call_options import forward_call
from dilkit.op.prepared_call import prepare
from dilkit.op.schema import forward_op
from dilkit.selector import Trace, explain as explain_problem


@dataclass(frozen=True)
class ModelTrace:
    """The attention layers of a model in one call, by path; `print` shows a line for each.

    `layers`: the choices of backends, one for each call of dilkit that a layer made. `others`: why other layers made none.

    Example:

        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from dilkit.integrations.transformers import explain
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=100)
        >>> print(explain(BertModel(BertConfig(**sizes)), input_ids=torch.randint(100, (1, 9))))
        encoder.layer.0.attention.self: has the attention 'sdpa'
    """

    layers: dict[str, tuple[Trace, ...]]
    others: dict[str, str]

    def __str__(self) -> str:
        calls = {path: dict.fromkeys((x.picked, x.problem, x.why) for x in traces) for path, traces in self.layers.items()}
        chosen = (f"{path}: {backend} for {problem}: {why}" for path, each in calls.items() for backend, problem, why in each)
        return "\n".join([*chosen, *(f"{path}: {reason}" for path, reason in self.others.items())])


def explain(model: Any, **inputs: Any) -> ModelTrace:
    """Explain which backend computes each attention layer of `model(**inputs)`, and why other layers have another attention.

    The model is called once, in the mode it is in: with gradients unless under `torch.no_grad()`. Steps of decoding, which read
    a cache alone, are not explained. Raises TypeError for anything but a model of transformers, and whatever the call raises.

    Example:

        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from dilkit import Pattern
        >>> from dilkit.integrations.transformers import convert, explain
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> _ = convert(model, Pattern([16, 64], [1, 4]))
        >>> trace = explain(model, input_ids=torch.randint(100, (1, 50)))
        >>> {path: [call.problem.seq for call in calls] for path, calls in trace.layers.items()}
        {'model.layers.0.self_attn': [50], 'model.layers.1.self_attn': [50]}
    """
    every = looked_up(model) | computing(model)
    with _Calls() as mode, ExitStack() as hooks:
        for path, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(lambda *_, path=path: mode.paths.append(path)).remove)
            hooks.callback(module.register_forward_hook(lambda *_: mode.paths.__delitem__(-1), always_call=True).remove)
        model(**inputs)
    calls = {path: tuple(traces) for path, traces in mode.traces.items()}
    return ModelTrace(calls, {path: _reason(layer) for path, layer in every.items() if path not in calls})


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds each call of dilkit, which torch's dispatcher gets under a mode, to those of the innermost module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paths: list[str] = []
        self.traces: defaultdict[str, list[Trace]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is forward_op:
            inputs, options = forward_call(*args)
            problem = prepare(inputs, options, tensor_key(inputs)).problem
            self.traces[self.paths[-1]].append(explain_problem(problem, options.backends or None))
        return func(*args, **(kwargs or {}))


def _reason(layer: Any) -> str:
    attention, config = getattr(layer, KEEPS, ("", None))
    if config is not None:
        computed = ", ".join(LAYER_TYPES)
        return f"keeps the attention {attention!r}: dilated attention takes the place of {computed}, not of {kind_of(layer)}"
    if attention:
        return f"keeps the attention {attention!r}: its class computes it"
    name = getattr(getattr(layer, "config", None), "_attn_implementation", None)
    if is_registered(name):
        return "was not called, or read a cache alone"
    return "computes attention by itself" if name is None else f"has the attention {name!r}"
