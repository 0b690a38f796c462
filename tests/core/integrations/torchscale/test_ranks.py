"""`seq_parallel`: each rank of torchscale's process group has a part of the sequence."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from helpers import launch
from helpers.torchscale_peer import PEERS, PUBLISHED, loaded

from dilkit.comm import Comm
from dilkit.integrations.torchscale import install
from dilkit.integrations.torchscale.proving import layer


def patched(comm: Comm, peer: str) -> None:
    """Each rank's rows of a batch of two sequences, forward and backward, against the whole."""
    with loaded(peer) as kind:
        if peer == "published":
            utils = sys.modules[PUBLISHED.replace("dilated_attention", "utils")] = ModuleType("utils")
            utils.get_data_parallel_group = lambda: dist.group.WORLD
        torch.manual_seed(0)
        made = layer(kind, [8, 16, 64], [1, 2, 4], seq_parallel=True)
        whole, mask = torch.randn(2, 54, 32, dtype=torch.float64, requires_grad=True), torch.zeros(2, 54, dtype=torch.bool)
        mask[0, 5:9] = True  # of one rank alone
        mine = whole.detach().chunk(comm.size, 1)[comm.rank].requires_grad_()
        for tail, is_causal, hidden in (
            ("zeros", False, None),
            ("exact", False, None),
            ("zeros", True, None),
            ("zeros", False, mask),
        ):
            options = dict(is_causal=is_causal, key_padding_mask=hidden)
            made.args.seq_parallel = False
            with install(tail=tail):
                expected, _ = made(whole, whole, whole, **options)
            made.args.seq_parallel = True
            part = None if hidden is None else mask.chunk(comm.size, 1)[comm.rank]
            with install(tail=tail):
                found, _ = made(mine, mine, mine, **{**options, "key_padding_mask": part})
            torch.testing.assert_close(found, expected.chunk(comm.size, 1)[comm.rank], rtol=0, atol=1e-12)
            (gradient,) = torch.autograd.grad(expected.square().sum(), whole)
            (part_of_it,) = torch.autograd.grad(found.square().sum(), mine)
            torch.testing.assert_close(part_of_it, gradient.chunk(comm.size, 1)[comm.rank], rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_two_ranks_compute_the_whole(peer: str) -> None:
    launch.run("gloo", 2, patched, peer)
