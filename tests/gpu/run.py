"""A GPU day, `make gpu-day DIR=day`: is it right, how fast is it, what does the automatic choice get wrong.

One call takes nine minutes at most, and another one goes on where it ended.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.gpu_calls import TORCHS, all_kernels, compile_all  # noqa: E402
from helpers.gpu_day import KIND, code_digest  # noqa: E402

from dilkit.device import cuda_count  # noqa: E402
from dilkit.threads import usable_cores  # noqa: E402
from dilkit.tools.console.arguments import assumed_device  # noqa: E402
from dilkit.tools.report.files import publish  # noqa: E402
from dilkit.tools.results.file import read_json, read_result  # noqa: E402
from dilkit.tools.results.rows import RowsResult  # noqa: E402

SECONDS = {"tests": 300, "speed": 150, "preferences": 90}
"""Seconds of each stage; a later one gets what an earlier one leaves."""
GRACE, NOTHING_LEFT = 10, 5
"""Seconds for what was interrupted to write its results; the exit code of pytest where every test passed before."""
PARTS = {"bfloat16": ("cupy_raw", "triton"), "launches": ("cupy_raw",), "float32": ("cupy_raw",)}
"""By a word in the names of its steps, a part of the GPU suite with our backends in it. In fp32 Triton is much slower."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; 0, 1 where something is wrong or left."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-day"), help="of the results (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="the tests on the CPU, at small sizes: nothing of it is a GPU's")
    compiled = "compile all kernels for such a GPU, which need not be here, into the folder of DILKIT_CUDA_CACHE, and end"
    parser.add_argument("--compile", type=assumed_device, metavar="sm_90", help=compiled)
    args = parser.parse_args(argv)
    if args.compile:
        refused = compile_all(all_kernels(args.compile.capability), args.compile.capability)
        print("\n".join(refused) or "all kernels are compiled")
        return int(bool(refused))
    if not args.rehearse and not cuda_count():
        parser.error("torch sees no CUDA device; --rehearse shows on the CPU what it does")
    folder, tests = args.folder.absolute(), args.folder.absolute() / "gpu-day.json"
    if tests.exists() and read_result(tests, RowsResult, KIND).facts.get("code") != code_digest():
        parser.error(f"{args.folder} is of other code; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    end, codes = time.monotonic(), set[int]()
    for stage in ["tests"] if args.rehearse else SECONDS:
        end += SECONDS[stage]
        commands = commands_of_tests(tests, args.rehearse) if stage == "tests" else commands_of_suites(stage, folder, tests)
        codes |= {limited(command, end - time.monotonic()) for command in commands}
    if tests.exists():
        publish(read_result(tests, RowsResult, KIND), folder, tests.stem, "A GPU day", False)
    return int(bool(codes - {0, NOTHING_LEFT}))


def commands_of_tests(file: Path, rehearse: bool) -> Iterator[list[str]]:
    """Yield the commands of the tests: kernels first, for whose compilation others would wait."""
    base = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--gpu-day", str(file)]
    if rehearse:
        yield [*base, "-n", "1", "--gpu-device", "cpu", "tests/gpu"]
    else:
        yield [*base, "-n", "1", "tests/gpu/test_kernels.py"]
        yield [*base, "-n", str(min(16, usable_cores())), "tests/gpu"]


def commands_of_suites(stage: str, folder: Path, tests: Path) -> Iterator[list[str]]:
    """Yield the commands of the suites that are not complete, without backends that failed a test."""
    rows = read_result(tests, RowsResult, KIND).rows if tests.exists() else ()
    failed = "\n".join(f"{row.case['name']} {row.reasons}" for row in rows if row.verdict == "failed")

    def right(*names):
        return [name for name in names if not re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", failed)]

    if stage == "preferences":
        yield from command_of("preferences", folder / stage, right("cupy_raw", "triton", "sdpa"))
        return
    for word, ours in PARTS.items():
        yield from command_of("gpu", folder / f"gpu-{word}", ["automatic", *right(*ours, *TORCHS)], "--rows", word)


def command_of(suite: str, folder: Path, backends: Sequence[str], *options: str) -> Iterator[list[str]]:
    """Yield the command that runs a suite, or goes on with it; none where it is complete."""
    command = [sys.executable, "-m", "dilkit", "bench", "--suite", suite, "--out", str(folder), "--backend", ",".join(backends)]
    file = folder / "suite.json"
    if not file.exists() or read_json(file)["interrupted"]:
        yield [*command, *options, *(["--resume"] if file.exists() else [])]


def limited(command: list[str], seconds: float) -> int:
    """Run a command for so many seconds at most, then interrupt it with all that it started; return its exit code."""
    if seconds < 2 * GRACE:
        print(f"no time is left for {' '.join(command)}", file=sys.stderr)
        return 1
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(seconds - GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
