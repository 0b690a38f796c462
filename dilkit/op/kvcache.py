"""The torch operator behind `dilated_attention_with_kvcache`: new keys and values are appended, then the last rows computed.

Everything is checked, and a backend chosen, before the cache is written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dilkit import plan
from dilkit.backend import Backend
from dilkit.bias.form import LoweredBias
from dilkit.decoding._tables import LastRows, last_rows_of
from dilkit.decoding.layout import check_no_gradient
from dilkit.decoding.protocol import DecodingBackend, Step, decoding_backend
from dilkit.inputs import Inputs
from dilkit.op import boundary
from dilkit.op._facts import tensor_key, undispatched
from dilkit.op.autocast import in_given_dtypes
from dilkit.op.boundary import TORCH_DTYPES, check_returned, check_tensor, empty_outputs, lse_dtype
from dilkit.op.call_options import CallOptions, decode, encode
from dilkit.op.given import check_given
from dilkit.op.overlap import check_places, check_written
from dilkit.op.schema import library
from dilkit.op.scores import check_bias
from dilkit.op.zero_keys import add_zero_keys, check_sink
from dilkit.problem import DTYPES, Problem
from dilkit.selector import requested_backends, select, state

library.define(
    "last_rows(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? key, Tensor? value, Tensor cache_seqlens, "
    "float scale, str call, Tensor? sink=None, Tensor? bias=None, Tensor? positions=None) -> (Tensor, Tensor)"
)
last_rows_op = torch.ops.dilkit.last_rows.default

_WRITTEN = "k_cache", "v_cache"
_NAMES = "query", *_WRITTEN, "cache_seqlens", "key", "value", "sink", "bias", "positions"
"""The tensors of a call, of which those after `cache_seqlens` may be None."""

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]
"""Query, caches, key, value and lengths, as the operator takes them."""


@dataclass(frozen=True)
class PreparedLastRows:
    """Backend and checks that were chosen for calls with the same facts."""

    backend: Backend
    problem: Problem
    nbytes: int
    spans: tuple[int, ...]
    """For each tensor, the bytes from its first element to the end of its last."""
    foreign: bool
    of_some_lengths: bool
    """True if the pattern may not be for sequences of every length."""
    step: tuple[DecodingBackend, Problem, LastRows] | None
    """A step of one row of each sequence; None for calls of other rows, patterns without spans, and backends without steps."""


def check_tensors(query: object, k_cache: object, v_cache: object, key: object, value: object, cache_seqlens: object) -> None:
    """Raise TypeError or ValueError, naming the tensor, unless all fit each other. `key` and `value` may be None."""
    if (key is None) != (value is None):
        raise ValueError("key and value go together: give both, or neither where the cache has them already")
    count = 4 if key is None else 6
    tensors: tuple[Any, ...] = (query, k_cache, v_cache, cache_seqlens, key, value)[:count]
    names = _NAMES[:count]
    if {*map(type, tensors)} == {Tensor} and not torch.compiler.is_compiling():
        plan.cached(("tensors of last rows", names, tensor_key(tensors)), _fitting, names, tensors)
    else:
        _fitting(names, tensors)


@dataclass(frozen=True)
class _Fitting:
    """Tensors of such facts fit each other."""

    nbytes: int = plan.ENTRY_BYTES


def _fitting(names: tuple[str, ...], values: tuple[Any, ...]) -> _Fitting:
    arguments = dict(zip(names, values, strict=True))
    tensors = {name: _checked(name, x) for name, x in arguments.items() if name != "cache_seqlens"}
    first, caches = tensors["query"], tensors["k_cache"]
    for name, x in tensors.items():
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; {first.dtype} on {first.device} is needed, as query is")
    batch, _, heads, dim = first.shape
    if caches.shape[0] != batch or caches.shape[3] != dim or caches.shape[2] < 1 or heads % caches.shape[2]:
        needed = f"({batch}, capacity, a divisor of {heads}, {dim})"
        raise ValueError(f"k_cache has shape {tuple(caches.shape)}; {needed} is needed beside query {tuple(first.shape)}")
    if tensors["v_cache"].shape != caches.shape:
        shapes = tuple(tensors["v_cache"].shape), tuple(caches.shape)
        raise ValueError("v_cache has shape {} and k_cache {}; make them equal".format(*shapes))
    for name in ("key", "value"):
        wanted = (batch, tensors["key"].shape[1], *caches.shape[2:]) if name in tensors else ()
        if name in tensors and tensors[name].shape != wanted:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; {wanted} is needed: rows of the cache")
    _check_lengths_tensor(arguments["cache_seqlens"], first)
    return _Fitting()


def _checked(name: str, given: object) -> Tensor:
    x = check_tensor(name, given)
    if x.dtype not in TORCH_DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{name} is {x.dtype}, {x.layout}; a plain tensor of {', '.join(DTYPES)} is needed")
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, rows, heads, head_dim) is needed")
    if x.stride(3) != 1 and x.shape[3] > 1:
        raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; 1 is needed ({name}.contiguous())")
    return x


def _check_lengths_tensor(given: object, query: Tensor) -> None:
    lengths = check_tensor("cache_seqlens", given, "an int32 torch.Tensor (batch,)")
    if lengths.dtype != torch.int32:
        raise TypeError(f"cache_seqlens is {lengths.dtype}; torch.int32 is needed (cache_seqlens.int())")
    if lengths.shape != query.shape[:1]:
        raise ValueError(f"cache_seqlens has shape {tuple(lengths.shape)}; (batch,) = ({query.shape[0]},) is needed")
    boundary.check_device("cache_seqlens", lengths, query)


def _check_lengths(cache_seqlens: Tensor, new: int, rows: int, capacity: int) -> list[int]:
    """Return the lengths with the new rows. Raises ValueError beyond the capacity, or below the rows to be computed."""
    before = cache_seqlens.tolist()
    for b, length in enumerate(before):
        if length < 0 or length + new > capacity:
            needed = f"0 to the capacity {capacity} of k_cache are needed in all; make a larger cache"
            raise ValueError(f"cache_seqlens[{b}]={length} and {new} new rows: {needed}")
        if length + new < rows:
            way = "the keys of all are needed (key=, value=)"
            raise ValueError(f"cache_seqlens[{b}]={length} and {new} new rows are fewer than the {rows} of query; {way}")
    return [length + new for length in before]


def last_rows(tensors: _Tensors, options: CallOptions, *others: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call `last_rows_op` with checked tensors, around torch's dispatcher if it has nothing to do; `others`: sink and bias."""
    if torch.compiler.is_compiling() or not undispatched((*tensors, *others)):
        results: tuple[Tensor, Tensor] = last_rows_op(*tensors, options.scale, encode(options), *others)
        return results
    return _attend(*tensors, options, *others)


def _last_rows(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, key: Any, value: Any, lengths: Tensor, scale: float, text: str, *others: Any
) -> tuple[Tensor, Tensor]:
    check_tensors(query, k_cache, v_cache, key, value, lengths)
    check_no_gradient(query, k_cache, v_cache, key, value, *others)
    return _attend(query, k_cache, v_cache, key, value, lengths, decode(text)._replace(scale=scale), *others)


@in_given_dtypes
def _attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache_seqlens: Tensor,
    options: CallOptions,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Append `key` and `value`, then compute `(out, lse)` of `query`; raises before anything is changed."""
    every = query, k_cache, v_cache, cache_seqlens, key, value, sink, bias, positions
    tensors = tuple([x for x in every if x is not None])
    names = tuple([name for name, x in zip(_NAMES, every, strict=True) if x is not None])
    backends = options.backends or requested_backends()
    facts = "last rows", state(), backends, names, tensor_key(tensors), options
    prepared = plan.cached(facts, _prepare, names, tensors, backends, options)
    boundary.check_memory(names, tensors, prepared.spans)
    new = 0 if key is None else key.shape[1]
    lengths = _check_lengths(cache_seqlens, new, query.shape[1], k_cache.shape[1])
    if new:
        check_written(_WRITTEN, names, tensors, prepared.spans)
    for length in set(lengths) if prepared.of_some_lengths else ():
        prepared.problem.pattern.check_seq(length)
    form = prepared.problem.bias
    scores = None if form is None or bias is None else LoweredBias(form, bias, positions)
    if prepared.step is not None:
        rows = None if key is None or value is None or new == 0 else (key, value)
        return _attend_stored(prepared, Inputs(query, k_cache, v_cache, bias=scores), rows, lengths, sink)
    if key is not None and value is not None:
        _append(k_cache, key, cache_seqlens)
        _append(v_cache, value, cache_seqlens)
    if query.numel() == 0:
        return empty_outputs(query)
    inputs = Inputs(query, k_cache, v_cache, cache_seqlens=cache_seqlens + new, bias=scores)
    out, lse = _checked_results(prepared, prepared.backend.forward(inputs, prepared.problem), query, tensors)
    if sink is not None:
        add_zero_keys(out, lse, None, sink)
    return out, lse


def _attend_stored(
    prepared: PreparedLastRows, inputs: Inputs, new: tuple[Tensor, Tensor] | None, lengths: list[int], sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the same for one row of each sequence, `new` or not, in one step; sequences are then so long."""
    assert prepared.step is not None
    (backend, problem, rows), query, caches = prepared.step, inputs.query, (inputs.key, inputs.value)
    tables = rows.tables(lengths, new is not None)
    logits = None if sink is None else sink.detach().to(lse_dtype(query.dtype)).contiguous()
    key, value = (None, None) if new is None else new
    for written in caches if new is not None else ():
        increment_version(written)  # autograd may have kept it for a backward pass, and a kernel's writing is not seen
    returned = backend.attend_stored(Step(query, caches, *tables, key, value, logits, inputs.bias, by_position=True), problem)
    return _checked_results(prepared, returned, query, (query, *caches))


def _checked_results(
    prepared: PreparedLastRows, returned: tuple[Tensor, ...], query: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    if prepared.foreign:
        wanted = dict(zip(("out", "lse"), empty_outputs(query), strict=True))
        returned = check_returned(prepared.backend.name, returned, wanted, tensors)
    out, lse = returned
    return out, lse


def _prepare(
    names: tuple[str, ...], tensors: tuple[Tensor, ...], asked: tuple[str, ...], options: CallOptions
) -> PreparedLastRows:
    by_name = dict(zip(names, tensors, strict=True))
    query, k_cache = by_name["query"], by_name["k_cache"]
    pattern, bias = options.pattern, options.bias
    if "sink" in by_name:
        check_sink(by_name["sink"], query)
    check_bias(bias, by_name.get("bias"), by_name.get("positions"), query, k_cache.shape[1])
    check_given(Inputs(query, k_cache, by_name["v_cache"]), pattern)
    if "key" in by_name and by_name["key"].shape[1]:
        check_places(_WRITTEN, by_name)
    spans = tuple(map(boundary.span, by_name.values()))
    scores: dict[str, Any] = dict(scale=options.scale, softcap=options.softcap, bias=bias)
    last_rows = Problem.of(query, k_cache, pattern, is_causal=True, kv_cache=True, **scores)
    problem = replace(last_rows, seq=k_cache.shape[1])
    backend = select(problem, requested_backends(asked or None))
    foreign = not type(backend).__module__.startswith("dilkit.backends.")
    nbytes, step = len(pattern.to_json()) + plan.ENTRY_BYTES, _step(by_name, problem, backend)
    lengths = not pattern.only_segments and query.shape[1] > 0
    return PreparedLastRows(backend, problem, nbytes, spans, foreign, lengths, step)


def _step(given: Mapping[str, Tensor], problem: Problem, backend: Backend) -> tuple[DecodingBackend, Problem, LastRows] | None:
    """Return a step of one row over a cache, if the backend takes it and the pattern shows spans in sequences of any length."""
    caches = [given[name] for name in _WRITTEN]
    step = replace(problem, seq=1, kv_cache=False, stored=problem.dtype)
    news = given["key"].shape[1] if "key" in given else 0
    ascending = all(cache.stride(1) > 0 for cache in caches)
    fits = given["query"].shape[1] == 1 and given["query"].numel() > 0 and news <= 1 and ascending
    if not fits or problem.pattern.is_evaluated or backend.refusals(step):
        return None
    strides = caches[0].stride()[:3], caches[1].stride()[:3]
    rows = last_rows_of(problem.forms, problem.heads // problem.kv_heads, problem.kv_heads, strides)
    return None if rows is None else (decoding_backend(backend), step, rows)


def _append(cache: Tensor, rows: Tensor, lengths: Tensor) -> None:
    places = lengths.long()[:, None] + torch.arange(rows.shape[1], device=rows.device)
    cache[torch.arange(len(lengths), device=rows.device)[:, None], places] = rows


def _refuse_vmap(*_: Any) -> Any:
    raise RuntimeError("dilated_attention_with_kvcache does not support vmap; make the mapped dimension a part of the batch")


library.impl("last_rows", _last_rows, "CompositeExplicitAutograd")
torch.library.register_fake("dilkit::last_rows", lambda query, *_: empty_outputs(query), lib=library)
torch.library.register_vmap("dilkit::last_rows", _refuse_vmap, lib=library)
