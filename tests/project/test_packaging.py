"""The installed files are the declared ones, and the parts of the project stand on each other as the layout says."""

import ast
import re
import runpy
import sys
import sysconfig
from functools import cache
from importlib.metadata import entry_points, version

import pytest
from helpers.launch import fork
from helpers.project import ROOT, ROOTS, metadata, packages

import dilkit

pytestmark = pytest.mark.surroundings

MEND = "mend it with: rm -rf *.egg-info && .venv/bin/pip install --no-build-isolation --no-deps -e ."


def sources(folder):
    found = sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)
    assert found, f"no Python file in {folder}/: this test looks in the wrong place"
    return found


def module_name(path):
    """The name that a file of the checkout is imported by: `backends/sdpa/aten.py` is `dilkit.backends.sdpa.aten`."""
    folder, *inner = path.relative_to(ROOT).with_suffix("").parts
    (package,) = (name for name, place in ROOTS.items() if place == folder)
    return ".".join([package, *inner]).removesuffix(".__init__")


@cache
def parsed(path):
    return ast.parse(path.read_text())


def called(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def imported_modules(path):
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name, dilkit..."
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and called(node).endswith(("import_module", "__import__")) and node.args:
            found.add(ast.unparse(node.args[0]).strip("f'"))
    return found


def is_within(module, package):
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize(
    ("group", "declared"), [("dilkit.backends", ("entry-points", "dilkit.backends")), ("console_scripts", ("scripts",))]
)
def test_installed_entry_points_are_those_declared(group, declared):
    table = metadata()["project"]
    for key in declared:
        table = table[key]
    ours = {p.name: p.value for p in entry_points(group=group) if p.value.startswith("dilkit.")}
    assert ours == table, f"entry points {group}: installed {ours}, declared {table}; {MEND}"


def test_the_version_is_written_in_one_place():
    assert version("dilkit") == dilkit.__version__, f"installed as {version('dilkit')}; {MEND}"
    assert metadata()["project"]["dynamic"] == ["version"]
    assert metadata()["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "dilkit.__version__"}
    assert re.search(rf"^## \[({re.escape(dilkit.__version__)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_a_first_call_imports_no_compiler_and_no_dtensors(tmp_path):
    """The compiler takes as long as torch and dilkit together, in every process and on every rank."""
    program = """
import sys, torch, dilkit.comm
x, pattern = torch.randn(1, 32, 2, 4), dilkit.Pattern([8], [2])
dilkit.dilated_attention(x, x, x, pattern)
dilkit.comm.run_threads(1, lambda comm: dilkit.comm.ring_dilated_attention(x, x, x, pattern, comm))
layer = dilkit.MultiheadDilatedAttention(8, 2, dilkit.DilatedAttention(pattern))
layer.load_state_dict(layer.state_dict())
layer(torch.randn(1, 32, 8))
print([name for name in ("torch._dynamo", "torch.distributed.tensor") if name in sys.modules])
"""
    (tmp_path / "first_call.py").write_text(program)
    assert fork([str(tmp_path / "first_call.py")]).finish(90.0).text == "[]\n"


@pytest.mark.parametrize("folder", ["dilkit", "backends", "comm"])
def test_arrows_only_go_down(folder):
    """The core imports none of the other packages; backends and comm import the core alone, and themselves."""
    own = next(package for package, place in ROOTS.items() if place == folder)
    forbidden = [package for package in ROOTS if package not in ("dilkit", own)]
    assert len(forbidden) >= 2
    for path in (path for path in sources(folder) if path.name != "__main__.py"):  # the command
        wrong = {m for m in imported_modules(path) for package in forbidden if is_within(m, package)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}: {folder}/ stands below"


def test_no_import_circle():
    files = {module_name(path): path for folder in ROOTS.values() for path in sources(folder)}
    waiting = {name: {m for m in imports_in(path) if m in files and m != name} for name, path in files.items()}
    while free := [name for name, needs in waiting.items() if not needs]:
        waiting = {name: needs - set(free) for name, needs in waiting.items() if needs}
    assert not waiting, f"files that import one another in a circle, and those that need them: {', '.join(sorted(waiting))}"


def is_submodule(package, name):
    folder = ROOT / packages().get(package, "no such folder")
    return (folder / name).is_dir() or any((folder / f"{name}{suffix}").exists() for suffix in (".py", ".pyx"))


def imports_in(path):
    found, left = set(), list(parsed(path).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):  # a submodule, or a name of the module itself
            found |= {f"{node.module}.{a.name}" if is_submodule(node.module, a.name) else node.module for a in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        else:
            left += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return found


def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    wrong = re.compile("py" + r"pi\.org|index-" + r"url|/(root|work|home)/\w|/tm" + r"p/\w")
    for path in [p for p in checkout_files() if p.suffix in (".py", ".pyx", ".md", ".toml", ".txt", ".in", ".yml", ".cff", "")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert not wrong.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def checkout_files():
    folders = [*ROOTS.values(), "tests", "docs", ".ci", ".github"]
    inside = [p for folder in folders for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return inside + [p for p in ROOT.iterdir() if p.is_file() and not p.name.startswith(".")]


def test_what_a_bare_machine_lacks_is_said_before_anything_is_installed(monkeypatch, tmp_path):
    def missing():
        found = runpy.run_path(str(ROOT / ".ci/environment/machine.py"))["missing"]()
        return " ".join(f"{what} {package}" for what, package in found)

    assert missing() == "", "the machine that runs the tests lacks nothing"
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "no-such-compiler")
    assert all(word in missing() for word in ("ensurepip", "python3-venv", "Python.h", "python3-dev", "no-such-compiler gcc"))
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    assert "Python >= 3.10 (this is 3.9" in missing()
