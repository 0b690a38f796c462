"""A GPU day, `make gpu-day DIR=day`: is it right, how fast is it, what does the automatic choice get wrong.

One call takes nine minutes at most, and another one goes on where it ended.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from helpers.gpu_calls import PATH, all_kernels, compile_all  # noqa: E402
from helpers.gpu_day import CODE, KIND, files_digest  # noqa: E402
from helpers.stored_oracle import StoredOracle, store  # noqa: E402
from plan import CALL, PLAN, Step, lines  # noqa: E402

from dilkit import environment  # noqa: E402
from dilkit.device import cuda_count  # noqa: E402
from dilkit.testing.problems import LARGE  # noqa: E402
from dilkit.threads import usable_cores  # noqa: E402
from dilkit.tools.console.arguments import assumed_device  # noqa: E402
from dilkit.tools.report.files import publish  # noqa: E402
from dilkit.tools.results.file import read_json, read_result  # noqa: E402
from dilkit.tools.results.rows import RowsResult  # noqa: E402

GRACE, LEAST = 5, 10
"""Seconds for what was interrupted to write its results; the seconds with which nothing is begun."""
RIGHT = (0, 5)
"""Exit codes of pytest: all tests passed, or had passed before."""
REHEARSED = 120
"""Seconds of each step of a rehearsal: no time is a GPU's, and the machine may be busy."""
KERNELS, ORACLE = "prepared/kernels", "prepared/oracle.npz"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-day"), help="of the results (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="all steps on the CPU, at small sizes: nothing of it is a GPU's")
    parser.add_argument("--seconds", type=int, default=CALL, help="of this call (default %(default)s)")
    parser.add_argument("--plan", action="store_true", help="print the steps with their seconds, and end")
    prepared = "put the kernels for such a GPU, which need not be here, and the oracle's results into the folder, and end"
    parser.add_argument("--prepare", type=assumed_device, metavar="sm_90", help=prepared)
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    if args.plan:
        print("\n".join(lines({})))
        return 0
    if args.prepare:
        return prepare(folder, args.prepare.capability)
    if not args.rehearse and not cuda_count():
        parser.error("torch sees no CUDA device; --rehearse shows on the CPU what it does")
    folder.mkdir(parents=True, exist_ok=True)
    unpack(folder)
    if (folder / KERNELS).is_dir():
        os.environ.setdefault(environment.CUDA_CACHE.name, str(folder / KERNELS))
    day = Day(folder, args.rehearse)
    day.run(args.seconds)
    if (tests := folder / "gpu-day.json").exists():
        publish(read_result(tests, RowsResult, KIND), folder, tests.stem, "A GPU day", False)
    print("\n".join(lines(day.took)))
    return int(bool(day.left))


def prepare(folder: Path, capability: tuple[int, int]) -> int:
    kernels, archive = folder / KERNELS, folder / f"{KERNELS}.zip"
    unpack(folder)
    kernels.mkdir(parents=True, exist_ok=True)
    os.environ[environment.CUDA_CACHE.name] = str(kernels)
    if not StoredOracle(folder / ORACLE, "cpu").cases:  # an earlier call may have been interrupted after minutes
        store(folder / ORACLE, LARGE)
    refused = compile_all(all_kernels(capability), capability)
    shutil.make_archive(str(kernels), "zip", kernels)
    shutil.rmtree(kernels)
    size = archive.stat().st_size + (folder / ORACLE).stat().st_size
    print("\n".join(refused) or f"all kernels are compiled; {archive.parent} has {size / 1e6:.1f} MB")
    return int(bool(refused))


def unpack(folder: Path):
    """Unpack prepared kernels, if there are any, where they are not unpacked."""
    if (archive := folder / f"{KERNELS}.zip").exists() and not (folder / KERNELS).exists():
        shutil.unpack_archive(archive, folder / KERNELS)


class Day:
    """The steps of a folder: `took` says what came of each, `left` names those that are not done or found something wrong.

    steps.json holds the code with which a step began, and its exit code: with other code it is run again.
    """

    def __init__(self, folder: Path, rehearse: bool):
        self.folder, self.rehearse, self.tests = folder, rehearse, folder / "gpu-day.json"
        self.took, self.left = dict[str, str](), list[str]()
        self.file, self.code = folder / "steps.json", files_digest(*CODE)
        self.steps = json.loads(self.file.read_text()) if self.file.exists() else {}

    def run(self, seconds: float = CALL):
        """Run what is not done, each step until its own seconds and those of all steps before it are over."""
        end = time.monotonic()
        last = end + (seconds if not self.rehearse else len(PLAN) * REHEARSED)
        for step in PLAN:
            end += step.seconds if not self.rehearse else REHEARSED
            start, self.took[step.name] = time.monotonic(), "before" if self.done(step) else "absent"
            if not self.done(step) and (command := self.command(step)):
                if "--resume" not in command:  # what is there is of other code, which a later call would take for this one's
                    self.suite_file(step).unlink(missing_ok=True)
                self.keep(step, None)
                code = limited(command, min(end, last) - start)
                self.keep(step, code)
                ended = "deadline" if code is None else f"exit code {code}" if code else "done"
                self.took[step.name] = f"{time.monotonic() - start:.0f} s, {ended}"
            if self.took[step.name] != "absent" and not (self.done(step) and self.steps[step.name]["ended"] in RIGHT):
                self.left.append(step.name)

    def keep(self, step: Step, code: int | None):
        self.steps[step.name] = dict(code=self.code, ended=code)
        self.file.write_text(json.dumps(self.steps, indent=1))

    def done(self, step: Step) -> bool:
        """True if a step ended with this code: tests that are right, or a suite that is complete."""
        known, file = self.steps.get(step.name, {}), self.suite_file(step)
        ended = file.exists() and not read_json(file)["interrupted"] if step.suite else known.get("ended") in RIGHT
        return known.get("code") == self.code and ended

    def suite_file(self, step: Step) -> Path:
        return self.folder / step.name.replace(" ", "-") / "suite.json"

    def command(self, step: Step) -> list[str]:
        if step.tests:
            return self.of_tests(step)
        file, words = self.suite_file(step), ["--rows", step.words] if step.words else []
        if file.exists() and self.steps.get(step.name, {}).get("code") == self.code:
            words.append("--resume")
        if self.rehearse:
            return [sys.executable, "-m", "helpers.small_suites", step.suite, str(file.parent), *words]
        backends = [name for name in step.backends if self.right(name)]
        command = [sys.executable, "-m", "dilkit", "bench", "--suite", step.suite, "--out", str(file.parent), *words]
        return [*command, "--backend", ",".join(backends)] if backends else []

    def of_tests(self, step: Step) -> list[str]:
        """Return the command of tests, where warnings are no errors: other versions of packages warn of other things."""
        workers = 1 if self.rehearse else min(step.workers, usable_cores())
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "pytest", "-q", "-W", "default", "-m", "gpu", "tests/gpu"]
        command += ["-n", str(workers), "--gpu-day", str(self.tests), "-k", step.tests]
        command += ["--gpu-oracle", str(self.folder / ORACLE)] if (self.folder / ORACLE).exists() else []
        return [*command, *(["--gpu-device", "cpu"] if self.rehearse else [])]

    def right(self, backend: str) -> bool:
        """False for a backend that a failed test names, or says in its reasons."""
        rows = read_result(self.tests, RowsResult, KIND).rows if self.tests.exists() else ()
        failed = "\n".join(f"{row.case['name']} {row.reasons}" for row in rows if row.verdict == "failed")
        return not re.search(rf"(?<![\w:]){re.escape(backend)}(?![\w:])", failed)


def limited(command: list[str], seconds: float) -> int | None:
    """Run a command for so many seconds at most, then interrupt it with all that it started; its exit code, None after that."""
    if seconds < LEAST:
        return None
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, env=os.environ | PATH)
    try:
        return process.wait(seconds - GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
