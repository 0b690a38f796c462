"""The torch operator behind `dilated_attention_with_kvcache`: new keys and values are appended, then the last rows computed.

Everything is checked, and a backend chosen, before the cache is written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dilkit import plan
from dilkit.backend import Backend
from dilkit.bias.form import LoweredBias
from dilkit.decoding.last_row import has_spans, spans_of, writes_of
from dilkit.decoding.step import Span, Step, Write, table
from dilkit.inputs import Inputs
from dilkit.op._facts import key_of
from dilkit.op.boundary import check_returned, check_room, empty_outputs, lse_dtype, span
from dilkit.op.older_backends import Forward, methods_of
from dilkit.op.overlap import check_places, check_written
from dilkit.op.schema import backends_asked, decode_call, library, scores_asked
from dilkit.op.scores import check_bias
from dilkit.op.zero_keys import add_zero_keys, check_sink
from dilkit.pattern.lowering import Forms
from dilkit.problem import DTYPES, Problem
from dilkit.selector import requested_backends, select, state

library.define(
    "last_rows(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? key, Tensor? value, Tensor cache_seqlens, "
    "float scale, str call, Tensor? sink=None, Tensor? bias=None, Tensor? positions=None) -> (Tensor, Tensor)"
)
last_rows_op = torch.ops.dilkit.last_rows.default

_DTYPES = tuple(getattr(torch, name) for name in DTYPES)
_WRITTEN = "k_cache", "v_cache"

NewRows = tuple[Tensor, Tensor] | None
"""Keys and values that are appended."""


class BySpans(NamedTuple):
    """A step over a cache, and the forms that say what its row sees."""

    problem: Problem
    forms: Forms


@dataclass(frozen=True)
class PreparedLastRows:
    """What was chosen for calls with the same facts."""

    backend: Backend
    forward: Forward
    problem: Problem
    nbytes: int
    spans: tuple[int, ...]
    """Of each tensor, the bytes from its first element to the end of its last."""
    by_spans: BySpans | None
    """Of one row a sequence; None where the pattern shows no spans, or the backend has no steps."""


def check_tensors(
    query: object, k_cache: object, v_cache: object, key: object, value: object, cache_seqlens: object
) -> dict[str, Tensor]:
    """The tensors by name. Raises TypeError or ValueError, naming the tensor, unless all fit each other."""
    if (key is None) != (value is None):
        raise ValueError("key and value go together: give both, or neither where the cache has them already")
    named: dict[str, Any] = dict(query=query, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
    named |= {} if key is None else dict(key=key, value=value)
    if all(type(x) is Tensor for x in named.values()) and not torch.compiler.is_compiling():
        plan.cached(("tensors of last rows", key_of(tuple(named), tuple(named.values()))), _fitting, named)
    else:
        _fitting(named)
    return named


@dataclass(frozen=True)
class _Fitting:
    """Tensors of such facts fit each other."""

    nbytes: int = plan.ENTRY_BYTES


def _fitting(named: dict[str, Any]) -> _Fitting:
    """Raises as `check_tensors`."""
    tensors = {name: _checked(name, x) for name, x in named.items() if name != "cache_seqlens"}
    first, caches = tensors["query"], tensors["k_cache"]
    for name, x in tensors.items():
        if (x.dtype, x.device) != (first.dtype, first.device):
            raise ValueError(f"{name} is {x.dtype} on {x.device}; {first.dtype} on {first.device} is needed, as query is")
    batch, _, heads, dim = first.shape
    if caches.shape[0] != batch or caches.shape[3] != dim or caches.shape[2] < 1 or heads % caches.shape[2]:
        needed = f"({batch}, capacity, a divisor of {heads}, {dim})"
        raise ValueError(f"k_cache has shape {tuple(caches.shape)}; {needed} is needed beside query {tuple(first.shape)}")
    if tensors["v_cache"].shape != caches.shape:
        raise ValueError(
            f"v_cache has shape {tuple(tensors['v_cache'].shape)} and k_cache {tuple(caches.shape)}; make them equal"
        )
    for name in ("key", "value"):
        wanted = (batch, tensors["key"].shape[1], *caches.shape[2:]) if name in tensors else ()
        if name in tensors and tensors[name].shape != wanted:
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}; {wanted} is needed: rows of the cache")
    _check_lengths_tensor(named["cache_seqlens"], first)
    return _Fitting()


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Raise ValueError where a gradient of one of these is wanted."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("a tensor requires a gradient, which dilated_attention_with_kvcache does not have; use torch.no_grad()")


def _checked(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
    if x.dtype not in _DTYPES or x.layout is not torch.strided:
        raise TypeError(f"{name} is {x.dtype}, {x.layout}; a plain tensor of {', '.join(DTYPES)} is needed")
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; (batch, rows, heads, head_dim) is needed")
    if x.stride(3) != 1 and x.shape[3] > 1:
        raise ValueError(f"{name} has stride {x.stride(3)} in its last dimension; 1 is needed ({name}.contiguous())")
    return x


def _check_lengths_tensor(cache_seqlens: object, query: Tensor) -> None:
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(f"cache_seqlens is a {type(cache_seqlens).__name__}; an int32 torch.Tensor (batch,) is needed")
    if cache_seqlens.dtype != torch.int32:
        raise TypeError(f"cache_seqlens is {cache_seqlens.dtype}; torch.int32 is needed (cache_seqlens.int())")
    if cache_seqlens.shape != query.shape[:1]:
        raise ValueError(f"cache_seqlens has shape {tuple(cache_seqlens.shape)}; (batch,) = ({query.shape[0]},) is needed")
    if cache_seqlens.device != query.device:
        raise ValueError(
            f"cache_seqlens is on {cache_seqlens.device} but query on {query.device}; move it with .to(query.device)"
        )


def _check_lengths(cache_seqlens: Tensor, new: int, rows: int, capacity: int) -> list[int]:
    """The lengths with the new rows. Raises ValueError for one beyond the capacity, or shorter than the rows to be computed."""
    before = cache_seqlens.tolist()
    for b, length in enumerate(before):
        if length < 0 or length + new > capacity:
            raise ValueError(
                f"cache_seqlens[{b}]={length} and {new} new rows: from 0 to the capacity {capacity} of k_cache is needed in all; "
                "make a larger cache"
            )
        if length + new < rows:
            raise ValueError(
                f"cache_seqlens[{b}]={length} and {new} new rows are fewer than the {rows} rows of query; "
                "the keys of all of them are needed (key=, value=)"
            )
    return [length + new for length in before]


def _last_rows(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache_seqlens: Tensor,
    scale: float,
    call: str,
    sink: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` of the rows of `query`, after `key` and `value` were appended; raises before anything is changed."""
    given = check_tensors(query, k_cache, v_cache, key, value, cache_seqlens)
    further = dict(sink=sink, bias=bias, positions=positions)
    given |= {name: x for name, x in further.items() if x is not None}
    asked = requested_backends(backends_asked(call).split(",")) if backends_asked(call) else requested_backends()
    names, tensors = tuple(given), tuple(given.values())
    facts = names, key_of(names, tensors)
    prepared = plan.cached(("last rows", state(), asked, facts, scale, call), _prepare, given, asked, scale, call)
    check_room(names, tensors, prepared.spans)
    check_no_gradient(*tensors)
    new = 0 if key is None else key.shape[1]
    lengths_in_all = _check_lengths(cache_seqlens, new, query.shape[1], k_cache.shape[1])
    if new:
        check_written(_WRITTEN, given, prepared.spans)
    for length in set(lengths_in_all) if query.shape[1] else ():
        prepared.problem.pattern.check_seq(length)
    form = prepared.problem.bias
    scores = None if form is None or bias is None else LoweredBias(form, bias, positions)
    strided = k_cache.stride(1) > 0 < v_cache.stride(1)
    if prepared.by_spans is not None and query.shape[1] == 1 and query.numel() and new <= 1 and strided:
        rows = None if key is None or value is None or new == 0 else (key, value)
        inputs = Inputs(query, k_cache, v_cache, bias=scores)
        return _attend_stored(prepared, prepared.by_spans, inputs, rows, lengths_in_all, sink)
    if key is not None and value is not None:
        _append(k_cache, key, cache_seqlens)
        _append(v_cache, value, cache_seqlens)
    if query.numel() == 0:
        return empty_outputs(query)
    inputs = Inputs(query, k_cache, v_cache, cache_seqlens=cache_seqlens + new, bias=scores)
    returned = prepared.forward(inputs, prepared.problem)
    wanted = dict(zip(("out", "lse"), empty_outputs(query), strict=True))
    out, lse = check_returned(prepared.backend.name, returned, wanted, tensors)
    if sink is not None:
        add_zero_keys(out, lse, None, sink)
    return out, lse


def _attend_stored(
    prepared: PreparedLastRows, by_spans: BySpans, inputs: Inputs, new: NewRows, lengths: list[int], sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same of one row of each sequence, which is `new` or not, in one step; sequences are then so long."""
    query, problem, caches = inputs.query, by_spans.problem, (inputs.key, inputs.value)
    spans = spans_of(by_spans.forms, problem.heads // problem.kv_heads, lengths, *caches)
    writes = [] if new is None else writes_of(lengths, *caches)
    tables = table(spans, len(Span._fields)), table(writes, len(Write._fields))
    logits = None if sink is None else sink.detach().to(lse_dtype(query.dtype)).contiguous()
    key, value = (None, None) if new is None else new
    step = Step(query, caches, *tables, key, value, logits, inputs.bias, by_position=True)
    returned = prepared.backend.attend_stored(step, problem)
    wanted = dict(zip(("out", "lse"), empty_outputs(query), strict=True))
    out, lse = check_returned(prepared.backend.name, returned, wanted, (query, *caches))
    return out, lse


def _prepare(given: Mapping[str, Tensor], asked: tuple[str, ...], scale: float, call: str) -> PreparedLastRows:
    """Raises what a call with such tensors raises, whatever is in them."""
    query, k_cache = given["query"], given["k_cache"]
    pattern, _, _ = decode_call(call)
    softcap, bias = scores_asked(call)
    if "sink" in given:
        check_sink(given["sink"], query)
    check_bias(bias, given.get("bias"), given.get("positions"), query, k_cache.shape[1])
    if "key" in given and given["key"].shape[1]:
        check_places(_WRITTEN, given)
    spans = tuple(map(span, given.values()))
    last_rows = Problem.of(query, k_cache, pattern, is_causal=True, kv_cache=True, scale=scale, softcap=softcap, bias=bias)
    problem = replace(last_rows, seq=k_cache.shape[1])
    backend = select(problem, asked)
    nbytes, by_spans = len(call) + plan.ENTRY_BYTES, _by_spans(problem, backend)
    return PreparedLastRows(backend, methods_of(backend).forward, problem, nbytes, spans, by_spans)


def _by_spans(problem: Problem, backend: Backend) -> BySpans | None:
    """A step of one row over a cache, if the backend takes it and the pattern shows spans in sequences of any length."""
    step = replace(problem, seq=1, kv_cache=False, stored=problem.dtype)
    if problem.pattern.is_evaluated or backend.refusals(step):
        return None
    return BySpans(step, problem.forms) if has_spans(problem.forms, problem.heads // problem.kv_heads) else None


def _append(cache: Tensor, rows: Tensor, lengths: Tensor) -> None:
    """Write `rows` of each sequence into the cache, from its length on."""
    places = lengths.long()[:, None] + torch.arange(rows.shape[1], device=rows.device)
    cache[torch.arange(len(lengths), device=rows.device)[:, None], places] = rows


library.impl("last_rows", _last_rows, "CompositeExplicitAutograd")
torch.library.register_fake("dilkit::last_rows", lambda query, *_: empty_outputs(query), lib=library)
