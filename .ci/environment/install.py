"""One stage of the environment of the Python that runs this, told in one line: what it brings, how large it is, how long it took.

    install.py demo      what `make demo` needs: dilkit's dependencies, matplotlib, the build tools
    install.py test      what an extra of pyproject.toml names: also kernels, docs, lint and peers
    install.py ttsem     a checker of kernels in Triton, with the Triton that it reads, in a folder of its own
    install.py dilkit    dilkit itself, built from this checkout, with nothing downloaded

`.venv` gets the versions of constraints.txt. In any other environment what fits is kept, and torch is never replaced.
"""

import fcntl
import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path

import torch_build

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
OWN = Path(sys.prefix).resolve() == ROOT / ".venv"
PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
BESIDE = {"test": ["mpich"], "kernels": ["nvidia-cuda-nvrtc"]}
"""Packages that a stage installs into a separate folder: MPICH's wheel and Open MPI's both have a bin/mpirun, and CuPy would take
NVRTC of CUDA 13 in place of that of CUDA 12."""
APART = {"ttsem": ["ttsem==0.1.0", "triton==3.8.0"]}
"""Packages of a stage that has a folder of its name to itself: ttsem reads the output of one version of Triton."""
OLDEST_OF_TTSEM = (3, 11)
"""Oldest Python for ttsem, which asks for 3.12 and runs on 3.11 as well."""


def main(stage: str) -> int:
    with (Path(sys.prefix) / ".dilkit-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two pips in one environment would damage it
        before, start = size(), time.monotonic()
        wanted, beside = requirements(stage), BESIDE.get(stage, [])
        names = [re.match(r"[\w-]+", line)[0] for line in [*wanted, *beside, *APART.get(stage, [])]] or [
            "built from this checkout"
        ]
        print(f"{stage}: {', '.join(names)} ...", end=" ", flush=True)
        code = install(stage, wanted) or (install_beside(beside) if beside else 0)
        print(f"{(size() - before) / 1e6:,.0f} MB in {time.monotonic() - start:.0f} s" if code == 0 else "failed")
    return code


def requirements(stage: str) -> list[str]:
    """Return the requirements of `stage` in pyproject.toml."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = table["project"]
    if stage == "dilkit" or stage in APART:
        return []
    if stage == "demo":
        return [*project["dependencies"], *project["optional-dependencies"]["plot"], *table["build-system"]["requires"]]
    return project["optional-dependencies"][stage]


def install(stage: str, wanted: list[str]) -> int:
    if stage == "dilkit":
        return run(*PIP, "--no-build-isolation", "--no-deps", "--editable", str(ROOT))
    if stage in APART:
        return install_apart(stage)
    if not OWN:
        return run(*PIP, *wanted, f"torch=={importlib.metadata.version('torch')}")
    if stage == "demo":
        torch_build.prefer_cpu(next(line for line in wanted if line.startswith("torch")), constraints())
    return run(*PIP, *constraints(), *wanted)


def install_beside(names: list[str]) -> int:
    """Each into a folder of its name."""
    return max(run(*PIP, *constraints(), "--prefix", f"{sys.prefix}/{name}", "--ignore-installed", name) for name in names)


def install_apart(stage: str) -> int:
    """Without what the environment has already: numpy, and torch, which would come for CUDA."""
    if sys.version_info < OLDEST_OF_TTSEM:
        print("ttsem does not run on Python 3.10: take a later one (PYTHON=python3.11 make triton-sanitize) ...", end=" ")
        return 1
    folder = f"{sys.prefix}/{stage}"
    return run(*PIP, "--no-deps", "--ignore-requires-python", "--upgrade", "--target", folder, *APART[stage])


def constraints() -> tuple[str, str]:
    return "--constraint", str(ROOT / "constraints.txt")


def run(*command: str) -> int:
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def size() -> int:
    """Bytes of all files in the environment."""
    return sum(path.lstat().st_size for path in Path(sys.prefix).rglob("*") if not path.is_dir())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
