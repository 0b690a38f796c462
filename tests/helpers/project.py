"""The checkout as files."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
ROOTS = {"dilkit": "dilkit", "dilkit.backends": "backends", "dilkit.comm": "comm", "dilkit.tools": "tools"}
"""The top-level folders, each with the name that it is installed under."""
BUILT = "*.so", "_*.c", "__pycache__", "*.egg-info", ".git", ".venv", ".*_cache", ".hypothesis"
BUILT_AT_THE_TOP = "build", "dist", "dilkit-demo*", "dilkit-bench", "site"


@cache
def packages(root: Path = ROOT) -> dict[str, str]:
    found = {}
    for name, folder in ROOTS.items():
        for path in sorted((root / folder).rglob("__init__.py")):
            place = path.parent.relative_to(root)
            found[".".join([name, *place.parts[1:]])] = place.as_posix()
    return found


def metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@cache
def build_script() -> dict[str, Any]:
    with mock.patch("setuptools.setup"), mock.patch("Cython.Build.cythonize"):
        return runpy.run_path(str(ROOT / "setup.py"))


def extension_suffix() -> str:
    return ".abi3.so" if build_script()["STABLE_ABI"] else str(sysconfig.get_config_var("EXT_SUFFIX"))


def checkout(target: Path) -> Path:
    """Copy the checkout as a fresh clone, with nothing built."""

    def ignored(folder, names):
        patterns = BUILT + BUILT_AT_THE_TOP if Path(folder) == ROOT else BUILT
        return shutil.ignore_patterns(*patterns)(folder, names)

    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    return target


def run(*command: str, cwd: Path, python_path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `command` with this Python's scripts first on PATH and `python_path` first among the modules; never raises."""
    scripts = str(Path(sys.executable).parent)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DILKIT_", "PYTEST_"))}
    env = {**inherited, "PATH": scripts + os.pathsep + os.environ.get("PATH", ""), **variables}
    if python_path is not None:
        env["PYTHONPATH"] = str(python_path)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


def succeed(*command: str, cwd: Path, python_path: Path | None = None, **variables: str) -> str:
    done = run(*command, cwd=cwd, python_path=python_path, **variables)
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code: str, cwd: Path) -> str:
    return succeed(sys.executable, "-c", code, cwd=cwd).strip()
