"""What is worked out once for all calls with the same facts: tensors checked, a backend chosen, and what its results lack."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from dilkit import plan
from dilkit.backend import Backend
from dilkit.device import probe
from dilkit.op import boundary
from dilkit.op.schema import asking_for, asks_for_backends, backends_asked, decode_call, dropout_asked, scores_asked
from dilkit.op.zero_keys import ZeroKeys, zero_keys_of
from dilkit.problem import Problem
from dilkit.selector import State, requested_at, requested_backends, select, state


@dataclass(frozen=True)
class PreparedCall:
    """What was chosen and worked out for calls with the same facts.

    `foreign`: the backend is none of dilkit's own. `needs_layout`: each call gives the blocks of a branch. `zero_keys`: those
    that rows see at the end of the forward pass, if any do. `is_plain`: with no tensors but these, the backend is given them as
    they are, and returns the results. `backward_call`: the text of the backward pass, which may run in another thread and outside
    of `use_backend`: it names the backends that the forward pass asked for.
    """

    backend: Backend
    problem: Problem
    admission: boundary.Admission
    foreign: bool
    needs_layout: bool
    zero_keys: ZeroKeys | None
    is_plain: bool
    backward_call: str
    nbytes: int


def prepare(
    names: tuple[str, ...], tensors: tuple[Tensor, ...], facts: Hashable, scale: float, call: str, longest: int = 0
) -> PreparedCall:
    """What the pattern cache has for these tensors: one look-up by their `facts`, that is shapes, strides, dtypes and devices.

    `longest`: what a packed call is prepared for, as `sequences.longest` says; 0 for one that is not packed.
    """
    moment = state()
    key = "call", moment, names, facts, scale, call, longest
    return plan.cached(key, _made, moment, names, tensors, scale, call, longest)


def _made(
    moment: State, names: tuple[str, ...], tensors: tuple[Tensor, ...], scale: float, call: str, longest: int
) -> PreparedCall:
    """Check the tensors, and choose the backend: one of those that the call requests, else of those that held at that moment."""
    default = () if asks_for_backends(call) else requested_at(moment)
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
    if not (is_causal or longest):  # causality and caches may yet see a token; packed sequences are of any lengths
        pattern.check_tokens(seq)
    asked = backends_asked(call)
    backend = select(problem, requested_backends(asked.split(",")) if asked else default)
    foreign = not type(backend).__module__.startswith("dilkit.backends.")
    padded = pattern.tail == "zeros" and not is_causal and names is boundary.INPUTS and not longest
    zero_keys = zero_keys_of(pattern, seq, heads, problem.kv_heads, query, range(seq)) if padded else None
    nbytes = _TEXTS * len(call) + _TENSOR_BYTES * len(tensors) + (0 if zero_keys is None else zero_keys.nbytes)
    given = pattern.given_blocks is not None
    odd = foreign or given or admission.any_copied or zero_keys is not None or dropout_asked(call) > 0 or bias is not None
    plain = not odd and query.numel() > 0
    asking = asking_for(call, ",".join(default)) if default else call
    return PreparedCall(backend, problem, admission, foreign, given, zero_keys, plain, asking, nbytes)


_TEXTS = 4
"""The key has the call as text, so has the backward pass, and its pattern has another text and the branches."""
_TENSOR_BYTES = 400
"""What is kept of each tensor takes about as much."""
