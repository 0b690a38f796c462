"""Proof before trust: kernels of our own are used on a GPU after they have computed small problems rightly there.

    picked backend    proof_facts(problem)      none: used as it is
                          known by these facts      passed: used            failed: refused, and the next backend is picked
                          not known                 computed in a process of its own, which may crash, and written down

Facts are the device, the driver, the kernels' sources, their compiler, and what is asked of them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from dilkit import environment, files
from dilkit.backend import Backend
from dilkit.device import capturing
from dilkit.problem import Problem

MOST_SECONDS = 300
"""Kernels are compiled, and torch is imported, within this time."""
SUFFIX = ".proof.json"


@dataclass(frozen=True)
class Proof:
    """Outcome of a proof by these facts. `reason`: why it failed; empty if it passed. `doubt`: why none could be made."""

    facts: tuple[str, ...]
    reason: str
    doubt: str = ""

    @property
    def verdict(self) -> str:
        return "failed" if self.reason else "none" if self.doubt else "passed"


def failure(backend: Backend, problem: Problem, run: bool) -> str:
    """Return why the kernels of `backend` are not to be trusted with `problem`; empty if they are, or if they need no proof.

    `run`: make a proof that is not known; without it, unknown kernels are trusted. Raises RuntimeError under capture.
    """
    mode = environment.gpu_proof()
    if mode == "off" or problem.device.assumed:
        return ""
    try:
        facts = backend.proof_facts(problem)
    except Exception as error:  # what it needs to compile or launch kernels is not there as a whole
        return f"{type(error).__name__}: {error}"
    if not facts:
        return ""
    verdict = known(mode, facts)
    if verdict is None:
        if not run:
            return ""
        verdict = _prove(backend.name, problem, facts, mode)
    return verdict.reason


def known(mode: str, facts: tuple[str, ...]) -> Proof | None:
    """Return the proof by these facts that this process knows or, with the mode `once`, that is written down."""
    proof = _proofs.get((mode, facts))
    if proof is None and mode == "once" and (place := _place(facts)) is not None:
        proof = _load(place)
        if proof is None or proof.facts != facts:
            return None
        _proofs[mode, facts] = proof
    return proof


def keep(mode: str, proof: Proof, write: bool = True) -> None:
    """Remember a proof in this process and, with `write`, for others."""
    _proofs[mode, proof.facts] = proof
    if write and (place := _place(proof.facts)) is not None:
        files.write_privately(place, json.dumps(asdict(proof)).encode())


def recorded() -> list[Proof]:
    """Read all proofs that are written down, of whichever device, driver and kernels."""
    folder = environment.cuda_cache()
    proofs = (_load(path) for path in sorted(folder.glob(f"*{SUFFIX}"))) if folder and folder.is_dir() else ()
    return sorted((proof for proof in proofs if proof is not None), key=lambda proof: proof.facts)


_proofs: dict[tuple[str, tuple[str, ...]], Proof] = {}
"""The proofs that this process knows, by the mode in which it came by them."""


def _prove(name: str, problem: Problem, facts: tuple[str, ...], mode: str) -> Proof:
    if problem.device.type == "cuda":
        import torch

        if torch.cuda.is_available() and capturing(torch.device("cuda", problem.device.index)):
            needed = "make the same call once before the CUDA graph is captured"
            raise RuntimeError(f"the kernels of {name} have not been proven on {problem.device}; {needed}")
    request = dict(backend=name, device=f"{problem.device.type}:{problem.device.index}", dtype=problem.dtype)
    flags = dict(
        gradients=problem.requires_grad, varlen=problem.varlen, dropout=problem.dropout_p > 0, softcap=problem.softcap > 0
    )
    features = request | flags | dict(kinds=not problem.pattern.only_segments, head_dim=problem.head_dim)
    features |= dict(stored=problem.stored, group=problem.heads // problem.kv_heads)
    features |= dict(bias="" if problem.bias is None else problem.bias.encode())
    command = [sys.executable, "-m", "dilkit.selection.proving", json.dumps(features)]
    proof = Proof(facts, outcome(command))
    keep(mode, proof)
    if proof.reason:
        warnings.warn(
            f"backend {name} is not used on {problem.device}: {proof.reason}. Please report this, with what `dilkit doctor` and "
            f"`dilkit verify --device {request['device']} --backend {name}` print. {environment.GPU_PROOF.name}=off uses it "
            "all the same",
            stacklevel=2,
        )
    return proof


def outcome(command: Sequence[str], most_seconds: float = MOST_SECONDS) -> str:
    """Run a proof. Returns why it failed: its output, how it crashed, or that it never ended; empty if it passed."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=most_seconds)
    except subprocess.TimeoutExpired:
        return f"its proof had not ended after {most_seconds:g} seconds"
    except OSError as error:
        return f"its proof could not be started: {error}"
    if ended.returncode == 0:
        return ended.stdout.strip()
    last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
    return f"its proof crashed with exit status {ended.returncode}: {last}"


def _place(facts: tuple[str, ...]) -> Path | None:
    folder = environment.cuda_cache()
    return folder and folder / f"{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()}{SUFFIX}"


def _load(place: Path) -> Proof | None:
    if files.why_others_may_write(place.parent) or files.why_others_may_write(place):
        return None
    try:
        plain = json.loads(files.read_bytes(place))
        facts, reason, doubt = plain["facts"], plain["reason"], plain.get("doubt", "")
    except (OSError, ValueError, TypeError, KeyError):
        return None
    texts = isinstance(facts, list) and all(isinstance(x, str) for x in (*facts, reason, doubt))
    return Proof(tuple(facts), reason, doubt) if texts else None
