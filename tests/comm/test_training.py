"""Training over ranks as it is done: accumulated gradients, DDP, split communicators, checkpoints, compiled modules."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import launch, train_rank
from helpers.project import ROOT, succeed
from helpers.train_rank import STEPS, Network, data, gradients, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dilkit.comm import Comm, PlanMismatch, copy_from_rank, positions, run_threads, shard, sum_over_ranks


def steps(comm: Comm, parts: int = 1, kind: str = "plain") -> list[Tensor]:
    """The parameters after some steps over ranks, each on `parts` parts of a batch."""
    network = Network(comm)
    call = CALLS[kind](network)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    x, y = (shard(whole, comm) for whole in data())
    for _ in range(STEPS):
        optimizer.zero_grad()
        for one, target in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (loss_of(call, one, target) / parts).backward()
        sum_over_ranks(gradients(network), comm)
        optimizer.step()
    return [p.detach() for p in network.parameters()]


CALLS = {
    "plain": lambda network: network,
    "checkpoint": lambda network: lambda x: checkpoint(network, x, use_reentrant=False),
    "reentrant": lambda network: lambda x: checkpoint(network, x.detach().requires_grad_(), use_reentrant=True),
    "compiled": lambda network: torch.compile(network, backend="aot_eager"),
}


def check(found: list[list[Tensor]]) -> None:
    """Bitwise the same on all ranks, and what one process finds."""
    for name, *everywhere in zip(Network(None).state_dict(), train_rank.alone(), *found, strict=True):
        expected, first, *others = everywhere
        assert all(torch.equal(first, other) for other in others), name
        torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_steps_of_an_optimizer_give_equal_weights(world_size: int) -> None:
    check(run_threads(world_size, steps))


def test_gradients_accumulate() -> None:
    check(run_threads(2, lambda comm: steps(comm, parts=2)))


@pytest.mark.parametrize("kind", ["checkpoint", "reentrant"])
def test_checkpointed_layers_are_computed_again_on_all_ranks(kind: str) -> None:
    check(run_threads(2, lambda comm: steps(comm, kind=kind)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_around_the_module() -> None:
    torch._dynamo.reset()
    check(run_threads(2, lambda comm: steps(comm, kind="compiled")))


def test_the_state_dict_is_that_of_one_rank() -> None:
    expected = Network(None).state_dict()
    for found in run_threads(2, lambda comm: Network(comm).state_dict()):
        assert list(found) == list(expected)
        Network(None).load_state_dict(found)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "name", "trainings"), [("gloo", "ddp", 2), ("openmpi", "split", 1)])
def test_two_replicas_of_two_ranks(tmp_path: Path, launcher: str, name: str, trainings: int) -> None:
    job = launch.start(launcher, 4, tmp_path, "train_rank.py", name).finish()
    assert job.code == 0, job
    assert job.text.count("is right") == 4 * trainings, job


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
def test_the_layout_of_the_page_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ranks.md").read_text()
    (program,) = re.findall(r'^```python title="layout.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^\$ python (.* layout.py)$", page, re.MULTILINE)
    (tmp_path / "layout.py").write_text(program + ALONE)
    succeed(sys.executable, *command.split(), cwd=tmp_path, OMP_NUM_THREADS="1")
    assert sorted(path.name for path in tmp_path.glob("right-*")) == [f"right-{rank}" for rank in range(4)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_over_ranks_are_the_same_everywhere(world_size: int, dtype: torch.dtype) -> None:
    whole = [torch.randn(world_size, *shape).to(dtype) for shape in ((7, 3), (), (0, 4), (11,))]
    wide = torch.promote_types(dtype, torch.float32)

    def work(comm: Comm) -> tuple[list[Tensor], int]:
        tensors = [x[comm.rank].clone() for x in whole]
        sum_over_ranks(tensors, comm)
        return tensors, comm.sent_bytes

    found = run_threads(world_size, work)
    for tensors, sent in found:
        for mine, x in zip(tensors, whole, strict=True):
            expected = torch.zeros(x.shape[1:], dtype=wide)
            for part in x.to(wide):
                expected = expected + part
            assert torch.equal(mine, expected.to(dtype))
        assert sent <= 2 * 33 * wide.itemsize
    assert sum(sent for _, sent in found) == 2 * (world_size - 1) * 33 * wide.itemsize


def test_what_cannot_be_summed_is_refused_on_all_ranks() -> None:
    def work(comm: Comm, wrong: object) -> type[BaseException]:
        good = torch.zeros(4)
        with pytest.raises((TypeError, PlanMismatch)) as caught:
            sum_over_ranks([good, wrong] if comm.rank else [good, good], comm)  # type: ignore[list-item]
        return caught.type

    assert run_threads(2, lambda comm: work(comm, torch.zeros(5))) == [PlanMismatch, PlanMismatch]
    for wrong in (None, torch.zeros(4, dtype=torch.int64)):
        assert run_threads(2, lambda comm, wrong=wrong: work(comm, wrong)) == [PlanMismatch, TypeError]


def test_parameters_are_copied_from_a_rank() -> None:
    def work(comm: Comm) -> list[Tensor]:
        network = nn.Linear(3, 2).to(torch.bfloat16)
        nn.init.constant_(network.weight, comm.rank)
        copy_from_rank([*network.parameters()], comm, source=1)
        with pytest.raises(ValueError, match="source=3 is no rank; ranks are 0 to 2"):
            copy_from_rank([], comm, source=3)
        assert positions(2, comm).tolist() == [2 * comm.rank, 2 * comm.rank + 1]
        return [p.detach() for p in network.parameters()]

    for found in run_threads(3, work):
        assert torch.equal(found[0], torch.ones(2, 3, dtype=torch.bfloat16))
