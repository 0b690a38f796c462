"""`KeptBias`: the bias of a module, whose slopes or table are a part of the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from dilkit.bias.base import Bias
from dilkit.checks import shown

if TYPE_CHECKING:
    from dilkit.nn.rank_heads import RankHeads


class KeptBias(nn.Module):
    """A module that holds a bias: its weights are `bias_weights` of the state dict, a parameter if they are an `nn.Parameter`."""

    bias_weights: Tensor
    of_model: Bias | None
    """The bias that was given, of all heads of the model."""
    _rank_heads: RankHeads | None = None
    """The heads of the rank, of which the bias is then; `HeadParallel` sets them."""

    def _keep_bias(self, bias: Bias | None) -> None:
        """Its weights become a part of this module."""
        if bias is not None and not isinstance(bias, Bias):
            raise TypeError(f"bias={shown(bias)} is a {type(bias).__name__}; a value such as dilkit.Alibi is needed")
        self.of_model = bias
        weights = None if bias is None else bias.weights
        if weights is None or isinstance(weights, nn.Parameter):
            self.register_parameter("bias_weights", weights)
        else:
            self.register_buffer("bias_weights", weights)

    @property
    def bias(self) -> Bias | None:
        """The bias with the weights that this module has now, of the heads that it computes."""
        if self.of_model is None:
            return None
        weights, ranks = self.bias_weights, self._rank_heads
        return self.of_model.with_weights(weights if ranks is None else ranks.part_of_all(weights))
