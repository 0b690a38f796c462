"""What a patch sees under each order: the pattern's count, its rows and columns put back into their places in the picture."""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from dilkit.tools.demo.image.model import ImageConfig
from dilkit.tools.results.kinds.demo_image import CURVES, Sight

REACHES = (1, 2, 3)
"""Neighbourhoods that are counted: all patches up to so many steps away, down, across or both."""
QUERIES = {"in the middle": (1 / 2, 1 / 2), "beside the middle": (3 / 8, 5 / 8)}
"""About where the patches are that are shown, as shares of height and width. In the middle segments end."""


class PatternSight:
    """What some query patches see under each order."""

    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        ranks = {curve: torch.tensor(config.order(curve).rank).long() for curve in CURVES}
        count = config.pattern.count(config.cells, config.heads)
        self._count = {curve: count[:, rank][:, :, rank] for curve, rank in ranks.items()}
        self.queries = {name: self._query(ranks, where) for name, where in QUERIES.items()}

    def _query(self, ranks: dict[str, Tensor], where: tuple[float, float]) -> int:
        """The patch nearest to `where` that keeps the same rows of every branch under all orders.

        It takes part in as many branches then, and sees as many patches: what differs is where they lie.
        """
        period = lcm(*self.config.pattern.dilation_rates)
        first, *others = (rank % period for rank in ranks.values())
        alike = torch.stack([first == other for other in others]).all(0)
        away = (self.config.places - self.config.grid * torch.tensor(where)).square().sum(-1)
        return int(away.masked_fill(~alike, torch.inf).argmin())

    def of(self, query: int, curve: str) -> Tensor:
        """In how many branches the patch `query` sees each patch, `(grid, grid)`, in a head in which it takes part in most."""
        count = self._count[curve][:, query]
        return torch.unflatten(count[count.sum(1).argmax()], -1, (self.config.grid, self.config.grid))

    def neighbours_seen(self, curve: str, reach: int) -> float:
        """The share of the patches within `reach` that a patch sees in some head, over all patches."""
        steps = (self.config.places[:, None] - self.config.places).abs().amax(-1)
        near = (steps <= reach) & (steps > 0)
        return (((self._count[curve] > 0).any(0) & near).sum() / near.sum()).item()

    def facts(self) -> Sight:
        """The counts that a report shows."""
        seen = {curve: tuple(int((self.of(query, curve) > 0).sum()) for query in self.queries.values()) for curve in CURVES}
        shares = {curve: tuple(self.neighbours_seen(curve, reach) for reach in REACHES) for curve in CURVES}
        queries = {name: divmod(query, self.config.grid) for name, query in self.queries.items()}
        return Sight(queries=queries, keys_seen=seen, reaches=REACHES, neighbours_seen=shares)
