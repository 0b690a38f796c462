"""The masks of FlexAttention that `Pattern` inherits: by arithmetic, without a matrix of all pairs.

block_mask   blocks of 128 queries and keys in which some pair is seen, and those in which all are
mask_mod     True where count[h, i, j] > 0
score_mod    score + log count[h, i, j], where a key may count more than once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from dilkit.checks import boolean, integer
from dilkit.pattern.checks import PatternError
from dilkit.pattern.lowering.forms import Given, Unlowered

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from dilkit.pattern.flex.pairs import Shows
    from dilkit.pattern.lowering.lower import Forms
    from dilkit.pattern.pattern import Pattern

Mod = Callable[..., Any]


class FlexMasks:
    """Methods of a pattern that make the masks of `torch.nn.attention.flex_attention`."""

    def block_mask(
        self, seq: int, heads: int, *, kv_heads: int | None = None, is_causal: bool = False, device: str | torch.device = "cpu"
    ) -> BlockMask:
        """Return the `BlockMask` of `heads` query heads on `seq` tokens, with `mask_mod`.

        A call of `flex_attention` takes it with `score_mod`, on tensors `(batch, heads, seq, head_dim)`. Raises `PatternError`
        for sizes that do not fit, and for a pattern that says its pairs in each call or one by one beyond 32,768 tokens.

            >>> import torch
            >>> from torch.nn.attention.flex_attention import flex_attention
            >>> from dilkit import Pattern, dilated_attention
            >>> pattern = Pattern([128, 512], [1, 4])
            >>> query, key, value = torch.randn(3, 1, 4, 512, 16).unbind()  # (batch, heads, seq, head_dim)
            >>> blocks = pattern.block_mask(512, heads=4)
            >>> out = flex_attention(query, key, value, pattern.score_mod(512, heads=4), blocks)
            >>> expected = dilated_attention(*(x.transpose(1, 2) for x in (query, key, value)), pattern)
            >>> torch.allclose(out.transpose(1, 2), expected, atol=1e-5)
            True
        """
        from torch.nn.attention.flex_attention import BlockMask

        from dilkit.pattern.flex.blocks import BLOCK, blocks_of, ended, listed

        forms, _ = self._flex(seq, heads, kv_heads, is_causal, device)
        some, whole = ended(*blocks_of(forms, -(-seq // BLOCK) * BLOCK, heads, is_causal), seq)
        (counts, blocks), (whole_counts, whole_blocks) = (
            tuple(x[None].to(device) for x in listed(marked)) for marked in (some & ~whole, whole)
        )
        mask_mod = self.mask_mod(seq, heads, kv_heads=kv_heads, is_causal=is_causal, device=device)
        sizes: dict[str, Any] = dict(BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(seq, seq))
        return BlockMask.from_kv_blocks(counts, blocks, whole_counts, whole_blocks, **sizes)

    def mask_mod(
        self, seq: int, heads: int, *, kv_heads: int | None = None, is_causal: bool = False, device: str | torch.device = "cpu"
    ) -> Mod:
        """Return `mask_mod(b, h, i, j)`, True where query i of head h sees key j. Raises as `block_mask` does."""
        _, count = self._flex(seq, heads, kv_heads, is_causal, device)

        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen = (count(h, i, j) > 0) & (i < seq) & (j < seq)
            return cast("Tensor", seen & (j <= i) if is_causal else seen)

        return mask_mod

    def score_mod(
        self, seq: int, heads: int, *, kv_heads: int | None = None, is_causal: bool = False, device: str | torch.device = "cpu"
    ) -> Mod | None:
        """Return `score_mod(score, b, h, i, j)`, which adds the logarithm of the count; None where no key counts twice.

        Raises as `block_mask` does.
        """
        import torch

        from dilkit.pattern.flex.pairs import shown_by_several

        forms, count = self._flex(seq, heads, kv_heads, is_causal, device)
        if not shown_by_several(forms, cast("Pattern", self).overlap):
            return None

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            wide = torch.float64 if score.dtype == torch.float64 else torch.float32
            return score + torch.log(count(h, i, j).clamp(min=1).to(wide))

        return score_mod

    def _flex(
        self, seq: int, heads: int, kv_heads: int | None, is_causal: bool, device: str | torch.device
    ) -> tuple[Forms, Shows]:
        import torch

        from dilkit.pattern.flex.blocks import BLOCK
        from dilkit.pattern.flex.pairs import counter
        from dilkit.pattern.lowering.lower import lower

        pattern = cast("Pattern", self)
        integer("seq", seq, at_least=1)
        boolean("is_causal", is_causal)
        pattern.check_heads(integer("heads", heads, at_least=1), kv_heads)
        pattern.check_seq(seq)
        if not is_causal:
            pattern.check_tokens(seq)
        if pattern.tail != "exact":
            raise PatternError(f"tail={pattern.tail!r} adds keys that no mask can show; use tail='exact'")
        forms = lower(pattern, seq, heads, kv_heads)
        for form in forms:
            if isinstance(form, (Given, Unlowered)):
                why = form.why if isinstance(form, Unlowered) else "each call gives what it shows"
                raise PatternError(f"branch {pattern.branches[form.branch].call()} has no mask of its own: {why}")
        return forms, counter(forms, -(-seq // BLOCK) * BLOCK, torch.device(device))
