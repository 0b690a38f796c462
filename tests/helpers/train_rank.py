"""Trainings over ranks, as tests run them: on threads, or by `train_rank.py <launcher> <name>` on one of several processes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.rank import connect, say
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dilkit import DilatedAttention, MultiheadDilatedAttention, Pattern
from dilkit.comm import Comm, MPIComm, RingDilatedAttention, TorchComm, shard, sum_over_ranks
from dilkit.comm.launch import ranks
from dilkit.tools import cli
from dilkit.tools.demo.text.model import ModelConfig
from dilkit.tools.demo.text.record import Budget
from dilkit.tools.demo.text.task import TextTask, held_out_windows
from dilkit.tools.demo.trainer import Trainer

PATTERN = Pattern([8, 24, 96], [1, 2, 4])
SEQ, WIDTH, STEPS = 90, 16, 3
CONFIG = ModelConfig(context=1024, width=32, layers=2)
BUILDING = threading.Lock()
"""Ranks that are threads share torch's generator."""
TEXT = bytes(i * i % 251 for i in range(8000))


class Network(nn.Module):
    """Attention over ranks, or without, between two layers that look at each row by itself."""

    def __init__(self, comm: Comm | None) -> None:
        super().__init__()
        inner = DilatedAttention(PATTERN) if comm is None else RingDilatedAttention(PATTERN, comm)
        with BUILDING:
            torch.manual_seed(0)
            self.attention = MultiheadDilatedAttention(WIDTH, 4, inner, is_causal=True, rotary=True)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x)[0])


def data(replica: int = 0) -> tuple[Tensor, Tensor]:
    """Sequences and targets, whole."""
    generator = torch.Generator().manual_seed(replica)
    x, y = torch.randn(2, 2, SEQ, WIDTH, generator=generator)
    return x, y


def loss_of(network: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, rows: int = SEQ) -> Tensor:
    """This rank's part of the mean over a whole sequence of `rows` rows."""
    return (network(x) - y).square().mean() * (x.shape[1] / rows)


def gradients(network: nn.Module) -> list[Tensor]:
    return [p.grad for p in network.parameters()]  # type: ignore[misc]


def alone(replicas: int = 1) -> list[Tensor]:
    """The parameters after some steps on one rank, each on the mean over `replicas` batches."""
    network = Network(None)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for replica in range(replicas):
            (loss_of(network, *data(replica)) / replicas).backward()
        optimizer.step()
    return [p.detach() for p in network.parameters()]


def demo_losses(comm: Comm) -> dict[str, Any]:
    """Twenty steps of the demo, on short and on whole windows: all losses, and the parameters."""
    task = TextTask(TEXT, held_out_windows(TEXT, CONFIG.context)[:2], CONFIG, 0, comm)
    trainer = Trainer(task, Budget(steps=20))
    trainer.run(8, lambda: None, lambda: None)
    losses = [loss for *_, loss in trainer.curve] + [point.held_out for point in trainer.points]
    return dict(losses=losses, parameters=[p.detach().clone() for p in task.model.parameters()])


def demo(comm: Comm) -> None:
    """Print the losses, which are the same on all ranks."""
    found = demo_losses(comm)
    comm.agree(repr([p.double().sum().item() for p in found["parameters"]]).encode(), "parameters")
    if comm.rank == 0:
        say(json.dumps(found["losses"]))


def check(comm: Comm, network: nn.Module, replicas: int) -> None:
    """The parameters are what one process finds, and the same on all ranks."""
    for mine, expected in zip(network.parameters(), alone(replicas), strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-4, atol=1e-5)
    comm.agree(repr([p.double().sum().item() for p in network.parameters()]).encode(), "parameters")
    say(f"rank {comm.rank} of {comm.size} is right")


def ddp(world: Comm) -> None:
    """A layout of two dimensions, in both ways."""
    layout = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("data", "sequence"))
    comm = TorchComm(layout["sequence"].get_group(), timeout=60.0)
    replica, fellows = layout["data"].get_local_rank(), layout["data"].get_group()
    check(world, ddp_over_all(comm, replica), world.size // 2)
    check(world, ddp_over_replicas(comm, replica, fellows), world.size // 2)


def ddp_over_all(comm: Comm, replica: int) -> Network:
    """DDP over all ranks averages over replicas and over shards alike: the loss is scaled by the number of shards."""
    network = Network(comm)
    wrapped = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data(replica))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(wrapped, x, y) * comm.size).backward()
        optimizer.step()
    return network


def ddp_over_replicas(comm: Comm, replica: int, fellows: dist.ProcessGroup) -> Network:
    """DDP over replicas averages over them; after it, gradients are summed over the shards. A batch comes in two halves."""
    network = Network(comm)
    wrapped = DistributedDataParallel(network, process_group=fellows)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data(replica))
    for _ in range(STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            (loss_of(wrapped, x[:1], y[:1]) / 2).backward()
        (loss_of(wrapped, x[1:], y[1:]) / 2).backward()
        sum_over_ranks(gradients(network), comm)
        optimizer.step()
    return network


def split(world: Comm) -> None:
    """The same with communicators that MPI has split: gradients are summed over all ranks, the loss is a replica's share."""
    from mpi4py import MPI

    replicas = world.size // 2
    replica = world.rank // 2
    comm = MPIComm(MPI.COMM_WORLD.Split(replica, world.rank), timeout=60.0)
    network = Network(comm)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data(replica))
    for _ in range(STEPS):
        optimizer.zero_grad()
        (loss_of(network, x, y) / replicas).backward()
        sum_over_ranks(gradients(network), world)
        optimizer.step()
    check(world, network, replicas)


def failing_demo(launcher: str, folder: str) -> int:
    """`dilkit demo`, in which rank 1 fails in the second step."""
    backward = TextTask.backward

    def fail(self: TextTask, spent: float) -> tuple[float, int]:
        if self.comm.rank == 1 and spent:
            raise ZeroDivisionError("this one's own fault")
        return backward(self, spent)

    TextTask.backward = fail  # type: ignore[method-assign]
    return run_demo(launcher, folder)


def run_demo(launcher: str, folder: str, *more: str) -> int:
    """`dilkit demo --comm ...` on a small text."""
    kind = "torch" if launcher == "gloo" else "mpi"
    if kind == "torch":  # as under torchrun, but ranks meet at a file
        ranks.connect = lambda kind, timeout: connect(launcher, timeout)
    paths = ["--text", str(Path(folder, "text")), "--out", str(Path(folder, "out"))]
    length = more or ("--steps", "3")
    return cli.main(["demo", "--comm", kind, "--context", "256", "--threads", "1", "--timeout", "20", *paths, *length])


def ranks_demo(launcher: str, folder: str, layout: str) -> int:
    """`dilkit demo --ranks`, as one of torchrun's ranks."""
    ranks.connect = lambda kind, timeout: connect(launcher, timeout)
    paths = ["--text", str(Path(folder, "text")), "--out", str(Path(folder, "out"))]
    return cli.main(["demo", "--ranks", layout, "--context", "128", "--steps", "3", "--threads", "1", *paths])


def rank_of_demo(launcher: str, folder: str) -> int:
    """A rank that `dilkit demo --ranks` has started."""
    from dilkit.tools.demo.ranks import rank

    ranks.connect = lambda kind, timeout: connect(launcher, timeout)
    sys.argv[1:] = [folder]
    return rank.main()


def write_text(folder: Path) -> Path:
    """Some files of text to train on, in `folder`/text."""
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"file{i}.txt").write_text("".join(f"line {j} of file {i}: {i * j}\n" for j in range(40)))
    return folder / "text"


if __name__ == "__main__":
    launcher, name, *arguments = sys.argv[1:]
    if "demo" in name and arguments:
        sys.exit(globals()[name](launcher, *arguments))
    globals()[name](connect(launcher, 60.0))
