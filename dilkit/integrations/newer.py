"""Packages newer than those that dilkit is tested with: classes are compared before dilkit computes them.

A later version may move what dilkit patches without an error. So the first use of a class compares it with the package's own
results, in a process of its own. The verdict is kept beside the proofs of kernels.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch

import dilkit
from dilkit import environment
from dilkit.selection import proof

NEWEST_TESTED = {"transformers": "5.24.0", "torchscale": "0.3.0"}


def check_class(package: str, version: str, kind: type, prover: str) -> None:
    """Raise ValueError if dilkit computes `kind`, of `version` of `package`, wrongly; warn once if that cannot be found out.

    Module `prover` runs with the name of the class, and prints JSON: `wrong`, what differs; `doubt`, what is not known; `right`,
    the classes that took part where nothing differs. If it fails, all is in doubt.
    """
    tested = NEWEST_TESTED[package]
    if not is_newer(package, version) or (mode := environment.gpu_proof()) == "off":
        return
    name = full_name(kind)
    versions = f"{package} {version}", f"torch {torch.__version__}", f"dilkit {dilkit.__version__}"
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
    later, tested = ([int(number) for number in re.findall(r"\d+", text)[:3]] for text in (version, NEWEST_TESTED[package]))
    return later > tested


def full_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
