"""Long training, and training in several processes that have whole sequences each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from dilkit import Alibi, DilatedAttention, MultiheadDilatedAttention, Pattern
from dilkit.comm import Comm


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = DilatedAttention(Pattern([8, 64], [1, 4]), bias=Alibi(nn.Parameter(torch.ones(4))))
        self.attention = MultiheadDilatedAttention(16, 4, inner, is_causal=True, rotary=True)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attention(x)[0])


def sharded(size: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh, network = init_device_mesh("cpu", (size,)), Network()
    for module in (network.attention.attention, network.attention.out_proj, network.attention, network):  # children first
        fully_shard(module, mesh=mesh)
    return network


def same(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def data_parallel(comm: Comm, folder: Path) -> None:
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    alone = Network()
    whole = torch.randn(4, 70, 16)
    alone(whole).square().mean().backward()
    mine = whole.chunk(comm.size)[comm.rank]

    ddp = DistributedDataParallel(Network())
    ddp(mine).square().mean().backward()
    for p, q in zip(ddp.parameters(), alone.parameters(), strict=True):
        same(p.grad, q.grad)

    fsdp = sharded(comm.size)
    fsdp(mine).square().mean().backward()
    for p, q in zip(fsdp.parameters(), alone.parameters(), strict=True):
        same(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr]
    for network in (fsdp, alone):
        torch.optim.SGD(network.parameters(), 0.1).step()
    full = get_model_state_dict(fsdp, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if comm.rank == 0:
        for name, q in alone.state_dict().items():
            same(full[name], q)

    checkpoints.save({"model": fsdp.state_dict()}, checkpoint_id=folder / "saved")
    again = sharded(comm.size)
    state = {"model": again.state_dict()}
    checkpoints.load(state, checkpoint_id=folder / "saved")
    again.load_state_dict(state["model"])
    assert all(torch.equal(p.full_tensor(), q.full_tensor()) for p, q in zip(again.parameters(), fsdp.parameters(), strict=True))


@pytest.mark.slow
def test_ddp_and_fsdp_have_the_gradients_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("this torch has no fully_shard")
    launch.run("gloo", 2, data_parallel, tmp_path)
