"""A problem in words, as results have it."""

from __future__ import annotations

from dilkit.problem import Problem


def problem_text(problem: Problem, tokens: str = "tokens") -> str:
    """Return the passes and the sizes without the pattern, such as "forward, 1 x tokens x 8 heads x 64, float32, causal"."""
    heads = f"{problem.heads} heads" + (f" over {problem.kv_heads}" if problem.kv_heads != problem.heads else "")
    flags = f"{', causal' * problem.is_causal}{', masked' * problem.key_padding_mask}"
    passes = "forward + backward" if problem.requires_grad else "forward"
    return f"{passes}, {problem.batch} x {tokens} x {heads} x {problem.head_dim}, {problem.dtype}{flags}"
