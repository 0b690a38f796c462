"""Builds the C of the CPU kernel with AddressSanitizer and UBSan, then with ThreadSanitizer, and runs it over the problems.

    python tests/sanitize/run.py [--if-possible]

The problems, and what the oracle says of them, are written to a file that the program driver.c reads: the conformance list, and
longer ones of many tiles and blocks. The code for AVX-512 is built too, without that machine's instructions: the compiler splits
the wide vectors. With --if-possible, a compiler without the sanitizers is no failure.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import numpy as np
import torch

from dilkit import Pattern
from dilkit.backends.native.backend import encode_problem
from dilkit.oracle import oracle_attention
from dilkit.testing.problems import PROBLEMS, Case
from dilkit.testing.tensors import make_tensors

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "backends/native/kernels"
X86 = platform.machine().lower() in ("x86_64", "amd64")
CODES = {"generic": []} | ({"avx2": ["-mavx2", "-mfma"], "avx512bf16": ["-Wno-psabi"]} if X86 else {})
SANITIZERS = {"address and undefined": "address,undefined", "thread": "thread"}
LONG = (
    Case(feature="long", variant="nested", pattern=Pattern([128, 256, 512], [1, 2, 4]), seq=701, heads=2, head_dim=24),
    Case(feature="long", variant="odd", pattern=Pattern([150, 330], [1, 3]), seq=701, heads=2, kv_heads=1, head_dim=17),
    Case(feature="long", variant="dense", pattern=Pattern.dense(), seq=500, heads=1, head_dim=40, mask="random"),
)


def main() -> int:
    """0 when every build ran without a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--if-possible", action="store_true", help="a compiler without the sanitizers is no failure")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = Path(folder, "problems")
        with problems.open("wb") as file:
            for case in cases():
                write(case, file)
        codes = [run(Path(folder), name, flag, problems, args.if_possible) for name, flag in SANITIZERS.items()]
    return max(codes)


def cases() -> Iterator[Case]:
    """The conformance list without its exotic values, then long ones in every dtype, causal and not."""
    yield from (case for case in PROBLEMS if case.values == "normal")
    for case in LONG:
        for dtype in ("float32", "float64", "bfloat16", "float16"):
            for is_causal in (False, True):
                yield replace(case, dtype=dtype, is_causal=is_causal)


def write(case: Case, file: BinaryIO) -> None:
    """Append a problem as driver.c reads it; blocks and chunks are short, so that there are several of each."""
    tensors = make_tensors(case)
    problem = case.problem()
    with mock.patch.multiple("dilkit.backends.native.backend", CHUNK_ROWS=64, BLOCK_ROWS=64):
        sizes, dtype, causal, once, scale, *arrays = encode_problem(problem)
    mask = tensors.mask
    counts = len(arrays[0]), len(arrays[3]), mask is not None, 0
    file.write(np.array([*sizes, dtype, causal, once, *counts], np.int64).tobytes())
    file.write(np.array([scale], np.float64).tobytes())
    for array in arrays:
        file.write(np.ascontiguousarray(array).tobytes())
    for x in (*tensors.qkv, tensors.dout):
        file.write(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    if mask is not None:
        file.write(mask.numpy().astype(np.uint8).tobytes())
    qkv = [x.detach().double().requires_grad_() for x in tensors.qkv]
    options = dict(is_causal=case.is_causal, key_padding_mask=mask, scale=case.scale)
    out, lse = oracle_attention(*qkv, case.pattern, **options)
    for x in (out, lse, *torch.autograd.grad(out, qkv, tensors.dout.double())):
        file.write(x.detach().contiguous().numpy().astype(np.float64).tobytes())


def run(folder: Path, name: str, flag: str, problems: Path, if_possible: bool) -> int:
    """Build with one set of sanitizers, and run; the exit code."""
    flags = [
        "-std=gnu11",
        "-g",
        "-O2",
        f"-fsanitize={flag}",
        "-fno-sanitize-recover=all",
        "-pthread",
        f"-I{KERNELS}",
    ]
    flags += [f"-DHAVE_{code.upper()}" for code in CODES if code != "generic"]
    if subprocess.run(
        ["gcc", *flags, "-x", "c", "-", "-o", folder / "empty"], input=b"int main(void) { return 0; }", check=False
    ).returncode:
        print(f"{name}: not run: gcc cannot link -fsanitize={flag} here (Debian: libasan8, libtsan2, libubsan1)", flush=True)
        return 0 if if_possible else 2
    objects = []
    for code, own in CODES.items():
        objects.append(folder / f"{code}.o")
        subprocess.run(["gcc", *flags, *own, "-c", KERNELS / f"{code}.c", "-o", objects[-1]], check=True)
    sources = [KERNELS / "work_queue.c", ROOT / "tests/sanitize/driver.c"]
    subprocess.run(["gcc", *flags, *sources, *objects, "-o", folder / "driver", "-lm", "-ldl"], check=True)
    print(f"{name}: ", end="", flush=True)
    return subprocess.run([folder / "driver", problems], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
