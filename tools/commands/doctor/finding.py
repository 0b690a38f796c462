"""One thing that `dilkit doctor` looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from dilkit.checks import visible
from dilkit.environment import VariableError
from dilkit.tools.console.text import error_line

REPORT = "this is unexpected: report it, with all that `dilkit doctor` prints"


@dataclass(frozen=True)
class Finding:
    """What was found of `name`, and the way out of it. "absent": it is optional, and not there or of no use here."""

    name: str
    state: Literal["works", "absent", "WRONG"]
    found: str
    way_out: str = ""

    def __str__(self) -> str:
        return f"{self.found}\nway out: {self.way_out}" if self.way_out else self.found


def works(name: str, found: str) -> Finding:
    """A finding of something that works."""
    return Finding(name, "works", found)


def absent(name: str, found: str, way_out: str = "") -> Finding:
    """A finding of something optional that is not there."""
    return Finding(name, "absent", visible(found), way_out)


def wrong(name: str, found: str, way_out: str = REPORT) -> Finding:
    """A finding of something that does not work."""
    return Finding(name, "WRONG", visible(found), way_out)


def all_of(look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What `look` finds, and what it raises: the installation may be broken anywhere."""
    findings: list[Finding] = []
    try:
        findings.extend(look())
    except ImportError as error:
        findings.append(wrong("this part", error_line(error), "install the module that it names again"))
    except VariableError as error:
        findings.append(wrong("this part", error_line(error), "correct it, or unset it"))
    except Exception as error:
        findings.append(wrong("this part", error_line(error)))
    return findings
