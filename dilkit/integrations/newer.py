"""Packages that are newer than those that dilkit is tested with: their classes are compared before dilkit computes them.

What dilkit patches of a package is private to it, and a later version may move it without an error. So the first use of a class
compares it with what the package itself computes, in a process of its own: here a model may be made on the device `meta`, say.
The verdict is kept beside the proofs of kernels. A version that is tested costs one comparison of versions.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from typing import Any

from dilkit import environment
from dilkit.selection import proof

NEWEST_TESTED = {"transformers": "5.24.0", "torchscale": "0.3.0"}


def check_class(package: str, version: str, kind: type, prover: str) -> None:
    """Raise ValueError if dilkit computes `kind`, a class of `package`, wrongly; warn once a process if that cannot be found out.

    Args:
        package: A name in `NEWEST_TESTED`.
        version: The version of `package` that is installed.
        kind: The class. Only its name reaches the process that compares it.
        prover: The module to run with that name. It prints JSON: `wrong`, what differs; `doubt`, what is not known; and `right`,
            the names of classes that took part where nothing differs. It may fail, and all is in doubt.
    """
    tested = NEWEST_TESTED[package]
    if not is_newer(package, version) or (mode := environment.gpu_proof()) == "off":
        return
    name, versions = full_name(kind), _versions(package, version)
    verdict = proof.known(mode, (name, *versions))
    if verdict is None:
        text = proof.outcome([sys.executable, "-m", prover, name]).rpartition("\n")[2]
        doubtful = dict(wrong="", doubt=text or "it said nothing", right=[])
        compared: dict[str, Any] = json.loads(text) if text.startswith("{") else doubtful
        for right in compared["right"]:
            proof.keep(mode, proof.Proof((right, *versions), ""))
        verdict = proof.Proof((name, *versions), compared["wrong"], compared["doubt"])
        proof.keep(mode, verdict)
    if verdict.doubt:
        proof.keep(mode, replace(verdict, doubt=""), write=False)  # warned of once
        warnings.warn(
            f"{package} {version} is newer than {tested}, the newest that dilkit is tested with, and not all of {name} could be "
            f"compared with its own attention: {verdict.doubt}. Compare it yourself; {environment.GPU_PROOF.name}=off ends this",
            stacklevel=2,
        )
    if verdict.reason:
        raise ValueError(
            f"{name} of {package} {version} computes something else by dilkit than by its own attention: {verdict.reason}. "
            f"Install {package}=={tested} or earlier, or leave it its own; {environment.GPU_PROOF.name}=off computes it all the "
            "same"
        )


def is_newer(package: str, version: str) -> bool:
    """True for a version that is later than the newest tested one."""
    return _release(version) > _release(NEWEST_TESTED[package])


def full_name(kind: type) -> str:
    """Return the module of a class, and its name in it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _versions(package: str, version: str) -> tuple[str, ...]:
    import torch

    import dilkit

    return f"{package} {version}", f"torch {torch.__version__}", f"dilkit {dilkit.__version__}"


def _release(version: str) -> tuple[int, ...]:
    """Return the three numbers that a version begins with."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
