"""Prints the instructions in the PTX that a backend launches, and how often each is written, the most frequent first.

    PYTHONPATH=tests python tests/helpers/launches/opcodes.py triton 9.0
    PYTHONPATH=tests python tests/helpers/launches/opcodes.py numba 8.0 --without known.txt

`known.txt`: lines that end with an instruction, such as a machine for PTX has, which are then left out. The launches are those of
both passes over several patterns, in every dtype of the backend and two head_dims: of one group of branches and of a
later one, with windows, with a mask, causal and not; Triton's with a softcap and biases too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from helpers.launches.launch import Launch, opcodes

from dilkit import GlobalTokens, Pattern, SlidingWindow
from dilkit.backends.tiles.backend import TiledBackend
from dilkit.bias.form import BiasForm, LoweredBias
from dilkit.device import Device
from dilkit.inputs import Inputs
from dilkit.problem import Problem

HEAD_DIMS = (16, 64)
SEQ, HEADS, KV_HEADS = 300, 4, 2
SEGMENTS = Pattern([256, 300], [1, 64])
RELATIONS = Pattern.of(SlidingWindow(40), GlobalTokens(3))
PLAIN: tuple[dict[str, Any], ...] = (
    dict(pattern=SEGMENTS),
    dict(pattern=SEGMENTS, is_causal=True, key_padding_mask=True),
    dict(pattern=Pattern([256, 300], [1, 2], overlap="once"), is_causal=True),
)
RICH: tuple[dict[str, Any], ...] = (
    dict(pattern=RELATIONS, is_causal=True, key_padding_mask=True),
    dict(pattern=SEGMENTS, softcap=30.0),
    dict(pattern=SEGMENTS, bias=BiasForm(learned=True)),
    dict(pattern=SEGMENTS, bias=BiasForm(2, (5, 1), placed=True, learned=True)),
)
"""What `numba_cuda` refuses."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("backend", choices=("triton", "numba"))
    parser.add_argument("capability", help="such as 8.0")
    parser.add_argument("--without", type=Path, help="a file of instructions that are left out")
    args = parser.parse_args()
    major, minor = map(int, args.capability.split("."))
    known = {line.split()[-1] for line in args.without.read_text().splitlines() if line.strip()} if args.without else set()
    written: Counter[str] = Counter()
    for ptx in {launch.ptx for launch in launches(args.backend, (major, minor))}:
        written.update(opcodes(ptx))
    for name, count in written.most_common():
        if name not in known:
            print(f"{count:7d} {name}")
    return 0


def launches(name: str, capability: tuple[int, int]) -> list[Launch]:
    """All launches of both passes over the problems."""
    redirected = import_module(f"helpers.launches.from_{name}").redirected  # only one of them may be installed
    noted: list[Launch] = []
    with redirected(capability, noted.append) as backend:
        for problem in problems(backend):
            both_passes(backend, problem)
    return noted


def problems(backend: TiledBackend) -> Iterator[Problem]:
    """Those of the lists that the backend computes."""
    sizes = dict(seq=SEQ, heads=HEADS, kv_heads=KV_HEADS, batch=2, requires_grad=True)
    for fields in PLAIN + RICH:
        for dtype in sorted(backend.limits.dtypes):
            for head_dim in HEAD_DIMS if fields in PLAIN else (32,):
                problem = Problem(dtype=dtype, head_dim=head_dim, **sizes, **fields)
                if not backend.refusals(replace(problem, device=Device.assume("sm_90"))):
                    yield problem


def both_passes(backend: TiledBackend, problem: Problem) -> None:
    dtype, form = getattr(torch, problem.dtype), problem.bias
    q, k, v = (torch.zeros(2, SEQ, heads, problem.head_dim, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask = torch.zeros(2, SEQ, dtype=torch.bool) if problem.key_padding_mask else None
    bias = None if form is None else LoweredBias(form, torch.zeros(HEADS, form.entries), torch.zeros(2, SEQ, form.dims))
    inputs = Inputs(q, k, v, key_padding_mask=mask, bias=bias)
    out, lse = backend.forward(inputs, problem)
    backend.backward(out, inputs, out, lse, problem)


if __name__ == "__main__":
    sys.exit(main())
