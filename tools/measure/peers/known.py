"""The peers of dilkit's attention: what one would take in its place. Each is checked against what it says it computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dilkit.tools.measure.baselines import BASELINES
from dilkit.tools.measure.implementation import Implementation
from dilkit.tools.measure.peers.flex import FLEX
from dilkit.tools.measure.peers.packages import PACKAGES, version

ALL = "all"
"""The name that stands for every peer."""
NEEDS = {
    "flex": "a C++ compiler; on CUDA triton",
    "torchscale": "a checkout of microsoft/torchscale, einops, flash-attn or xformers, a GPU",
    "dilated-attention-pytorch": "dilated-attention-pytorch 0.2, torchscale, xformers, einops; what xformers can compute on",
    "natten": "natten built for the torch and GPU at hand",
}
"""What a peer needs beyond torch."""


def known() -> dict[str, Implementation]:
    """Every peer by name, those of plain PyTorch first. Absent ones are among them: `absent()` says what they lack."""
    return {**BASELINES, "flex": FLEX, **PACKAGES}


def peer_implementations(names: Sequence[str] | None = None) -> list[Implementation]:
    """The peers of these names, each once and in this order; every one when None, or where `ALL` is among the names.

    Raises ValueError for a name that is not known.
    """
    peers = known()
    for name in names or ():
        if name not in (*peers, ALL):
            raise ValueError(f"peer {name!r} is not known; choose from {', '.join(peers)}, or {ALL}")
    if names is None or ALL in names:
        return list(peers.values())
    return [peers[name] for name in dict.fromkeys(names)]


def describe() -> list[dict[str, Any]]:
    """Each peer as plain data: its name, what it is, what it computes, its version, and why it is absent where it is."""
    found = []
    for peer in known().values():
        release = version(peer.name) if peer.name in PACKAGES else torch.__version__
        found.append(dict(name=peer.name, summary=peer.summary, computes=peer.computes, version=release, absent=peer.absent()))
    return found
