"""Packages for dilated attention, and one for neighbourhood attention, as implementations. All of them are optional.

None is loaded before it is asked for. Whether one can compute here is found out by asking it to compute something tiny.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dilkit.pattern import Pattern
from dilkit.problem import Problem
from dilkit.tools.console.text import error_line
from dilkit.tools.measure.implementation import Implementation, Inputs
from dilkit.tools.measure.peers import functions as peer_functions

_TINY = 64
"""Tokens of the problem that a package is tried with."""

Attend = Callable[[Inputs, Problem], Tensor]


def version(package: str) -> str | None:
    """The installed version of a package, None where it is not installed from one."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing(module: str, way_out: str) -> str | None:
    """Why `module` cannot be had, with the way out; None when it can. It is imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f"module {error.name}: not installed; {way_out}"
    except Exception as error:
        return f"module {module}: cannot be imported: {error_line(error)}; {way_out}"
    return None


def _tried(attend: Attend, problem: Problem) -> tuple[str, ...]:
    """What the package itself says to a tiny problem of this kind: nothing when it computes it."""
    tiny = replace(problem, batch=1, seq=_TINY, pattern=Pattern([_TINY], [1]))
    try:
        inputs = Inputs.random(tiny)
        with torch.no_grad():
            attend(inputs, tiny)
    except Exception as error:
        where = f"{problem.dtype} on {problem.device.type}"
        return (f"{where}: {error_line(error)}",)
    return ()


def _unsupported(problem: Problem) -> list[str]:
    """What no package of these takes."""
    asked = {
        "key_padding_mask: not supported": problem.key_padding_mask,
        "grouped heads: not supported": problem.kv_heads != problem.heads,
        f"scale {problem.scale:g}: not supported; head_dim ** -0.5 is built in": problem.scale != problem.head_dim**-0.5,
        "a shard of heads: not supported": problem.pattern.head_shard is not None,
    }
    return [reason for reason, wanted in asked.items() if wanted]


def _torchscale(inputs: Inputs, problem: Problem) -> Tensor:
    """The attention of torchscale's module by itself: its projections are replaced by the identity."""
    package = importlib.import_module("torchscale.component.dilated_attention")
    module = _torchscale_module(package.DilatedAttention, problem)
    flat = (x.flatten(2) for x in (inputs.query, inputs.key, inputs.value))
    out, _ = module(*flat, is_causal=problem.is_causal)
    found: Tensor = out.unflatten(2, (problem.heads, problem.head_dim))
    return found


@lru_cache(maxsize=8)
def _torchscale_module(kind: Callable[..., Any], problem: Problem) -> Any:
    lengths, rates = problem.pattern.segment_lengths, problem.pattern.dilation_rates
    options = dict(flash_attention=True, seq_parallel=False, xpos_rel_pos=False, multiway=False, layernorm_eps=1e-5)
    args = SimpleNamespace(segment_length=[min(w, problem.seq) for w in lengths], dilated_ratio=list(rates), **options)
    module = kind(args, problem.heads * problem.head_dim, problem.heads, self_attention=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        setattr(module, name, torch.nn.Identity())
    return module


def _torchscale_refusals(problem: Problem) -> tuple[str, ...]:
    pattern, found = problem.pattern, _unsupported(problem)
    if pattern.heads is not None:
        found.append("head ranges: not supported")
    if pattern.overlap != "count":
        found.append("overlap 'once': counts a key once for each branch")
    for branch in pattern.branches:
        length, rate = branch.segment_length, branch.dilation_rate
        if length < problem.seq and length % rate:
            found.append(
                f"dilation rate {rate}: must divide the segment length {length}, or torchscale puts rows in wrong places"
            )
    if not found and problem.device.type == "cpu" and _torchscale_kernel() is None:
        return ("device cpu: torchscale calls flash-attn or xformers, which it loads on CUDA alone",)
    return tuple(found) or _tried(_torchscale, problem)


def _torchscale_kernel() -> Any:
    return getattr(importlib.import_module("torchscale.component.multihead_attention"), "flash_attn_func", None)


def _by_blocks(pattern: Pattern) -> Pattern:
    return Pattern(pattern.segment_lengths, pattern.dilation_rates, "block")


def _head_split(inputs: Inputs, problem: Problem) -> Tensor:
    package = importlib.import_module("dilated_attention_pytorch.dilated_attention")
    module = package.DilatedAttention(problem.pattern.segment_lengths, problem.pattern.dilation_rates)
    out: Tensor = module(inputs.query, inputs.key, inputs.value, is_causal=problem.is_causal)
    return out


def _head_split_refusals(problem: Problem) -> tuple[str, ...]:
    found, branches = _unsupported(problem), len(problem.pattern.branches)
    for length in problem.pattern.segment_lengths:
        if problem.seq % length:
            found.append(f"seq {problem.seq}: must be a multiple of segment length {length}")
    if problem.heads % branches:
        found.append(f"heads {problem.heads}: must be a multiple of the {branches} branches; else some heads are left out")
    return tuple(found) or _tried(_head_split, problem)


def _neighbourhood(inputs: Inputs, problem: Problem) -> Tensor:
    size, dilation = peer_functions.window(problem)
    options: dict[str, Any] = dict(kernel_size=size, dilation=dilation, is_causal=problem.is_causal, scale=problem.scale)
    run = importlib.import_module("natten.functional").na1d
    out: Tensor = run(inputs.query, inputs.key, inputs.value, **options)
    return out


def _neighbourhood_refusals(problem: Problem) -> tuple[str, ...]:
    found = [reason for reason in _unsupported(problem) if not reason.startswith("scale")]
    size, _ = peer_functions.window(problem)
    if size < 3:
        found.append(f"pattern: a query sees {size} key on average; a neighbourhood has 3 at least")
    return tuple(found) or _tried(_neighbourhood, problem)


PACKAGES = {
    "torchscale": Implementation(
        "torchscale",
        "peer",
        "torchscale's DilatedAttention from a checkout of it, without its projections",
        _torchscale,
        _torchscale_refusals,
        _by_blocks,
        computes=f"with offset='block', {peer_functions.AS_PUBLISHED}",
        function=partial(peer_functions.longnet, offset="block"),
        absent=partial(
            missing,
            "torchscale.component.dilated_attention",
            "its releases leave that module out, so put a checkout of microsoft/torchscale on PYTHONPATH, and einops beside it",
        ),
    ),
    "dilated-attention-pytorch": Implementation(
        "dilated-attention-pytorch",
        "peer",
        "DilatedAttention of the package dilated-attention-pytorch",
        _head_split,
        _head_split_refusals,
        computes=peer_functions.HEAD_SPLIT,
        function=peer_functions.head_split,
        absent=partial(
            missing,
            "dilated_attention_pytorch.dilated_attention",
            "pip install --no-deps dilated-attention-pytorch torchscale xformers einops (by itself pip would put in torch 2.0)",
        ),
    ),
    "natten": Implementation(
        "natten",
        "peer",
        "NATTEN's na1d, dilated neighbourhood attention: another pattern, of as much work",
        _neighbourhood,
        _neighbourhood_refusals,
        computes=peer_functions.NEIGHBOURHOOD,
        function=peer_functions.neighbourhood,
        absent=partial(missing, "natten.functional", "pip install natten, which needs a build for CUDA"),
    ),
}
"""The packages by name."""
