"""The kernels under compute-sanitizer, where it is: sixteen small cases.

`python -m dilkit.tools.gpu_day.correctness.sanitizer DEVICE` computes them.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from itertools import product

from dilkit.comm.launch import processes
from dilkit.selection.proving import cases
from dilkit.testing.conformance import check
from dilkit.testing.problems import Case
from dilkit.threads import usable_cores
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, absent, judged

PROGRAM = "compute-sanitizer"
LIMIT = 75
"""Seconds for one backend: it slows down whatever it looks at."""
OPTIONS = ["--report-api-errors", "no", "--print-limit", "5", "--launch-timeout", "0", "--target-processes", "application-only"]
"""Of API calls that fail, torch and CuPy make some on purpose. It is long before torch makes the first of all."""
KERNELS = ("forward", "dquery", "dkeyvalue", "dots")
"""What the names of our kernels contain. torch's are not looked at."""
_LINE = re.compile(r"^=+ (.*(?:SUMMARY|Invalid|Misaligned|[Hh]azard|Race|[Ee]rror|not supported).*)$", re.MULTILINE)
_FOUND = re.compile(r"Invalid|Misaligned|Error: Race|Error: Potential")


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
        names = (word for one in KERNELS for word in ("--kernel-name", f"kernel_substring={one}"))
        command = [path, "--tool", tool, *OPTIONS, *names, sys.executable, "-m", __spec__.name, context.device, name]
        own = dict(PYTORCH_NO_CUDA_MEMORY_CACHING="1") if tool == "memcheck" else {}  # every tensor has bounds of its own
        ended = processes.start_processes([command], [own], threads=usable_cores()).finish(LIMIT)
        if ended.code == processes.LATE:
            yield absent(f"{tool}, {name}", f"had not ended after {LIMIT} seconds")
        else:
            yield _finding(f"{tool}, {name}", ended.text, ended.code)


def _finding(what: str, said: str, code: int) -> Item:
    """What the tool says of our kernels. Their results are checked elsewhere: what it finds is no reason not to time them.

    A tool that does not support the device looks at nothing, and may fail whatever runs in it.
    """
    lines = _LINE.findall(said)
    wrong = [line for line in lines if _FOUND.search(line)]
    computed = re.search(r"^computed (\d+) of", said, re.MULTILINE)
    if not wrong and (computed is None or computed[1] == "0"):
        return absent(what, f"exit status {code}: {(lines or [said.strip()[-300:]])[0]}")
    return judged(what, "; ".join(wrong[:3]), found=(lines or ["nothing"])[-1])


def main(device: str, backend: str) -> int:
    """Compute all cases, and say how many of them were right."""
    results = [check(backend, case, device) for case in small_cases()]
    print(f"computed {sum(result.verdict == 'passed' for result in results)} of {len(results)} cases rightly")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
