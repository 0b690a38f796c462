"""What is trained: the next byte of windows of a text, one window a replica in each step, whole or cut over ranks."""

from __future__ import annotations

import threading
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.comm import Comm, TorchComm, shard_cuts, sum_over_ranks
from dilkit.comm.collectives import gather_values
from dilkit.tools.demo.ranks.layout import Layout
from dilkit.tools.demo.ranks.record import RanksTraining
from dilkit.tools.demo.text.model import ByteTransformer, ModelConfig
from dilkit.tools.demo.text.task import held_out_windows, step_end
from dilkit.tools.demo.trainer import Task, Trainer


@dataclass(frozen=True)
class Setup:
    """All that decides on the training, but for where it runs."""

    train: bytes
    held_out: bytes
    config: ModelConfig
    layout: Layout
    seed: int
    steps: int


class WindowTask(Task):
    """The windows of a `Setup`: the same in the same order in each process, and judged on as many that are held out.

    `norms`: of the gradients of each step, before they are clipped. Clipping and Adam make up for a factor that all gradients
    have in common; their norms show it.
    """

    model: Any
    """A `ByteTransformer`, of which FSDP2 makes another class."""
    averaged_over = 1
    """Processes over which gradients are averaged."""

    def __init__(self, setup: Setup, model: ByteTransformer) -> None:
        self.setup, self.model = setup, model
        self.norms: list[float] = []
        self._text = torch.frombuffer(bytearray(setup.train), dtype=torch.uint8)
        held_out = held_out_windows(setup.held_out, setup.config.context)
        self._held_out = held_out[torch.arange(setup.layout.data) % len(held_out)]
        self._generator = torch.Generator().manual_seed(setup.seed)

    @abstractmethod
    def part(self, windows: Tensor) -> Tensor:
        """This process's part of the mean bits per byte of `windows` `(replicas, context + 1)`."""

    @abstractmethod
    def total(self, part: Tensor) -> float:
        """The sum of all parts."""

    def backward(self, spent: float) -> tuple[float, int]:
        context = self.setup.config.context
        starts = torch.randint(len(self._text) - context, (self.setup.layout.data,), generator=self._generator)
        part = self.part(torch.stack([self._text[start : start + context + 1] for start in starts]))
        torch.autograd.backward(part * self.averaged_over)
        self.norms.append(_norm(self.model))
        return self.total(part.detach()), len(starts) * context

    @torch.no_grad()
    def judge(self) -> float:
        return self.total(self.part(self._held_out))


class AloneTask(WindowTask):
    """Whole windows in one process. `world`: ranks that wait meanwhile, and learn of each step that they are not forgotten."""

    def __init__(self, setup: Setup, world: Comm, stop: threading.Event) -> None:
        torch.manual_seed(setup.seed)
        super().__init__(setup, ByteTransformer(setup.config))
        self._world, self._stop = world, stop

    def part(self, windows: Tensor) -> Tensor:
        mean: Tensor = self.model.bits_per_byte(windows)
        return mean

    def total(self, part: Tensor) -> float:
        return part.item()

    def clock(self, seconds: float) -> tuple[float, bool]:
        return step_end(self._world, seconds, self._stop)


class RanksTask(WindowTask):
    """This rank's rows of its replica's window; parameters sharded over the ranks of a sequence, and copied over replicas.

    `sent_bytes`: those that attention sent in the steps of training. `stop`: set on any rank, it ends the training on all.
    """

    def __init__(self, setup: Setup, world: Comm, stop: threading.Event) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (setup.layout.data, setup.layout.sequence), mesh_dim_names=("dp", "cp"))
        self._comm = TorchComm(mesh["cp"], timeout=world.timeout)
        torch.manual_seed(setup.seed)
        super().__init__(setup, ByteTransformer(setup.config, self._comm))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._replica = mesh["dp"].get_local_rank()
        cuts = shard_cuts(setup.config.context, setup.layout.sequence, setup.config.pattern)
        self._start, self._end = cuts[self._comm.rank : self._comm.rank + 2]
        self.averaged_over, self.sent_bytes = world.size, 0
        self._world, self._stop = world, stop

    def part(self, windows: Tensor) -> Tensor:
        mine = windows[self._replica, None, self._start : self._end + 1]  # the byte after its rows is the target of the last
        share: Tensor = self.model.bits_per_byte(mine) * ((self._end - self._start) / windows[:, 1:].numel())
        return share

    def total(self, part: Tensor) -> float:
        total = part.double()
        sum_over_ranks([total], self._world)
        return total.item()

    def backward(self, spent: float) -> tuple[float, int]:
        before = self._comm.sent_bytes
        found = super().backward(spent)
        self.sent_bytes += self._comm.sent_bytes - before
        return found

    def clock(self, seconds: float) -> tuple[float, bool]:
        return step_end(self._world, seconds, self._stop)


def _norm(model: nn.Module) -> float:
    norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return float(whole(norm))


def whole(tensor: Any) -> Tensor:
    """A tensor with what all ranks have of it; all of them ask for it."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    """The whole parameters of a model, by name."""
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def record(trainer: Trainer, task: WindowTask) -> RanksTraining:
    """The course of a training so far."""
    threads = torch.get_num_threads()
    return trainer.record(RanksTraining, seed=task.setup.seed, norms=tuple(task.norms), threads=threads)


@dataclass(frozen=True)
class Trained:
    """What a training came to: its course, the whole parameters, and the bytes that attention sent on each rank."""

    training: RanksTraining
    parameters: dict[str, Tensor]
    sent_bytes: tuple[int, ...]


def trained(trainer: Trainer, task: RanksTask, world: Comm) -> Trained:
    """What a training on ranks came to, on each of them."""
    sent = tuple(gather_values(world, task.sent_bytes))
    return Trained(record(trainer, task), parameters(task.model), sent)
