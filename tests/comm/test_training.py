"""Training over ranks, with DDP and checkpoints."""

import re
import sys

import pytest
import torch
from helpers.launch import run
from helpers.project import ROOT, succeed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern
from dilkit.comm import MPIComm, RingDilatedAttention, TorchComm, run_threads, shard, sum_over_ranks

PATTERN = Pattern([8, 24, 96], [1, 2, 4])
SEQ, WIDTH, STEPS = 90, 16, 3


class Network(nn.Module):
    def __init__(self, comm):
        super().__init__()
        inner = DilatedAttention(PATTERN) if comm is None else RingDilatedAttention(PATTERN, comm)
        self.attention = MultiheadDilatedAttention(WIDTH, 4, inner, is_causal=True, rotary=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        draw = torch.Generator().manual_seed(0)  # ranks that are threads share that of torch
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2, generator=draw)

    def forward(self, x):
        return self.mlp(x + self.attention(x)[0])


def data(replica=0):
    generator = torch.Generator().manual_seed(replica)
    x, y = torch.randn(2, 2, SEQ, WIDTH, generator=generator)
    return x, y


def loss_of(network, x, y, rows=SEQ):
    return (network(x) - y).square().mean() * (x.shape[1] / rows)


def gradients(network):
    return [p.grad for p in network.parameters()]


def alone(replicas=1):
    network = Network(None)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            (loss_of(network, *data(replica)) / replicas).backward()
        optimizer.step()
    return [p.detach() for p in network.parameters()]


def steps(comm):
    network = Network(comm)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data())
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(network, x, y).backward()
        sum_over_ranks(gradients(network), comm)
        optimizer.step()
    return [p.detach() for p in network.parameters()]


def check(found):
    for name, *everywhere in zip(Network(None).state_dict(), alone(), *found, strict=True):
        expected, first, *others = everywhere
        assert all(torch.equal(first, other) for other in others), name
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_of_an_optimizer_give_equal_weights(world_size):
    check(run_threads(world_size, steps))


def two_replicas(world):
    """Two ranks share a sequence: DDP averages over replicas, and shards' gradients are summed."""
    replica = world.rank // 2
    if isinstance(world, MPIComm):
        from mpi4py import MPI

        comm = MPIComm(MPI.COMM_WORLD.Split(replica, world.rank), timeout=60.0)
        network = model = Network(comm)
        summed, share = world, 2
    else:
        layout = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
        comm = TorchComm(layout["sequence"].get_group(), timeout=60.0)
        network = Network(comm)
        model = DistributedDataParallel(network, process_group=layout["data"].get_group())
        summed, share = comm, 1
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data(replica))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(model, x, y) / share).backward()
        sum_over_ranks(gradients(network), summed)
        optimizer.step()
    for mine, expected in zip(network.parameters(), alone(replicas=2), strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-4, atol=1e-5)
    world.agree(repr([p.double().sum().item() for p in network.parameters()]).encode(), "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["gloo", "openmpi"])
def test_two_replicas_of_two_ranks(launcher):
    run(launcher, 4, two_replicas)


ALONE = """
from dilkit import DilatedAttention

alone = MultiheadDilatedAttention(32, 4, DilatedAttention(Pattern([16, 64], [1, 4])))
alone.load_state_dict(layer.state_dict())
for replica in range(2):
    torch.manual_seed(replica)
    (alone(torch.randn(1, 130, 32))[0].square().mean() / 2).backward()
for mine, expected in zip(layer.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)
open(f"right-{torch.distributed.get_rank()}", "w").close()
"""


@pytest.mark.slow
def test_the_layout_of_the_page_has_the_gradients_of_one_process(tmp_path):
    page = (ROOT / "docs" / "ranks.md").read_text()
    (program,) = re.findall(r'^```python title="layout.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^\$ python (.* layout.py)$", page, re.MULTILINE)
    (tmp_path / "layout.py").write_text(program + ALONE)
    succeed(sys.executable, *command.split(), cwd=tmp_path, OMP_NUM_THREADS="1")
    assert sorted(path.name for path in tmp_path.glob("right-*")) == [f"right-{rank}" for rank in range(4)]
