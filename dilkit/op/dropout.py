"""Attention dropout: whether a weight is dropped depends on the seed of the call and on the place of the weight alone.

    words = philox(key: seed,  counter: j // 4, i, batch, head)        Philox 4x32 of 7 rounds: four words of 32 bits
    kept[batch, head, i, j] = words[j % 4] >= round(p * 2 ** 32)

The p that holds is that multiple of 2 ** -32, also in the factor of the weights that are kept. So passes, backends, instruction
sets, threads and ranks agree without a mask in memory. Seven rounds are the fewest that pass BigCrush (Salmon et al., Parallel
random numbers: as easy as 1, 2, 3, 2011).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import traceback as fx_traceback
from torch.utils.checkpoint import CheckpointPolicy

from dilkit.device import capturing
from dilkit.op.boundary import check_memory, check_tensor
from dilkit.op.schema import library
from dilkit.problem import Problem

PLACES = 5

_ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW = 2**32 - 1

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""Four words of 32 bits, in int64."""


class Dropout(NamedTuple):
    """The weights of a call that are dropped, each with the probability `p`; the others are multiplied by `1 / (1 - p)`.

    `seed`: int64 `()` on the CPU, as it was drawn; for a backend its number. `first_batch`, `first_head`: the numbers of the
    first sequence and query head of the tensors. `places`, in place of both, int64 `(batch, 5)`, contiguous, on the CPU: for each
    element of the batch its sequence, first head, first query and first key, and the step from row to row.
    """

    p: float
    seed: Any
    first_batch: int = 0
    first_head: int = 0
    places: Tensor | None = None

    @property
    def threshold(self) -> int:
        """Words below it drop their weight: `p` in units of 2 ** -32."""
        return round(self.p * 2**32)

    @property
    def factor(self) -> float:
        """Factor of the weights that are kept: one over the probability of keeping them."""
        return 2**32 / (2**32 - self.threshold)

    def of_sequence(self, number: int) -> Dropout:
        return self._replace(first_batch=self.first_batch + number)

    def kept(self, heads: int, rows: Tensor, keys: Tensor, batch: int) -> Tensor:
        """Bool `(batch, heads, len(rows), len(keys))`: which weights of these rows with these keys, int64, are kept."""
        device = rows.device
        lines = self.places
        if lines is None:
            numbers = [[self.first_batch + b, self.first_head, 0, 0, 1] for b in range(batch)]
            lines = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, PLACES)
        number, head, query, key, step = (x[:, None, None, None] for x in lines.to(device).unbind(1))
        i, j = query + step * rows[:, None], key + step * keys
        h = head + torch.arange(heads, device=device)[:, None, None]
        counter = (j >> 2) & _LOW, i & _LOW, number, h | (i >> 32) << 16 | (j >> 34) << 24
        a, b, c, d = philox(counter, self.seed)
        word = torch.where(j & 2 == 0, torch.where(j & 1 == 0, a, b), torch.where(j & 1 == 0, c, d))
        return word >= self.threshold


def philox(counter: Words, seed: int) -> Words:
    """Philox 4x32 of a counter, whose tensors broadcast, and a key of 64 bits."""
    x0, x1, x2, x3 = counter
    keys = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]  # which wrap around: their 64 bits are right
        x0, x1 = (product1 >> 32) & _LOW ^ x1 ^ keys[0], product1 & _LOW
        x2, x3 = (product0 >> 32) & _LOW ^ x3 ^ keys[1], product0 & _LOW
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return x0, x1, x2, x3


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """Draw the seed of a call, int64 `()`, from a CPU generator, by default torch's own."""
    seed = torch.randint(2**63 - 1, (), generator=generator, dtype=torch.int64, device="cpu")
    return _saved_seed(seed) if torch.compiler.is_compiling() else seed


def _save(seed: Tensor) -> Tensor:
    """Have a compiled graph keep the seed for its backward pass, which else may draw another to spare memory."""
    meta = fx_traceback.current_meta
    before = {**meta}
    _check_budget((meta.get("custom") or {}).get("_region_activation_memory_budget"))
    try:
        meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with torch._C._AutoDispatchBelowAutograd():
            return _saved_seed(seed)
    finally:
        meta.clear()
        meta.update(before)


def _check_budget(of_region: float | None) -> None:
    """Raise ValueError where torch saves nothing at all for the backward pass of a compiled graph."""
    from torch._functorch import config

    if torch.is_grad_enabled() and (config.activation_memory_budget if of_region is None else of_region) == 0:
        way = "take more than 0, such as 0.01, or torch.utils.checkpoint, or dropout_p=0"
        raise ValueError(f"activation_memory_budget=0 has the backward pass drop other weights than the forward pass; {way}")


library.define("saved_seed(Tensor seed) -> Tensor")
library.impl("saved_seed", Tensor.clone, "CompositeExplicitAutograd")
library.impl("saved_seed", _save, "Autograd")
torch.library.register_fake("dilkit::saved_seed", torch.empty_like, lib=library)
_saved_seed: Callable[[Tensor], Tensor] = torch.ops.dilkit.saved_seed.default


def dropout_of(problem: Problem, drawn: Dropout | None) -> Dropout | None:
    """Return the dropout of a call as backends take it, None for none. Raises TypeError or ValueError for unfit tensors."""
    seed, places = (None, None) if drawn is None else (drawn.seed, drawn.places)
    if problem.varlen and places is not None:
        raise ValueError("dropout_places and cu_seqlens cannot go together; the places of packed sequences are their own")
    if problem.dropout_p == 0:
        return None
    _check_int64("dropout_seed", seed, (), "dilkit.op.dropout.draw_seed()")
    if places is not None:
        _check_int64("dropout_places", places, (problem.batch, PLACES), "a line for each element of the batch")
    if problem.device.type == "cuda" and capturing(torch.device("cuda", problem.device.index)):
        raise RuntimeError("dropout_p > 0 in a CUDA graph: every replay would drop the same weights; use dropout_p=0")
    assert seed is not None
    return Dropout(problem.dropout_p, int(seed), first_head=problem.first_head, places=places)


def _check_int64(name: str, given: object, shape: tuple[int, ...], way: str) -> None:
    x = check_tensor(name, given, f"an int64 torch.Tensor {shape} on the CPU ({way})")
    if x.dtype != torch.int64 or x.device.type != "cpu" or x.shape != shape or not x.is_contiguous():
        actual = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} is {actual}; torch.int64 {shape} on the CPU, contiguous, is needed ({way})")
    check_memory((name,), (x,))
