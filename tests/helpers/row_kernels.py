"""What the kernels of the sdpa backend that merge rows do, in torch: a stand-in that is given the same views."""

from __future__ import annotations

from torch import Tensor

from dilkit.backends.sdpa.accumulators import merge_lse


class TorchRows:
    """Merges and adds rows in fp32 (fp64 for fp64), and keeps the names of its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def merge(self, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Rows whose lse is -inf are not read."""
        self.calls.append("merge")
        merged, share, part_share = merge_lse(lse, part_lse)
        old, new = (
            weight.unsqueeze(-1) * x.to(lse.dtype).where((weight > 0).unsqueeze(-1), 0.0)
            for weight, x in ((share, out), (part_share, part))
        )
        out.copy_(old + new)
        lse.copy_(merged)

    def add(self, total: Tensor, part: Tensor) -> None:
        """Problems of `total` that are the same memory get the sum of theirs."""
        self.calls.append("add")
        shared = next((dim for dim in (0, 1) if total.shape[dim] > 1 and not total.stride(dim)), None)
        wide = part.double() if part.element_size() == 8 else part.float()
        if shared is not None:
            first, *others = wide.split(1, shared)
            for other in others:
                first = first + other
            wide, total = first, total.narrow(shared, 0, 1)
        total.copy_(wide + total)
