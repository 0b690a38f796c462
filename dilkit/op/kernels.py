"""What the torch operators behind `dilated_attention` compute: the tensors checked, a backend chosen, its kernel called."""

from __future__ import annotations

import torch
from torch import Tensor

from dilkit.bias.form import LoweredBias
from dilkit.inputs import Inputs
from dilkit.op import boundary, sequences
from dilkit.op._facts import key_of
from dilkit.op.block_layout import check_choice, check_layout
from dilkit.op.dropout import Dropout, dropout_of
from dilkit.op.prepared_call import prepare
from dilkit.op.scores import check_bias
from dilkit.op.zero_keys import add_zero_keys, check_sink
from dilkit.problem import Problem


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
    prepared = prepare(boundary.INPUTS, tensors, key_of(boundary.INPUTS, tensors), scale, call, longest)
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
    dropout = None
    if prepared.problem.dropout_p or dropout_places is not None:
        dropout = _dropout(prepared.problem, dropout_seed, dropout_places)
    starts = None if cu_seqlens is None else cu_seqlens.contiguous()
    returned: tuple[Tensor, ...]
    scores = None
    if bias is not None or positions is not None or prepared.problem.bias is not None:
        scores = _bias(prepared.problem, bias, positions, query)
    inputs = Inputs(query, key, value, key_padding_mask, starts, None, dropout, scores, block_layout)
    returned = prepared.backend.forward(inputs, prepared.problem)
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
    prepared = prepare(boundary.SAVED, tensors, key_of(boundary.SAVED, tensors), scale, call, longest)
    scores = None
    if bias is not None or positions is not None or prepared.problem.bias is not None:
        scores = _bias(prepared.problem, bias, positions, query)
    if block_layout is not None or prepared.needs_layout:
        _check_layout(prepared.problem, block_layout, query)
    if query.numel() == 0:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value), _no_bias_gradient(prepared.problem, query)
    dout, query, key, value, out, lse, *_ = boundary.admit(tensors, prepared.admission)
    dropout = None
    if prepared.problem.dropout_p or dropout_places is not None:
        dropout = _dropout(prepared.problem, dropout_seed, dropout_places)
    starts = None if cu_seqlens is None else cu_seqlens.contiguous()
    inputs = Inputs(query, key, value, key_padding_mask, starts, None, dropout, scores, block_layout)
    returned: tuple[Tensor, ...] = prepared.backend.backward(dout, inputs, out, lse, prepared.problem)
    learned = prepared.problem.bias is not None and prepared.problem.bias.learned
    if prepared.foreign:
        wanted = dict(dquery=query, dkey=key, dvalue=value, **(dict(dbias=bias) if learned and bias is not None else {}))
        returned = boundary.check_returned(prepared.backend.name, returned, wanted, tensors)
    dquery, dkey, dvalue = returned[:3]
    return dquery, dkey, dvalue, returned[3] if learned else None


def _dropout(problem: Problem, seed: Tensor | None, places: Tensor | None) -> Dropout | None:
    """The weights that are dropped, where the call has a dropout."""
    if problem.varlen and places is not None:
        raise ValueError("dropout_places and cu_seqlens cannot go together; the places of packed sequences are their own")
    return None if problem.dropout_p == 0 else dropout_of(problem, seed, places)


def _bias(problem: Problem, weights: Tensor | None, positions: Tensor | None, query: Tensor) -> LoweredBias | None:
    """The bias of a call, where it has one. Raises TypeError or ValueError for tensors that are not those of its form."""
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
