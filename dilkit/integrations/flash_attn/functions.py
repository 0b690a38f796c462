"""The functions of flash-attn for training and prefill, with its signatures."""

from __future__ import annotations

from torch import Tensor

from dilkit.integrations.flash_attn.calls import Options, Result, check_fit, check_starts, tensors_of, unpacked
from dilkit.integrations.flash_attn.pages import packed_pages

_BATCH, _PACKED = "(batch, seqlen, heads, head_dim)", "(total, heads, head_dim)"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute attention as flash-attn's function of this name, on any device.

        row i sees keys  i + seqlen_k - seqlen_q - left .. i + seqlen_k - seqlen_q + right        causal: right = 0

    Args:
        q: `(batch, seqlen_q, heads, head_dim)`, float64, float32, bfloat16 or float16, of any head_dim.
        k: `(batch, seqlen_k, heads_k, head_dim)`; `heads_k` divides `heads`.
        v: As `k`; its head_dim, that of `out`, may be another.
        dropout_p: Probability with which a weight is dropped; `torch.manual_seed` decides which.
        softmax_scale: Factor of the scores, by default `head_dim ** -0.5`.
        causal: Hide the keys behind the diagonal, which ends in the lower right corner.
        window_size: `(left, right)`; -1 leaves a side open.
        softcap: Scores are `softcap * tanh(score / softcap)`; 0 caps nothing.
        alibi_slopes: `(heads,)` or `(batch, heads)`: `-slope * |i + seqlen_k - seqlen_q - j|` is added to the scores.
        deterministic: Take a backend that gives the same bits in every run. CPU backends do.
        return_attn_probs: Return `(out, softmax_lse, S_dmask)`; the third is None without dropout.

    Returns:
        `out`, `(batch, seqlen_q, heads, head_dim)`. `softmax_lse` is `(batch, heads, seqlen_q)`, float32 (float64 for float64). A
        row that sees no key has `out = 0` and `softmax_lse = -inf`. `S_dmask`, `(batch, heads, seqlen_q, seqlen_k)`, is
        `exp(score - the row's largest)`, negative where the weight is dropped, for tests: it takes as long as its size.

    Raises:
        TypeError, ValueError: Arguments that do not fit, and FP8.

    Example:

        >>> import torch
        >>> from dilkit.integrations.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(1, 5, 4, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
        >>> out, lse, _ = flash_attn_func(q, k, v, causal=True, window_size=(32, 0), return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 5, 4, 16]), torch.Size([1, 4, 5]))
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = tensors_of(_BATCH, q=q, k=k, v=v)
    check_fit(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]} and q {q.shape[0]}; they must be equal")
    return Options(*options).attend(q, k, v)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of `kv`, `(batch, seqlen_k, 2, heads_k, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.randn(1, 5, 4, 16), torch.randn(1, 64, 2, 2, 16)).shape
    torch.Size([1, 5, 4, 16])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = unpacked("kv", kv, "(batch, seqlen_k, 2, heads_k, head_dim)")
    return flash_attn_func(q, k, v, *options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_func` of `qkv`, `(batch, seqlen, 3, heads, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(1, 64, 3, 4, 16), causal=True).shape
    torch.Size([1, 64, 4, 16])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = unpacked("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(q, k, v, *options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Compute `flash_attn_func` of packed sequences, each by itself.

    Args:
        q: `(total_q, heads, head_dim)`.
        k: `(total_k, heads_k, head_dim)`, or pages `(blocks, page, heads_k, head_dim)` with `block_table`.
        v: As `k`; its head_dim may be another.
        cu_seqlens_q: int32 `(batch + 1,)`: the first row of each sequence of `q`, then `total_q`.
        cu_seqlens_k: The same of the keys.
        max_seqlen_q: Length of the longest sequence of queries, or more.
        max_seqlen_k: Length of the longest sequence of keys, or more.
        dropout_p: This and the other options are those of `flash_attn_func`.
        block_table: int32 `(batch, pages)`: the block of each page of each sequence. The rows are copied out of their pages.

    Returns:
        `out`, `(total_q, heads, head_dim)`; `softmax_lse` is `(heads, total_q)`, and `S_dmask`
        `(batch, heads, longest_q, longest_k)`.

    Example:

        >>> import torch
        >>> from dilkit.integrations.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(3, 4, 16), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
        >>> starts_q, starts_k = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 8, 20]).int()
        >>> flash_attn_varlen_func(q, k, v, starts_q, starts_k, 2, 12, causal=True).shape
        torch.Size([3, 4, 16])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    if block_table is not None:
        k, v = packed_pages(k, v, cu_seqlens_k, block_table)
    q, k, v = tensors_of(_PACKED, q=q, k=k, v=v)
    check_fit(q, k, v)
    check_starts("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlen_q, q, "q")
    check_starts("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlen_k, k, "k")
    return Options(*options).attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of `kv`, `(total_k, 2, heads_k, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.flash_attn import flash_attn_varlen_kvpacked_func
    >>> starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> flash_attn_varlen_kvpacked_func(torch.randn(8, 4, 16), torch.randn(8, 2, 2, 16), starts, starts, 5, 5).shape
    torch.Size([8, 4, 16])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = unpacked("kv", kv, "(total_k, 2, heads_k, head_dim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Compute `flash_attn_varlen_func` of `qkv`, `(total, 3, heads, head_dim)`.

    >>> import torch
    >>> from dilkit.integrations.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> starts = torch.tensor([0, 3, 8], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(8, 3, 4, 16), starts, 5, causal=True).shape
    torch.Size([8, 4, 16])
    """
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = unpacked("qkv", qkv, "(total, 3, heads, head_dim)")
    check_starts("cu_seqlens", cu_seqlens, "max_seqlen", max_seqlen, q, "qkv")
    return Options(*options).attend_packed(q, k, v, cu_seqlens, cu_seqlens, max_seqlen)
