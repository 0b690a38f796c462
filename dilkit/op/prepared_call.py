"""The facts that calls with equal tensors share: tensors checked, a backend chosen, and what its results lack."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from dilkit import plan
from dilkit.backend import Backend
from dilkit.inputs import Inputs
from dilkit.op import boundary, sequences
from dilkit.op.arguments import check_inputs, check_others
from dilkit.op.call_options import CallOptions, flat
from dilkit.op.given import check_given
from dilkit.op.offsets import check_offset, check_offsets, packed_alike, positions_of
from dilkit.op.schema import TENSORS
from dilkit.op.scores import check_bias
from dilkit.op.zero_keys import ZeroKeys, zero_keys_of
from dilkit.problem import Problem
from dilkit.selector import State, requested_at, requested_backends, select, state

_FLAGS = [field.name for field in fields(Problem) if field.name in Inputs._fields and field.type == "bool"]
"""Tensors of which a problem says whether they are there."""
Results = tuple[Tensor, Tensor, Tensor]
"""Tensors of a backward pass beside the inputs: `dout`, `out` and `lse`."""


@dataclass(frozen=True)
class PreparedCall:
    """The choice and the checks of calls with the same facts.

    `foreign`: the backend is none of dilkit's own. `gradients`: names of those that a backward pass returns. `names`, `spans`: of
    each tensor, and the bytes from its first element to the end of its last. `width`: `TENSORS` up to the last that is given.
    `any_copied`: the backend needs copies of tensors whose last dimension is not contiguous. `is_plain`: it takes the inputs as
    they are, and returns the results. `backward_options`: those of the backward pass, which may run outside of `use_backend`.
    """

    backend: Backend
    problem: Problem
    foreign: bool
    gradients: tuple[str, ...]
    names: tuple[str, ...]
    width: int
    spans: tuple[int, ...]
    any_copied: bool
    zero_keys: ZeroKeys | None
    is_plain: bool
    backward_options: CallOptions
    nbytes: int


def prepare(
    inputs: Inputs, options: CallOptions, key: Hashable, results: Results | None = None, *, from_public: bool = False
) -> PreparedCall:
    """Return the cached call for tensors of this `key`; `from_public`: checked by a public function, else of any strides."""
    moment = state()
    if inputs.cu_seqlens is not None:
        longest = sequences.longest(inputs.cu_seqlens, options.max_seqlen, inputs.query, inputs.key_padding_mask)
        options = options._replace(max_seqlen=longest)
        if inputs.cu_seqlens_k is not None:
            options = options._replace(max_keys=sequences.longest_keys(inputs.cu_seqlens_k, inputs.cu_seqlens, inputs.key))
    facts = "call", moment, key, options, results is None, from_public
    return plan.cached(facts, _made, moment, inputs, options, results, from_public)


def _made(moment: State, inputs: Inputs, options: CallOptions, results: Results | None, from_public: bool) -> PreparedCall:
    query, key, value, *_ = inputs
    pattern, is_causal, backends = options.pattern, options.is_causal, options.backends
    default = () if backends else requested_at(moment)
    core = (query, key, value) if results is None else (results[0], query, key, value, *results[1:])
    _check(inputs, options, core, from_public)
    any_copied = not all(map(boundary.lies_in_rows, core[:5]))  # lse, the sixth, has its rows in another dimension
    boundary.warn_of_many_heads(query)
    problem, seq = _problem(inputs, options), key.shape[1]
    if problem.queries is not None:
        check_offset(problem)
    if not (is_causal or problem.varlen):  # causality and caches may yet see a token; packed sequences are of any lengths
        pattern.check_tokens(seq)
    backend = select(problem, requested_backends(backends) if backends else default)
    check_given(inputs, pattern)
    if inputs.given is not None and problem.varlen:
        name = "block_layout" if inputs.intervals is None else "intervals"
        raise ValueError(f"{name} and cu_seqlens cannot go together; compute sequences of one length as a batch")
    weights, positions = (None, None) if inputs.bias is None else (inputs.bias.weights, inputs.bias.positions)
    check_bias(options.bias, weights, positions, query, seq)
    encoded = backend.encode(problem)
    tensors = flat(inputs)
    named = {name: x for name, x in zip(TENSORS, tensors, strict=True) if x is not None}
    if results is not None:
        named = dict(dout=results[0], **named, out=results[1], lse=results[2])
    padded = pattern.tail == "zeros" and not is_causal and results is None and not problem.varlen
    zero_keys = zero_keys_of(pattern, seq, problem.heads, problem.kv_heads, query, range(seq)) if padded else None
    held = sum(x.nbytes for x in (zero_keys, encoded) if x is not None)
    others = inputs.sink, inputs.cu_seqlens, inputs.dropout, inputs.given, zero_keys
    plain = all(x is None for x in others) and not (any_copied or options.dropout_p) and query.numel() > 0 and key.numel() > 0
    foreign = not type(backend).__module__.startswith("dilkit.backends.")
    return PreparedCall(
        backend,
        problem if encoded is None else problem.with_encoded(encoded),
        foreign,
        ("query", "key", "value", *inputs.learned),
        tuple(named),
        1 + max(at for at, x in enumerate(tensors) if x is not None),
        tuple(map(boundary.span, named.values())),
        any_copied,
        zero_keys,
        plain and not foreign,
        options._replace(backends=default) if default else options,
        held + _TEXTS * len(pattern.to_json()) + _TENSOR_BYTES * len(named),
    )


def _problem(inputs: Inputs, options: CallOptions) -> Problem:
    longest = 0 if inputs.cu_seqlens is None else options.max_seqlen or 0
    keys = longest if inputs.cu_seqlens_k is None else options.max_keys or 1
    facts: dict[str, Any] = {name: getattr(inputs, name) is not None for name in _FLAGS}
    facts |= {name: getattr(options, name) for name in ("is_causal", "requires_grad", "dropout_p", "softcap", "bias")}
    facts |= dict(seq=keys or inputs.key.shape[1], varlen=longest > 0, scale=options.factor(inputs.query))
    facts |= positions_of(inputs, options.query_offset, options.is_causal, longest)
    return Problem.of(inputs.query, inputs.key, options.pattern, **facts)


def _check(inputs: Inputs, options: CallOptions, core: tuple[Tensor, ...], from_public: bool) -> None:
    query, key, value, mask, *_ = inputs
    pattern, is_square = options.pattern, packed_alike(inputs)
    names = boundary.INPUTS if len(core) == len(boundary.INPUTS) else boundary.SAVED
    if from_public:
        check_inputs(inputs, pattern, is_square)
    else:
        for name, x in zip(names, core, strict=True):  # torch hands None to operators for a tensor that is undefined
            boundary.check_tensor(name, x)
        boundary.check_shapes(query.shape, key.shape, value.shape, is_square)
        if names is boundary.INPUTS:
            check_others(inputs, pattern)
    boundary.check_tensors(names, core if mask is None else (*core, mask), is_square)
    if inputs.query_offset is not None:
        check_offsets(inputs)


_TEXTS = 4
"""A pattern has a text, and branches: that of the key may be another than that of the backward pass."""
_TENSOR_BYTES = 400
"""Size of the facts kept for each tensor, about."""
