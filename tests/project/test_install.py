"""From the source distribution to a working `dilkit` in an environment that has nothing of the checkout."""

import json
import site
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest
from helpers.project import checkout, metadata, succeed


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution, built from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("sdist")
    source = checkout(folder / "source")
    succeed(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(source), cwd=folder)
    (archive,) = folder.glob("dilkit-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def environment(sdist, tmp_path_factory):
    """The interpreter of a new environment into which the wheel made from the sdist is installed; torch is lent to it."""
    folder = tmp_path_factory.mktemp("environment")
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
    succeed(sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(sdist), cwd=folder)
    (wheel,) = folder.glob("dilkit-*.whl")
    succeed(sys.executable, "-m", "venv", str(folder / "venv"), cwd=folder)
    python = folder / "venv" / "bin" / "python"
    succeed(str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=folder)
    # Appended after the environment's own modules: a .pth file in there, such as that of an editable dilkit, has no effect.
    own = succeed(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
    (Path(own) / "lent.pth").write_text("\n".join(sorted(lent)) + "\n")
    return python


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
def test_dilkit_works_in_a_new_environment(environment, tmp_path):
    where = "print(dilkit.__file__, dilkit.orders._curves.__file__, importlib.resources.files('dilkit') / 'py.typed')"
    for path in succeed(
        str(environment), "-c", f"import dilkit.orders._curves, importlib.resources; {where}", cwd=tmp_path
    ).split():
        assert path.startswith(str(environment.parents[1]))
        assert Path(path).exists()
    command = str(environment.with_name("dilkit"))
    info = json.loads(succeed(command, "info", "--json", cwd=tmp_path))
    declared = set(metadata()["project"]["entry-points"]["dilkit.backends"])
    assert declared <= {row["name"] for row in info["problem"]["backends"]}
    assert json.loads(succeed(command, "verify", "--backend", "reference", "--json", cwd=tmp_path, OMP_NUM_THREADS="1"))["right"]
