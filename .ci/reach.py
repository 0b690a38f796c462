"""The files of tests that a change can reach.

    python .ci/reach.py [FILE ...]    the changed files; without any, what changes() says

A file depends on the modules that it imports, on its conftest.py, and on files that it names in a string, such as a script that
it starts. Imports for types alone are not followed. Entry points are not either, or every test would depend on every backend and
on comm. A file in a package that is not Python, such as C, stands for the modules of that package.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"dilkit": "dilkit", "backends": "dilkit.backends", "comm": "dilkit.comm", "tools": "dilkit.tools", "tests": ""}
"""The folders of modules, with the names that these begin with."""
COMMITS = 20
PART = 4
"""Changes may reach one of so many files of tests."""


def changes() -> list[str]:
    """Return the changed files, the last change first.

    On a branch they are those that have changed since it left origin/main. On main itself they are those of the last COMMITS
    commits, or of as many as there are but the first: a shallow clone of one commit has none. What is not committed comes before.
    """
    history = git("rev-list", "--first-parent", f"--max-count={COMMITS + 1}", "HEAD")
    left = git("merge-base", "origin/main", "HEAD") or history
    start = history[-1] if left[0] == history[0] else left[0]
    committed = git("log", "--first-parent", "-m", "--name-only", "--format=", f"{start}..HEAD")
    return [*dict.fromkeys([*git("ls-files", "--modified", "--others", "--exclude-standard"), *committed])]


def git(*command: str) -> list[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()


def reached(changed: Iterable[str]) -> tuple[set[str], dict[str, list[str]]]:
    """Return the files of tests that the changed files reach, and which of these were followed how far.

    Imports are followed from the first changed file on, as long as all that is reached stays within the limit. Where a file
    reaches too many, the tests in its folder are taken, then itself alone; a change of everything leaves the rest to the shares.
    """
    found: set[str] = set()
    followed: dict[str, list[str]] = {"by imports": [], "by folder": [], "alone": [], "left to the shares": []}
    for name in changed:
        ways = {"by imports": dependents(name), "by folder": beside(name), "alone": {name} & tests()}
        if not ways["by imports"]:
            continue
        way = next((how for how, more in ways.items() if more and len(found | more) * PART <= len(tests())), "left to the shares")
        found |= ways.get(way, set())
        followed[way].append(name)
    return found, followed


@cache
def tests() -> frozenset[str]:
    return frozenset(name for name in modules() if name.startswith("tests/") and PurePosixPath(name).name.startswith("test_"))


def dependents(name: str) -> set[str]:
    """The files of tests that depend on the file `name`."""
    path = PurePosixPath(name)
    package = next((str(folder) for folder in path.parents if f"{folder}/__init__.py" in modules()), None)
    left = {name} | {other for other in modules() if path.suffix != ".py" and str(PurePosixPath(other).parent) == package}
    seen: set[str] = set()
    while left:
        seen |= left
        left = {user for other in left for key in keys(other) for user in users().get(key, ())} - seen
        left &= tests() if path.parts[0] not in PACKAGES else left
    return seen & tests()


def beside(name: str) -> set[str]:
    """The tests in the innermost folder that mirrors that of `name`."""
    top, *inner = PurePosixPath(name).parts
    folder = PurePosixPath("tests", *[{"dilkit": "core", "tests": ""}.get(top, top), *inner][:-1])
    while folder.name and not (found := {test for test in tests() if PurePosixPath(test).parent == folder}):
        folder = folder.parent
    return found if folder.name else set()


@cache
def modules() -> dict[str, str]:
    """Every Python file of the packages and the tests, with the name that it is imported by."""
    found = {}
    for folder, module in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[path.relative_to(ROOT).as_posix()] = ".".join(filter(None, [module, *parts])).removesuffix(".__init__")
    return found


def keys(name: str) -> Iterator[str]:
    """The names that others use for a file: its module, what packages load of it lazily, or its path's first and last part."""
    parts = PurePosixPath(name).parts
    if parts[0] == "tests" or name not in modules():
        yield name if parts[-1] == "conftest.py" else parts[-1]
    if parts[0] not in PACKAGES:
        yield parts[0]
    if name in modules():
        yield modules()[name]
        yield from homes().get(modules()[name], ())


@cache
def homes() -> dict[str, set[str]]:
    """For each module the names that packages load from it when they are asked for, and import for types alone."""
    found: dict[str, set[str]] = {}
    for name, module in modules().items():
        for block in tree(name).body if name.endswith("__init__.py") else ():
            for line in ast.walk(block) if for_types(block) else ():
                if isinstance(line, ast.ImportFrom) and line.module:
                    found.setdefault(line.module, set()).update(f"{module}.{alias.name}" for alias in line.names)
    return found


@cache
def users() -> dict[str, set[str]]:
    """For each key the files that use it."""
    found: dict[str, set[str]] = {}
    for name in modules():
        for key in used(name):
            found.setdefault(key, set()).add(name)
    return found


def used(name: str) -> Iterator[str]:
    """The keys that a file uses: imported modules and the packages around them, `dilkit.x.y` in code, strings."""
    yield from (f"{folder}/conftest.py" for folder in PurePosixPath(name).parents)
    left: list[ast.AST] = [tree(name)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            yield from (prefix for alias in node.names for prefix in prefixes(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (*prefixes(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Attribute):
            yield from prefixes(chain(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            yield from (node.value, node.value.partition("/")[0], node.value.rpartition("/")[2])
        left += [] if for_types(node) else ast.iter_child_nodes(node)


def prefixes(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def chain(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{chain(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def tree(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


if __name__ == "__main__":
    print("\n".join(sorted(reached(sys.argv[1:] or changes())[0])))
