"""Runs what must pass before a change goes in: at most half an hour on two cores. Asks nothing and reads no input.

1. `make test` as a newcomer has it (`newcomer.py`), then a sample of the tests in one of the surroundings of `tests/matrix`.
2. In the same environment, with all stages, this machine's commands, and dilkit's C compiled for all that its compiler knows:
   `make lint`; the quick tests that the newcomer skipped or did not have; all tests that the change can reach (`reach.py`), and
   a quarter of the others, slow ones too. The number of the commit chooses the quarter: four commits in turn run all.
3. The sanitizers and aarch64 where their C has changed, and for one commit in four.

Given up: a quick test that passed as the newcomer's runs with the stages, and on newer instruction sets, for one commit in four.
`make test-all` runs everything; before a release it must.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import newcomer
import reach

SHARES = 4
KERNEL = r"backends/native/.*\.(c|h|pyx)|tests/sanitize/(run|driver|steps|problems)"
OF_C = {
    "run": KERNEL,
    "orders": r"dilkit/orders/.*\.(c|h|pyx)|tests/sanitize/(orders|extensions|curves)",
    "aarch64": KERNEL + "|tests/sanitize/aarch64",
}
"""The scripts of `tests/sanitize`, with the files that each is about."""


class Failed(Exception):
    """A step that ended with another code than 0."""


class Run:
    """The steps in one copy of the checkout, and the page about them."""

    def __init__(self, copy: Path, page: list[str]) -> None:
        self.copy, self.page = copy, page
        self.seconds: dict[str, float] = {}

    def step(self, *command: str, env: dict[str, str] | None = None) -> None:
        """Run a command, which must succeed."""
        if self.ran(*command, env=env).returncode:
            raise Failed(" ".join(command))

    def ran(self, *command: str, env: dict[str, str] | None, stdout: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command, and note on the page how long it took."""
        shown, start = " ".join(command), time.monotonic()
        print(f".ci/run: {shown}", flush=True)
        environment = {**(env or os.environ), "CI": "true"}
        done = subprocess.run(
            command, cwd=self.copy, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, text=True, check=False
        )
        self.page.append(f"{(time.monotonic() - start) / 60:6.1f} min  {shown}")
        if command[1] in ("test", "test-all"):
            self.note_tests()
        return done

    def note_tests(self) -> None:
        """Note the report of the plugin `helpers.shares` on the last run of tests."""
        noted = self.copy / ".pytest_cache/v/dilkit/last_run"
        if noted.exists():
            last = json.loads(noted.read_text(encoding="utf-8"))
            self.page[-1] += f": {', '.join(f'{number} {outcome}' for outcome, number in last['counts'].items())}"
            self.seconds |= last["slowest"]

    def any_row(self, first: int, env: dict[str, str]) -> None:
        """Run the sample in the first row that this machine has, from the row `first` on."""
        for row in newcomer.ROWS[first:] + newcomer.ROWS[:first]:
            sample = ("-m", "(smoke or surroundings) and not slow")
            command = (".venv/bin/python", "tests/matrix/run.py", "--json", "--only", row, *sample)
            done = self.ran(*command, env=env, stdout=subprocess.PIPE)
            rows = json.loads(done.stdout)["rows"]
            if rows and "skipped_because" not in rows[0]:
                self.page[-1] += f": {rows[0].get('passed')} passed"
                if done.returncode:
                    raise Failed("\n".join([row, *rows[0]["failures"]]))
                return


def main() -> int:
    commit, changed, share = newcomer.output("git", "rev-parse", "HEAD").strip(), reach.changes(), number() % SHARES + 1
    also, followed = reach.reached(changed)
    ways = ", ".join(f"{len(names)} {how}" for how, names in followed.items())
    page = [f"share {share} of {SHARES}; {len(also)} of {len(reach.tests())} files of tests for {len(changed)} changes: {ways}"]
    print(page[0], *(f"{how}: {', '.join(names)}" for how, names in followed.items()), sep="\n  ", flush=True)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as scratch:
        run, bare = Run(newcomer.copy_checkout(Path(scratch, "dilkit")), page), newcomer.surroundings(Path(scratch))
        Path(scratch, "also").write_text("\n".join(sorted(also)), encoding="utf-8")
        try:
            run.step("make", "test", env=bare)
            run.any_row(int(commit[:12], 16) % len(newcomer.ROWS), bare)
            for built in (run.copy / ".venv/stage-dilkit", *run.copy.glob("[bcd]*/**/*.so")):
                built.unlink()  # its C is compiled again
            run.step("make", "stages")
            run.step("make", "lint")
            run.step("make", "test-all", f"ARGS=--nothing-missing --share={share}/{SHARES} --also={scratch}/also --not-passed")
            for at, (name, about) in enumerate(OF_C.items(), start=1):
                if at == share or any(re.match(about, file) for file in changed):
                    run.step(".venv/bin/python", f"tests/sanitize/{name}.py", "--if-possible")
            end = "passed"
        except Failed as failed:
            end = f"failed: {failed}"
    slowest = [f"{run.seconds[test]:6.1f} s    {test}" for test in sorted(run.seconds, key=run.seconds.__getitem__)[:-11:-1]]
    print("", f".ci/run of {commit[:12]} {end}", *page, "the slowest tests:", *slowest, sep="\n", flush=True)
    return int(end != "passed")


def number() -> int:
    """The number of the commit on its branch, or where history is cut off, one made of its hash."""
    if newcomer.output("git", "rev-parse", "--is-shallow-repository").strip() == "true":
        return int(newcomer.output("git", "rev-parse", "HEAD")[:12], 16)
    return int(newcomer.output("git", "rev-list", "--first-parent", "--count", "HEAD"))


if __name__ == "__main__":
    sys.exit(main())
