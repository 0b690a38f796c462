"""The kernels under compute-sanitizer, where it is: sixteen small cases.

`python -m dilkit.tools.gpu_day.right.sanitizer DEVICE` computes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from dilkit.selection.proving import cases
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, absent, judged

PROGRAM, FOUND = "compute-sanitizer", 9
"""The tool, and the exit code that it is asked for where it finds something."""
LIMIT = 75
"""Seconds for one backend: it slows down whatever it looks at."""
_LINE = re.compile(r"^=+ (.*(?:SUMMARY|Invalid|hazard|Race|Error|error|not supported).*)$", re.MULTILINE)


def small_cases() -> list[Case]:
    """Sixteen: every kind of call in fp32 and in bf16."""
    return [case for dtype, varlen in product(("float32", "bfloat16"), (False, True)) for case in cases(dtype, 64, True, varlen)]


def sanitized(context: Context, tool: str) -> Iterator[Item]:
    """What a tool finds in each of our backends."""
    path = shutil.which(PROGRAM)
    if path is None or context.kind != "cuda":
        yield absent(tool, "no CUDA device" if path else f"{PROGRAM} is not on the path")
        return
    for name in backends.ours(context):
        command = [path, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5", sys.executable, "-m"]
        command += [__spec__.name, context.device, name]
        own = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1") if tool == "memcheck" else {}  # every tensor has bounds of its own
        how: dict[str, Any] = dict(capture_output=True, text=True, errors="replace", env={**os.environ, **own}, timeout=LIMIT)
        try:
            done = subprocess.run(command, check=False, **how)
        except subprocess.TimeoutExpired:
            yield absent(f"{tool}, {name}", f"had not ended after {LIMIT} seconds")
            continue
        said = _LINE.findall(done.stdout + done.stderr)
        if done.returncode not in (0, FOUND):
            yield absent(f"{tool}, {name}", f"exit status {done.returncode}: {(said or [done.stderr.strip()[-300:]])[0]}")
            continue
        yield judged(f"{tool}, {name}", "; ".join(said[:3]) if done.returncode else "", name, found=(said or ["nothing"])[-1])


def main(device: str, backend: str) -> int:
    """Compute all cases; 1 where one is wrong."""
    results = [check(backend, case, device) for case in small_cases()]
    return int(any(result.verdict in ("failed", "broken") for result in results))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
