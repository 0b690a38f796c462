"""A mutant: a line made wrong, and the tests that have to notice."""

from dataclasses import dataclass
from pathlib import Path

COMPILED = (".pyx", ".pxd", ".c", ".h")


@dataclass(frozen=True)
class Mutant:
    """`file` with `new` in place of `old`, which it holds exactly once.

    `tests`: files or tests, `file.py::test_name`, separated by spaces. `needs`: a package without which they are skipped, or
    `g++`.
    """

    breaks: str
    file: str
    old: str
    new: str
    tests: str
    needs: str = ""

    @property
    def is_compiled(self) -> bool:
        """True if extensions need a build; tests compile CUDA sources themselves."""
        return self.file.endswith(COMPILED)

    def applied(self, text: str) -> str:
        if (times := text.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.file} holds {self.old!r} {times} times; once is needed")
        return text.replace(self.old, self.new)

    def applied_in(self, root: Path) -> str:
        return self.applied((root / self.file).read_text())
