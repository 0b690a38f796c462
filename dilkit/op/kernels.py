"""What the torch operators behind `dilated_attention` compute: the tensors checked, a backend chosen, its kernel called."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from dilkit import plan
from dilkit.backend import Backend
from dilkit.bias.form import LoweredBias
from dilkit.device import probe
from dilkit.inputs import Inputs
from dilkit.op import boundary, sequences
from dilkit.op._facts import key_of
from dilkit.op.block_layout import check_choice, check_layout
from dilkit.op.dropout import Dropout, dropout_of
from dilkit.op.older_backends import Backward, Forward, methods_of
from dilkit.op.schema import asks_for_backends, backends_asked, decode_call, dropout_asked, scores_asked
from dilkit.op.scores import check_bias
from dilkit.op.zero_keys import ZeroKeys, add_zero_keys, check_sink, zero_keys_of
from dilkit.problem import Problem
from dilkit.selector import requested_backends, select, state


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    scale: float,
    call: str,
    sink: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    dropout_seed: Tensor | None = None,
    dropout_places: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    block_layout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)`; `call` as `encode_call` writes it. Raises ValueError or TypeError for tensors that do not fit each other.

    `cu_seqlens`: the one element of the batch is sequences packed one after the other, which begin there. `dropout_seed`: int64
    `()` on the CPU, where the call asks for dropout; `dropout_places`: where the rows lie in the whole, as `Dropout.places`.
    `bias`, `positions`: as in `LoweredBias`, where the call has a bias. `block_layout`: as in `dilkit.op.block_layout`.
    """
    tensors = (query, key, value) if key_padding_mask is None else (query, key, value, key_padding_mask)
    longest = 0 if cu_seqlens is None else sequences.longest(cu_seqlens, max_seqlen, query, key_padding_mask)
    prepared = _prepared(boundary.INPUTS, tensors, scale, call, longest)
    if sink is not None:
        check_sink(sink, query)
        boundary.check_memory(("sink",), (sink,))
    if block_layout is not None or prepared.needs_layout:
        _check_layout(prepared.problem, block_layout, query)
    if query.numel() == 0:
        return boundary.empty_outputs(query)
    if cu_seqlens is not None and max_seqlen is not None and cu_seqlens.device.type == "cuda":
        sequences.assert_lengths(cu_seqlens, max_seqlen, query.shape[1])
    query, key, value, *_ = boundary.admit(tensors, prepared.admission)
    dropout = _dropout(prepared.problem, dropout_seed, dropout_places)
    starts = None if cu_seqlens is None else cu_seqlens.contiguous()
    returned: tuple[Tensor, ...]
    scores = _bias(prepared.problem, bias, positions, query)
    inputs = Inputs(query, key, value, key_padding_mask, starts, None, dropout, scores, block_layout)
    returned = prepared.forward(inputs, prepared.problem)
    if prepared.foreign:
        wanted = dict(zip(("out", "lse"), boundary.empty_outputs(query), strict=True))
        returned = boundary.check_returned(prepared.backend.name, returned, wanted, tensors)
    out, lse = returned
    zero_keys = prepared.zero_keys if cu_seqlens is None else sequences.zero_keys(prepared.problem, query, cu_seqlens)
    if zero_keys is not None or sink is not None:
        add_zero_keys(out, lse, zero_keys, sink)
    return out, lse


def backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    scale: float,
    call: str,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    dropout_seed: Tensor | None = None,
    dropout_places: Tensor | None = None,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    block_layout: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(dquery, dkey, dvalue, dbias)` given the `out` and `lse` of the whole softmax; raises as `forward` does.

    `dbias` is that of the weights of a learned bias; None where there is none.
    """
    tensors = (dout, query, key, value, out, lse) + (() if key_padding_mask is None else (key_padding_mask,))
    longest = 0 if cu_seqlens is None else sequences.longest(cu_seqlens, max_seqlen, query, key_padding_mask)
    prepared = _prepared(boundary.SAVED, tensors, scale, call, longest)
    scores = _bias(prepared.problem, bias, positions, query)
    if block_layout is not None or prepared.needs_layout:
        _check_layout(prepared.problem, block_layout, query)
    if query.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), _no_bias_gradient(prepared.problem, query)
    dout, query, key, value, out, lse, *_ = boundary.admit(tensors, prepared.admission)
    dropout = _dropout(prepared.problem, dropout_seed, dropout_places)
    starts = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = Inputs(query, key, value, key_padding_mask, starts, None, dropout, scores, block_layout)
    returned: tuple[Tensor, ...] = prepared.backward(dout, inputs, out, lse, prepared.problem)
    learned = prepared.problem.bias is not None and prepared.problem.bias.learned
    if prepared.foreign:
        wanted = dict(dquery=query, dkey=key, dvalue=value, **(dict(dbias=bias) if learned and bias is not None else {}))
        returned = boundary.check_returned(prepared.backend.name, returned, wanted, tensors)
    dquery, dkey, dvalue = returned[:3]
    return dquery, dkey, dvalue, returned[3] if learned else None


def forward_of_three(query: Tensor, key: Tensor, value: Tensor, scale: float, call: str, facts: bytes) -> tuple[Tensor, Tensor]:
    """`forward` of a call that has these tensors alone, whose `facts` are those of `plain_facts`."""
    tensors = query, key, value
    prepared = _found(boundary.INPUTS, tensors, facts, scale, call, 0)
    if not prepared.is_plain:
        with torch._C._AutoDispatchBelowAutograd():  # a backend may have tensors of its own that require a gradient
            return forward(query, key, value, None, scale, call)
    boundary.check_room(boundary.INPUTS, tensors, prepared.admission.spans)
    return prepared.forward(Inputs(query, key, value), prepared.problem)


@dataclass(frozen=True)
class PreparedCall:
    """What was chosen and worked out for calls with the same facts.

    `foreign`: the backend is none of dilkit's own. `needs_layout`: each call gives the blocks of a branch. `zero_keys`: those
    that rows see at the end of the forward pass, if any do. `is_plain`: what the backend is given is what the call was, and what
    it returns are the results.
    """

    backend: Backend
    forward: Forward
    backward: Backward
    problem: Problem
    admission: boundary.Admission
    foreign: bool
    needs_layout: bool
    zero_keys: ZeroKeys | None
    is_plain: bool
    nbytes: int


def _dropout(problem: Problem, seed: Tensor | None, places: Tensor | None) -> Dropout | None:
    """Which weights are dropped, where the call has a dropout."""
    if problem.varlen and places is not None:
        raise ValueError("dropout_places and cu_seqlens cannot go together; the places of packed sequences are their own")
    return None if problem.dropout_p == 0 else dropout_of(problem, seed, places)


def _bias(problem: Problem, weights: Tensor | None, positions: Tensor | None, query: Tensor) -> LoweredBias | None:
    """The bias of a call, where it has one. Raises TypeError or ValueError for tensors that are not those of its form."""
    if problem.bias is None and weights is None and positions is None:
        return None
    check_bias(problem.bias, weights, positions, query, query.shape[1])
    return None if problem.bias is None or weights is None else LoweredBias(problem.bias, weights, positions)


def _check_layout(problem: Problem, layout: Tensor | None, query: Tensor) -> None:
    """Raise TypeError or ValueError for a block layout that is none of the call, or missing."""
    check_layout(layout, problem.pattern, query, problem.kv_heads)
    if layout is None:
        return
    if problem.varlen:
        raise ValueError("block_layout and cu_seqlens cannot go together; compute sequences of one length as a batch")
    check_choice(layout, problem.is_causal)


def _no_bias_gradient(problem: Problem, query: Tensor) -> Tensor | None:
    """Zeros for the weights of a learned bias, if there is one."""
    form, heads = problem.bias, problem.heads
    if form is None or not form.learned:
        return None
    return query.new_zeros((heads, form.entries), dtype=boundary.lse_dtype(query.dtype))


def _prepared(names: tuple[str, ...], tensors: tuple[Tensor, ...], scale: float, call: str, longest: int) -> PreparedCall:
    """What the pattern cache has for these tensors: one look-up by their shapes, strides, dtypes and devices.

    `longest`: what a packed call is prepared for, as `sequences.longest` says; 0 for one that is not packed.
    """
    return _found(names, tensors, key_of(names, tensors), scale, call, longest)


def _found(
    names: tuple[str, ...], tensors: tuple[Tensor, ...], facts: Hashable, scale: float, call: str, longest: int
) -> PreparedCall:
    default = () if asks_for_backends(call) else requested_backends()
    key = "call", state(), names, facts, default, scale, call, longest
    return plan.cached(key, _prepare, names, tensors, default, scale, call, longest)


def _prepare(
    names: tuple[str, ...], tensors: tuple[Tensor, ...], default: tuple[str, ...], scale: float, call: str, longest: int
) -> PreparedCall:
    """Check the tensors, and choose the backend: one of those that the call requests, else of `default`."""
    admission = boundary.prepare(names, tensors)
    boundary.warn_of_many_heads(tensors[names.index("query")])
    query, key = tensors[names.index("query")], tensors[names.index("key")]
    batch, seq, heads, head_dim = query.shape
    pattern, is_causal, requires_grad = decode_call(call)
    softcap, bias = scores_asked(call)
    problem = Problem(
        pattern=pattern,
        batch=batch,
        seq=longest or seq,
        heads=heads,
        kv_heads=key.shape[2],
        head_dim=head_dim,
        dtype=str(query.dtype).removeprefix("torch."),
        device=probe(query.device.type, query.device.index or 0),
        is_causal=is_causal,
        key_padding_mask=boundary.MASK in admission.names,
        requires_grad=requires_grad,
        varlen=longest > 0,
        dropout_p=dropout_asked(call),
        softcap=softcap,
        bias=bias,
        scale=scale,
    )
    asked = backends_asked(call)
    backend = select(problem, requested_backends(asked.split(",")) if asked else default)
    foreign = not type(backend).__module__.startswith("dilkit.backends.")
    padded = pattern.tail == "zeros" and not is_causal and names is boundary.INPUTS and not longest
    zero_keys = zero_keys_of(pattern, seq, heads, problem.kv_heads, query, range(seq)) if padded else None
    nbytes = _TEXTS * len(call) + _TENSOR_BYTES * len(tensors) + (0 if zero_keys is None else zero_keys.nbytes)
    given = pattern.given_blocks is not None
    odd = foreign or given or admission.any_copied or zero_keys is not None or problem.dropout_p or problem.bias is not None
    plain = not odd and query.numel() > 0
    return PreparedCall(backend, *methods_of(backend), problem, admission, foreign, given, zero_keys, plain, nbytes)


_TEXTS = 3
"""The key has the call as text, and its pattern has another text and the branches."""
_TENSOR_BYTES = 400
"""What is kept of each tensor takes about as much."""
