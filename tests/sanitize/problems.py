"""The problems of driver.c: a program that runs the C of the CPU kernel over a file of them, without Python.

    write_problems ---> file: problems, and the oracle's results ---> the program that `build` makes ---> problems, wrong

The problems are the conformance list, and longer ones of many tiles and blocks, alone and packed. Only those are searched for
races: their threads share work.
"""

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import numpy as np
import torch

from dilkit import BlockSparse, DilatedSegment, GlobalTokens, Neighborhood, Pattern, SlidingWindow, Strided
from dilkit.backends.native.backend import encode_problem
from dilkit.backends.native.given import given_tables
from dilkit.bias.base import Bias
from dilkit.bias.form import LoweredBias
from dilkit.bias.tables import RelativeTable
from dilkit.inputs import Inputs
from dilkit.op.scores import Scores, packed_scores, scores_of
from dilkit.oracle import oracle_attention, oracle_attention_varlen
from dilkit.problem import DTYPES
from dilkit.testing.packings import PACKED
from dilkit.testing.problems import GIVEN_BLOCKS, PROBLEMS, SCORES, Case
from dilkit.testing.tensors import Tensors, make_tensors

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "backends/native/kernels"
DRIVER = ROOT / "tests/sanitize/driver.c"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Werror")
LENGTHS = 0, 1, 64, 0, 138, 297
OF_SCORES = "float32", "bfloat16"
"""The dtypes of problems with a bias or a softcap, whose code is that of the dtype that sums are in."""
MIXED = Pattern.of(DilatedSegment(128, 2), SlidingWindow(60, 3), GlobalTokens(5), Strided(70))
SCATTERED = Pattern.of(GlobalTokens(range(1, 501, 3)), GlobalTokens([7, 490], "read"), SlidingWindow(1))
"""More global tokens, in more runs, than the kernel takes at a time."""
GRIDS = Pattern.of(
    Neighborhood((9, 8, 7), (3, 5, 3), (2, 1, 2), heads=(0, 1)),
    Neighborhood((12, 42), (7, 9)),
    Neighborhood((12, 42), (5, 25), (3, 2), border="cut"),
    SlidingWindow(9),
)
SHARED = Pattern.of(
    Neighborhood((12, 42), (6, 10), (1, 2), stride=(4, 3), causal=(True, False)),
    Neighborhood((12, 42), (8, 6), causal=(False, True)),
)
ONCE = Pattern.of(*MIXED.branches, BlockSparse.bigbird(24, 21), *GRIDS.branches[:3], overlap="once")
CLASSES = Pattern.of(Strided(9), SlidingWindow(300, 6), SlidingWindow(40, 3, heads=(0, 1)))
LONG = (
    Case(feature="long", variant="nested", pattern=Pattern([128, 256, 512], [1, 2, 4]), seq=701, heads=2, head_dim=24),
    Case(feature="long", variant="odd", pattern=Pattern([150, 330], [1, 3]), seq=701, heads=2, kv_heads=1, head_dim=17),
    Case(feature="long", variant="dense", pattern=Pattern.dense(), seq=500, heads=1, head_dim=40, mask="random"),
    Case(feature="long", variant="kinds", pattern=MIXED, seq=701, heads=2, kv_heads=1, head_dim=17, mask="random"),
    Case(
        feature="long", variant="blocks", pattern=Pattern.of(BlockSparse.bigbird(30, 25, heads=2)), seq=701, heads=2, head_dim=24
    ),
    Case(feature="long", variant="once", pattern=Pattern.longformer(60, 5), seq=701, heads=2, head_dim=17, mask="random"),
    Case(feature="long", variant="bands once", pattern=Pattern.sparse_transformer(20), seq=501, heads=2, head_dim=8),
    Case(feature="long", variant="grids", pattern=GRIDS, seq=504, heads=2, kv_heads=1, head_dim=17, mask="random"),
    Case(feature="long", variant="every kind once", pattern=ONCE, seq=504, heads=2, head_dim=8),
    Case(feature="long", variant="classes", pattern=CLASSES, seq=504, heads=2, kv_heads=1, head_dim=24, batch=2, mask="random"),
    Case(feature="long", variant="shared", pattern=SHARED, seq=504, heads=2, kv_heads=1, head_dim=24),
    Case(feature="long", variant="line", pattern=Pattern.natten((501,), 91, 2), seq=501, heads=1, head_dim=24),
    Case(feature="long", variant="scattered", pattern=SCATTERED, seq=501, heads=2, head_dim=16),
    Case(feature="long", variant="alibi", pattern=MIXED, seq=501, heads=2, kv_heads=1, head_dim=8, bias="alibi", softcap=3.0),
    Case(feature="long", variant="table", pattern=CLASSES, seq=504, heads=2, kv_heads=1, head_dim=8, bias="clipped"),
    Case(feature="long", variant="grid", pattern=GRIDS, seq=504, heads=2, kv_heads=1, head_dim=8, bias="grid"),
    Case(feature="long", variant="rows", pattern=CLASSES, seq=504, heads=2, kv_heads=1, head_dim=8, bias="rows", batch=2),
    Case(
        feature="long", variant="rows on a grid", pattern=GRIDS, seq=504, heads=2, kv_heads=1, head_dim=8, bias="rows on a grid"
    ),
)
LONG_PACKED = tuple(
    replace(case, batch=1, lengths=LENGTHS, seq=sum(LENGTHS), mask="none")
    for case in LONG
    if case.variant in ("nested", "odd", "classes", "rows")
)


def write_problems(path: Path, chosen: Iterable[Case]):
    with path.open("wb") as file:
        for case in chosen:
            write(case, file)


def every_case() -> Iterator[Case]:
    """The conformance list without its exotic values, padded tails and sinks, which are no kernel's; long ones in every dtype.

    Caches and dropout are left out: the driver computes the last rows of every causal problem itself, and drops nothing.
    """
    scores = (case for case in (*SCORES, *GIVEN_BLOCKS) if case.dtype in OF_SCORES)
    listed = (case for case in (*PROBLEMS, *PACKED, *scores) if case.values == "normal" and not case.poisoned)
    yield from (case for case in listed if not (case.zero_keys or case.rows or case.dropout_p or case.sink != "none"))
    for case in (*LONG, *LONG_PACKED):
        for dtype, is_causal in product(_dtypes(case), (False, True)):
            yield replace(case, dtype=dtype, is_causal=is_causal)


def shared_cases() -> Iterator[Case]:
    blocks = next(case for case in GIVEN_BLOCKS if case.variant == "long blocks")
    for i, case in enumerate((*LONG, *LONG_PACKED, blocks)):
        dtypes = _dtypes(case)
        yield replace(case, dtype=dtypes[i // 2 % len(dtypes)], is_causal=i % 2 == 1)


def _dtypes(case: Case) -> tuple[str, ...]:
    return DTYPES if case.bias == "none" else OF_SCORES


def write(case: Case, file: BinaryIO):
    tensors = make_tensors(case)
    problem = case.problem()
    with mock.patch.multiple("dilkit.backends.native.backend", CHUNK_ROWS=96, BLOCK_ROWS=48):
        (batch, _, *sizes), dtype, causal, once, scale, arrays, scores, given, _ = encode_problem(problem)
    mask = tensors.mask
    starts = [0, *accumulate(case.lengths)] if case.lengths else []
    bias, lowered = bias_of(case, tensors)
    positions = None if lowered is None else lowered.positions
    counts = len(arrays.kind), len(starts), mask is not None, 0 if positions is None else len(positions)
    file.write(np.array([batch, case.seq, *sizes, dtype, causal, once, *counts], np.int64).tobytes())
    write_given(given, case, tensors, file)
    softcap, kind, dims, apart, sizes_of_table = scores
    file.write(np.array([kind, dims, apart, *sizes_of_table], np.int64).tobytes())
    file.write(np.array([scale, softcap], np.float64).tobytes())
    file.write(np.array([array.size for array in arrays], np.int64).tobytes())
    for array in arrays:
        file.write(array.tobytes())
    for x in (*tensors.qkv, tensors.dout):
        file.write(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    if mask is not None:
        file.write(mask.numpy().astype(np.uint8).tobytes())
    file.write(np.array(starts, np.int32).tobytes())
    for x in () if lowered is None else lowered[1:]:
        file.write(b"" if x is None else x.detach().numpy().tobytes())
    leaves = [x.detach().double().requires_grad_() for x in tensors.qkv]
    if bias is not None:
        leaves.append(bias.weights.detach().double().requires_grad_())
        bias = bias.with_weights(leaves[3])
    qkv = leaves[:3]
    options = dict(is_causal=case.is_causal, scale=case.scale, bias=bias, softcap=case.softcap or None)
    options |= tensors.given
    if case.lengths:
        out, lse = oracle_attention_varlen(*qkv, case.pattern, case.lengths, **options)
    else:
        out, lse = oracle_attention(*qkv, case.pattern, key_padding_mask=mask, **options)
    for x in (out, lse, *torch.autograd.grad(out, leaves, tensors.dout.double())):
        file.write(x.detach().contiguous().numpy().astype(np.float64).tobytes())


def write_given(branch: int, case: Case, tensors: Tensors, file: BinaryIO):
    """Append the tables of what a call gives, those of queries and of keys in turn; `branch` is -1 where there are none."""
    if not tensors.given:
        file.write(np.array([-1, 0, 0, 0, 0], np.int64).tobytes())
        return
    inputs = Inputs(*tensors.qkv, **tensors.given)
    sides = [given_tables(inputs, case.problem(), by_key) for by_key in (False, True)]
    parts = []
    for number in range(len(sides[0].table) - 1):
        side = sides[number % 2]
        first, last = side.table[number : number + 2]
        runs = side.first_columns[first : last + 1]
        parts.append((side.rows_end[first:last], np.diff(runs), side.columns[runs[0] : runs[-1]]))
    ends, counts, columns = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    table = np.cumsum([0, *(len(part[0]) for part in parts)])
    file.write(np.array([branch, sides[0].batches, sides[0].heads, len(ends), len(columns)], np.int64).tobytes())
    for array in (table, ends, np.cumsum([0, *counts]), columns):
        file.write(array.astype(np.int64).tobytes())


def bias_of(case: Case, tensors: Tensors) -> tuple[Bias | None, LoweredBias | None]:
    bias = tensors.bias
    if isinstance(bias, RelativeTable) and bias.buckets is not None:
        bias = RelativeTable(bias.table[:, bias.buckets].contiguous())
    if bias is None:
        return None, None
    options = bias, None, tensors.query, case.pattern, case.kv_heads or case.heads
    scores: Scores
    if case.lengths:
        scores = packed_scores(*options, torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32), case.seq)
    else:
        scores = scores_of(*options)
    return bias, scores.bias


def build(program: Path, compiler: str, flags: Sequence[str], codes: Mapping[str, Sequence[str]]):
    """Compile the driver and the kernel, once for each of `codes` with its flags; a warning is an error."""
    common = [compiler, "-std=gnu11", *WARNINGS, *flags, "-pthread", f"-I{KERNELS}"]
    common += [f"-DHAVE_{code.upper()}" for code in codes if code != "generic"]
    objects = [program.with_name(f"{code}.o") for code in codes]
    commands = [
        [*common, *own, "-c", KERNELS / f"{code}.c", "-o", target]
        for target, (code, own) in zip(objects, codes.items(), strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(subprocess.run, check=True), commands))
    subprocess.run([*common, KERNELS / "work_queue.c", DRIVER, *objects, "-o", program, "-lm", "-ldl"], check=True)
