"""From the source distribution to a working `dilkit` in an environment that has nothing of the checkout.

The wheel is built once, and installed beside this torch and that of each interpreter in PYTHONS_WITH_TORCH, separated by colons.
"""

import json
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.project import ROOT, build_script, checkout, extension_suffix, metadata, run, succeed


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    source = checkout(folder / "source")
    succeed(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    (archive,) = folder.glob("dilkit-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist):
    """Build the wheel at -O0, in a sixth of the time; `make stages` compiles at -O3."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    folder, compiler = sdist.parent / "wheel", sdist.with_name("cc")
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -O0\n')
    compiler.chmod(0o755)
    build = (sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(sdist))
    succeed(*build, cwd=sdist.parent, CC=str(compiler))
    (found,) = folder.glob("dilkit-*.whl")
    return found


@pytest.fixture(
    scope="module", params=[sys.executable, *filter(None, os.environ.get("PYTHONS_WITH_TORCH", "").split(os.pathsep))]
)
def environment(request, wheel, tmp_path_factory):
    """The interpreter of a new environment into which the wheel is installed; torch is lent to it."""
    folder = tmp_path_factory.mktemp("environment")
    succeed(request.param, "-m", "venv", "--without-pip", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", str(wheel))
    succeed(sys.executable, "-m", "pip", "--python", str(python), *install, cwd=folder)
    # Appended after the environment's own modules: a .pth file in there, such as that of an editable dilkit, has no effect.
    places = (
        "import site, sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_path('platlib'), *site.getsitepackages())"
    )
    own = succeed(str(python), "-c", places, cwd=folder).split()[0]
    lent = succeed(request.param, "-c", places, cwd=folder).split()
    (Path(own) / "lent.pth").write_text("\n".join(sorted({*lent})) + "\n")
    return python


@pytest.mark.slow
def test_the_sdist_has_what_a_build_and_a_test_run_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    source = sdist.with_name("source")
    wanted = {"setup.py", "pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "README.md", ".ci/run", "dilkit/py.typed"}
    for folder in ("dilkit", "backends", "comm", "tools", "tests", "docs"):
        for suffix in ("*.py", "*.pyx", "*.pyi", "[a-z]*.c", "*.h", "*.cu*", "*.md"):
            wanted |= {str(path.relative_to(source)) for path in (source / folder).rglob(suffix)}
    assert wanted - names == set()
    written_by_cython = {name.replace(".pyx", ".c") for name in wanted if name.endswith(".pyx")}
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name in written_by_cython]


@pytest.mark.slow
def test_the_wheel_needs_no_library_that_linux_lacks(wheel):
    """Nothing links torch or CUDA, so one wheel serves every version of them; glibc is all it asks for."""
    shown = " ".join(succeed(sys.executable, "-m", "auditwheel", "show", str(wheel), cwd=wheel.parent).split())
    own = f"cp{sys.version_info[0]}{sys.version_info[1]}" + getattr(sys, "abiflags", "")
    assert re.search('following platform tag: "(many|musl)linux_', shown), shown
    assert wheel.name.split("-")[2:4] == (["cp311", "abi3"] if build_script()["STABLE_ABI"] else [own] * 2)


@pytest.mark.slow
def test_the_wheel_has_everything_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {"dilkit/py.typed"}
    is_installed = build_script()["is_installed"]
    for package, folder in build_script()["packages"]().items():
        place = package.replace(".", "/")
        wanted |= {f"{place}/{path.name}" for path in (ROOT / folder).glob("*.py") if is_installed(path.relative_to(ROOT))}
        wanted |= {f"{place}/{path.stem}{extension_suffix()}" for path in (ROOT / folder).glob("*.pyx")}
    wanted |= {f"dilkit/backends/cuda/kernels/{path.name}" for path in (ROOT / "backends/cuda/kernels").glob("*.cu*")}
    assert "dilkit/backends/cuda/kernels/dilated.cuh" in wanted
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "backends", "tools", "comm"))]
    tools = (Path(name).relative_to("dilkit") for name in names if name.startswith("dilkit/tools/") and name.endswith(".py"))
    assert not [path for path in tools if not is_installed(path)]


@pytest.mark.slow
def test_the_commands_work_in_a_new_environment_without_a_compiler(environment, tmp_path):
    home = dict(cwd=tmp_path, PATH=str(environment.parent), HOME=str(tmp_path), OMP_NUM_THREADS="1")
    where = "print(dilkit.__file__, dilkit.orders._curves.__file__, importlib.resources.files('dilkit') / 'py.typed')"
    found = succeed(str(environment), "-c", f"import dilkit.orders._curves, importlib.resources; {where}", **home)
    assert all(path.startswith(str(environment.parents[1])) and Path(path).exists() for path in found.split())
    no_compiler = "import shutil; print([c for c in ('cc', 'gcc', 'g++', 'clang') if shutil.which(c)])"
    assert succeed(str(environment), "-c", no_compiler, **home).strip() == "[]"
    command = str(environment.with_name("dilkit"))
    succeed(command, "doctor", **home)
    info = json.loads(succeed(command, "info", "--json", **home))
    declared = set(metadata()["project"]["entry-points"]["dilkit.backends"])
    assert declared <= {row["name"] for row in info["problem"]["backends"]}
    assert json.loads(succeed(command, "verify", "--backend", "native", "--json", **home))["right"]
    for arguments in ("bench --suite cpu", "demo --ranks 1x2", f"report {ROOT}/docs/results/cpu-intel-xeon-avx2.json"):
        done = run(command, *arguments.split(), **home)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "needs a checkout: dilkit.tools." in done.stderr
