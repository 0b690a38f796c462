"""One call, from its tensors and options to a backend and back.

attend            the backend, or the torch operator where torch's dispatcher has something to do
  prepare         look up what was chosen and checked for tensors like these       prepared_call.py
  Differentiable  record the gradient, if one is wanted
  compute         the backend, and what its results lack
differentiate     the same for the gradients, given `out` and `lse` of the whole softmax
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from dilkit.inputs import Inputs
from dilkit.op import sequences
from dilkit.op._facts import call_key, first_beyond, tensor_key
from dilkit.op.autocast import without_autocast
from dilkit.op.boundary import check_returned, empty_outputs, in_rows, refuse_beyond
from dilkit.op.call_options import FIRST, CallOptions, backward_arguments, flat, forward_arguments, unflat
from dilkit.op.dropout import dropout_of
from dilkit.op.given import check_values
from dilkit.op.prepared_call import PreparedCall, prepare
from dilkit.op.schema import GRADIENTS, TENSORS, backward_op, forward_op
from dilkit.op.scores import check_detached
from dilkit.op.through_lse import through_lse
from dilkit.op.zero_keys import add_zero_keys, check_sink, sink_gradient
from dilkit.selector import requested_backends

_AUTOGRAD = torch._C.DispatchKey.AutogradOther
"""The key that stands for all of autograd's, which are excluded together."""


def attend(inputs: Inputs, options: CallOptions, key: Hashable | None = None) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` `(batch, heads, seq)`, differentiable; `key`: the `call_key` of the inputs, if it is known.

    Raises TypeError or ValueError for tensors that do not fit each other. torch's dispatcher, which takes longer than a small
    problem's kernel, is left out where it has nothing to do.
    """
    if key is None and (torch.compiler.is_compiling() or (key := call_key(inputs)) is None):
        results: tuple[Tensor, Tensor] = forward_op(*forward_arguments(inputs, options))
        return results
    sink = inputs.sink
    records = torch.is_grad_enabled() and (options.requires_grad or (sink is not None and sink.requires_grad))
    if records and not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        options = options if inputs.bias is None else learning(inputs, options)
        prepared = prepare(inputs, options, key, from_public=True)
        return _record(prepared, options, *(flat(inputs) if prepared.width > FIRST else inputs[: prepared.width]))
    return compute(prepare(inputs, options, key, from_public=True), inputs, options)


def differentiate(dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, options: CallOptions) -> tuple[Tensor, ...]:
    """Compute gradients of query, key, value and of what `inputs.learned` names; raises as `attend` does."""
    key = None if torch.is_grad_enabled() else call_key((dout, inputs, out, lse))
    if key is not None:
        return compute_gradients(dout, inputs, out, lse, options, key)
    every = zip(GRADIENTS, backward_op(*backward_arguments(dout, inputs, out, lse, options)), strict=True)
    return tuple(x for name, x in every if name in ("query", "key", "value", *inputs.learned))


class Differentiable(torch.autograd.Function):
    """A call with its gradient, faster than `register_autograd`; `prepared` is None where torch's dispatcher calls."""

    @staticmethod
    def forward(ctx: Any, prepared: PreparedCall | None, options: CallOptions, *tensors: Any) -> tuple[Tensor, Tensor]:
        inputs = unflat(tensors, options)
        if prepared is not None:
            out, lse = compute(prepared, inputs, options)
            longest, options = options.max_seqlen, prepared.backward_options
            options = options if inputs.cu_seqlens is None else options._replace(max_seqlen=longest)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = forward_op(*forward_arguments(inputs, options))
            # While torch.compile traces, the backends would become part of the graph, and of its cache on disk.
            if not options.backends and not isinstance(out, (FakeTensor, FunctionalTensor)):
                options = options._replace(backends=requested_backends())
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        *tensors, out, lse = ctx.saved_tensors
        options, inputs = ctx.options, unflat(tuple(tensors), ctx.options)
        if len(tensors) <= FIRST:  # there is nothing that is learned but query, key and value
            return None, None, *_gradients(dout, dlse, inputs, out, lse, options), *(None,) * (len(tensors) - 3)
        wanted = {name for name, needed in zip(TENSORS, ctx.needs_input_grad[2:], strict=False) if needed}
        gradients: dict[str, Tensor | None] = {}
        if wanted & {*GRADIENTS}:
            backend_gradients = _gradients(dout, dlse, inputs._replace(sink=None), out, lse, options)
            gradients = dict(zip(("query", "key", "value", *inputs.learned), backend_gradients, strict=True))
        if inputs.sink is not None and "sink" in wanted:
            check_sink(inputs.sink, inputs.query)
            gradients["sink"] = sink_gradient(inputs.sink, out, lse, dout, dlse)
        return None, None, *map(gradients.get, TENSORS[: len(tensors)])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise RuntimeError("dilated_attention has no forward-mode derivative (jvp); use torch.autograd.grad or .backward()")


_record: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, Differentiable).apply
"""`Differentiable.apply` without what torch does there for transforms."""


def learning(inputs: Inputs, options: CallOptions) -> CallOptions:
    """Return the options of a recorded call, with the gradient of a bias. Raises ValueError where positions require one."""
    form, bias = options.bias, inputs.bias
    if bias is None or form is None:
        return options
    check_detached(bias.positions)
    if not bias.weights.requires_grad or form.learned:
        return options
    return options._replace(requires_grad=True, bias=replace(form, learned=True))


def compute(prepared: PreparedCall, inputs: Inputs, options: CallOptions) -> tuple[Tensor, Tensor]:
    """Compute `(out, lse)` by the backend that was chosen; nothing is recorded."""
    if (beyond := first_beyond(inputs, prepared.spans)) >= 0:
        refuse_beyond(prepared.names[beyond], _present(*flat(inputs))[beyond])
    if prepared.is_plain:
        return prepared.backend.forward(inputs, prepared.problem)
    problem, query, cu_seqlens, longest = prepared.problem, inputs.query, inputs.cu_seqlens, options.max_seqlen
    if inputs.given is not None:
        check_values(inputs, problem.is_causal)
    if query.numel() == 0:
        return empty_outputs(query)
    if inputs.key.numel() == 0:
        out, lse = empty_outputs(query)
        out.zero_(), lse.fill_(-torch.inf)
        if inputs.sink is not None:
            add_zero_keys(out, lse, None, inputs.sink)
        return out, lse
    if cu_seqlens is not None and longest is not None and cu_seqlens.device.type == "cuda":
        sequences.assert_lengths(cu_seqlens, longest, query.shape[1])
    backend_inputs = _for_backend(prepared, inputs)
    if prepared.foreign:  # it may have parameters of its own
        with torch._C._AutoDispatchBelowAutograd() if torch.is_grad_enabled() else nullcontext():
            returned = prepared.backend.forward(backend_inputs, problem)
        wanted = dict(zip(("out", "lse"), empty_outputs(query), strict=True))
        out, lse = check_returned(prepared.backend.name, returned, wanted, _present(*flat(inputs)))
    else:
        out, lse = prepared.backend.forward(backend_inputs, problem)
    zero_keys = prepared.zero_keys if cu_seqlens is None else sequences.zero_keys(problem, query, cu_seqlens)
    if zero_keys is not None or inputs.sink is not None:
        add_zero_keys(out, lse, zero_keys, inputs.sink)
    return out, lse


def compute_gradients(
    dout: Tensor, inputs: Inputs, out: Tensor, lse: Tensor, options: CallOptions, key: Hashable | None = None
) -> tuple[Tensor, ...]:
    """Compute `differentiate` by a backend; `key`: the `tensor_key` of all, if it is known."""
    tensors = dout, inputs, out, lse
    prepared = prepare(inputs, options, tensor_key(tensors) if key is None else key, (dout, out, lse))
    if (beyond := first_beyond(tensors, prepared.spans)) >= 0:
        refuse_beyond(prepared.names[beyond], _present(dout, *flat(inputs), out, lse)[beyond])
    if prepared.is_plain:
        return prepared.backend.backward(dout, inputs, out, lse, prepared.problem)
    wanted = [x for name, x in zip(TENSORS, flat(inputs), strict=True) if name in prepared.gradients and x is not None]
    if inputs.given is not None:
        check_values(inputs, prepared.problem.is_causal)
    if inputs.query.numel() == 0 or inputs.key.numel() == 0:
        return tuple(map(torch.zeros_like, wanted))
    arguments = in_rows(dout), _for_backend(prepared, inputs), in_rows(out), lse
    returned = prepared.backend.backward(*arguments, prepared.problem)
    if prepared.foreign:
        names = (f"d{name}" for name in prepared.gradients)
        every = _present(dout, *flat(inputs), out, lse)
        returned = check_returned(prepared.backend.name, returned, dict(zip(names, wanted, strict=True)), every)
    return returned


def _for_backend(prepared: PreparedCall, inputs: Inputs) -> Inputs:
    if prepared.any_copied:
        inputs = inputs._replace(query=in_rows(inputs.query), key=in_rows(inputs.key), value=in_rows(inputs.value))
    if inputs.cu_seqlens is not None:
        inputs = inputs._replace(cu_seqlens=inputs.cu_seqlens.contiguous())
    if inputs.cu_seqlens_k is not None:
        inputs = inputs._replace(cu_seqlens_k=inputs.cu_seqlens_k.contiguous())
    if prepared.problem.dropout_p or inputs.dropout is not None:
        inputs = inputs._replace(dropout=dropout_of(prepared.problem, inputs.dropout))
    return inputs


def _present(*tensors: Tensor | None) -> list[Tensor]:
    return [x for x in tensors if x is not None]


def _gradients(
    dout: Tensor | None, dlse: Tensor | None, inputs: Inputs, out: Tensor, lse: Tensor, options: CallOptions
) -> Sequence[Tensor | None]:
    """Compute gradients through `out` and through `lse`; None for gradients that are 0."""
    gradients = None if dout is None else differentiate(dout, inputs, out, lse, options)
    if dlse is None:
        return [None] * (3 + len(inputs.learned)) if gradients is None else gradients
    dquery, dkey, *others = _through_lse(dlse, inputs, lse, options)
    if gradients is None:
        return dquery, dkey, None, *others
    first_dquery, first_dkey, dvalue, *first = gradients
    return first_dquery + dquery, first_dkey + dkey, dvalue, *(x + y for x, y in zip(first, others, strict=True))


def _through_lse(dlse: Tensor, inputs: Inputs, lse: Tensor, options: CallOptions) -> tuple[Tensor, ...]:
    """Compute gradients of all but value through `lse`, `dlse` and `lse` `(batch, heads, seq)`. Dropout leaves `lse` as it is."""
    query, key = inputs.query, inputs.key
    inputs = inputs._replace(value=key.new_zeros(()).expand(key.shape), dropout=None)
    options = options._replace(dropout_p=0.0)

    def backward(dout: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        dquery, dkey, _, *others = differentiate(dout, inputs, out, lse, options)
        return dquery, dkey, *others

    with without_autocast(query.device.type):
        by_row = dlse.transpose(1, 2), lse.transpose(1, 2)
        rows = max(query.shape[1], key.shape[1])
        return through_lse(*by_row, query, key, options.factor(query), rows, lambda largest: largest, backward)
