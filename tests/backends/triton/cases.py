"""Small cases for interpreters of Triton."""

from dilkit import BlockSparse, DilatedSegment, Documents, GlobalTokens, Pattern, SlidingWindow

TOGETHER = {
    "nested grouped": dict(pattern=Pattern([32, 64], [1, 2]), seq=64, heads=2, kv_heads=1),
    "nested causal": dict(pattern=Pattern([64, 128], [1, 2]), seq=75, heads=2, is_causal=True),
    "ragged mask": dict(pattern=Pattern([35, 50], [2, 1]), seq=50, heads=1, mask="random"),
    "once causal": dict(pattern=Pattern([30, 45], [2, 3], overlap="once"), seq=45, heads=1, is_causal=True),
    "softcap causal": dict(pattern=Pattern([32, 64], [1, 2]), seq=50, heads=2, kv_heads=1, is_causal=True, softcap=0.7),
    "softcap large": dict(pattern=Pattern([30, 45], [2, 3]), seq=45, heads=1, softcap=5.0, values="large query"),
    "softcap mask": dict(pattern=Pattern([64], [1]), seq=50, heads=2, softcap=2.0, mask="random"),
    "kinds mask": dict(
        pattern=Pattern.of(DilatedSegment(16, 4), SlidingWindow(5), GlobalTokens(2)), seq=35, heads=2, kv_heads=1, mask="random"
    ),
    "runs": dict(pattern=Pattern.of(BlockSparse.bigbird(9, 6, heads=2), Documents([5, 21, 40])), seq=50, heads=2, kv_heads=1),
    "alibi once": dict(pattern=Pattern([30, 45], [2, 3], overlap="once"), seq=45, heads=1, bias="alibi"),
    "table causal": dict(
        pattern=Pattern([32, 64], [1, 2]), seq=50, heads=2, kv_heads=1, is_causal=True, softcap=0.7, bias="clipped"
    ),
    "coordinates mask": dict(pattern=Pattern([64], [1]), seq=50, heads=2, mask="random", bias="euclidean"),
}
"""Branches of one group, and of several kinds: those of the list have segments too short for the rows of a tile."""
