"""A copy of the checkout with an environment of its own, in which files may be broken.

copy/          what git tracks, and what is new and not ignored
environment/   a virtual environment: the copy, editable, before all packages of the present one
"""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coverage.numbits import numbits_to_nums
from helpers.project import ROOT, build_script
from mutants.faults import Fault
from mutants.mutant import COMPILED, Mutant

LIMIT = 300.0
"""Seconds after which tests are ended: a mutant may make them wait for ever."""
BUILT = ("*.so", "_*.c")


class Place:
    """The copy in `folder`; an existing one is updated and keeps its builds."""

    def __init__(self, folder: Path):
        self.root, self.environment = folder / "copy", folder / "environment"
        self.python, self.reached = self.environment / "bin" / "python", folder / "reached"

    def prepare(self):
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        renewed = [name for name in listed.stdout.split("\0") if name and _renewed(ROOT / name, self.root / name)]
        if not self.python.exists():
            self._install()
        elif any(name.endswith(COMPILED) for name in renewed):
            self._run("setup.py", "build_ext", "--inplace", "--force")
        code = "import dilkit, dilkit.backends.native._native as n; print(dilkit.__file__, n.__file__, sep='\\n')"
        if any(not Path(line).is_relative_to(self.root) for line in self._run("-c", code).splitlines()):
            raise RuntimeError("the environment finds another dilkit before the copy")

    def build(self, extension: str):
        """Build one extension again, and no other. Raises RuntimeError where the compiler refuses it."""
        with tempfile.TemporaryDirectory() as folder:  # what was built before of others, with their faults, is not put in place
            options = ("--inplace", f"--build-lib={folder}/lib", f"--build-temp={folder}/temp")
            self._run("-c", _BUILD_ONE, extension, "build_ext", *options)

    def test(self, options: str, timeout: float | None = None, watched: bool = False) -> subprocess.CompletedProcess[str]:
        """Run tests by their default selection; `watched`: note which files of tests reach which lines. Raises TimeoutExpired."""
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options.split()]
        if watched:
            (self.root.parent / "coverage.ini").write_text(_WATCHED.format(root=self.root, file=self.reached))
            watching = ["-m", "coverage", "run", f"--rcfile={self.root.parent}/coverage.ini"]
            done = self._call([*watching, *command, "-n", "auto", "-p", "mutants.watched"])
            self._run("-m", "coverage", "combine", f"--data-file={self.reached}", "--quiet")
            return done
        return self._call(command, timeout)

    def reaching(self, fault: Fault) -> list[str]:
        """The files of tests that reach the fault's lines, of those in its nearest folder if there are any.

        The whole folder, where only a process that all tests share reaches them: it does not know for whom.
        """
        with sqlite3.connect(self.reached) as data:
            rows = data.execute(_LINES, (str(self.root / fault.file),)).fetchall()
        found = sorted(test for test, numbers in rows if set(fault.lines) & set(numbits_to_nums(numbers)))
        near = [test for test in found if test.startswith(f"{fault.nearest}/")]
        return [fault.nearest] if "" in found else near or [test for test in found if test.startswith(f"{fault.tests}/")]

    @contextmanager
    def broken_by(self, mutant: Mutant | Fault) -> Iterator[None]:
        """Put the fault into the copy; afterwards, restore the earlier build."""
        file = self.root / mutant.file
        right, times = file.read_bytes(), file.stat()
        kept = {path: (path.read_bytes(), path.stat()) for path in self._built()} if mutant.is_compiled else {}
        file.write_text(mutant.applied(right.decode()))
        try:
            if mutant.is_compiled:
                self.build(extension_of(mutant.file))
            yield
        finally:
            for path, (content, found) in {file: (right, times), **kept}.items():
                path.unlink(missing_ok=True)  # a library that a process has loaded must not change under it
                path.write_bytes(content)
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    def _built(self) -> Iterator[Path]:
        for folder in ("dilkit", "backends", "comm"):
            for pattern in BUILT:
                yield from (self.root / folder).rglob(pattern)

    def _install(self):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(self.environment)], check=True)
        (own,) = self.environment.glob("lib/python*/site-packages")
        # Their own .pth files are not read, so that no other checkout is found: lines of this one are appended to sys.path.
        lent = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (own / "lent.pth").write_text("\n".join(lent) + "\nimport coverage; coverage.process_startup()\n")
        options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        pip = [sys.executable, "-m", "pip", "--python", str(self.python)]
        done = subprocess.run(
            [*pip, "install", *options, "--editable", str(self.root)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the copy cannot be installed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")

    def _run(self, *command: str) -> str:
        done = self._call([*command])
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return done.stdout

    def _call(self, command: list[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        # Compiled Python is known by its time, to the second, and its size: a mutant may have both of the file that is right.
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [str(self.python), *command],
            cwd=self.root,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )


_WATCHED = """[run]
source =
    {root}/dilkit
    {root}/backends
    {root}/comm
data_file = {file}
parallel = true
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured
"""
_LINES = """select context.context, line_bits.numbits from line_bits join file on file.id = line_bits.file_id
join context on context.id = line_bits.context_id where file.path = ?"""

_BUILD_ONE = """
import runpy, setuptools, sys
name, everything = sys.argv.pop(1), setuptools.setup
def one(ext_modules, **options):
    everything(ext_modules=[extension for extension in ext_modules if extension.name == name], **options)
setuptools.setup = one
runpy.run_path("setup.py")
"""


def extension_of(file: str) -> str:
    folders = build_script()["C_FOLDERS"]
    pyx = file if file.endswith(".pyx") else next(pyx for pyx, folder in folders.items() if file.startswith(folder))
    name = pyx.removesuffix(".pyx").replace("/", ".")
    return name if name.startswith("dilkit.") else f"dilkit.{name}"


def _renewed(source: Path, target: Path) -> bool:
    """Copy a changed file, or remove one that is gone; True if so."""
    if not source.is_file():
        target.unlink(missing_ok=True)
        return False
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)
    return True
