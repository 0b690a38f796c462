"""Tiny random models of transformers, and batches for them."""

from functools import partial

import pytest
import torch
from torch import Tensor

from dilkit import Pattern

PATTERN = Pattern([4, 16], [1, 2])
"""A pattern that sees a part of a few dozen tokens; heads differ."""
LENGTHS = (5, 16, 23, 1)
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=128,
    pad_token_id=0,
)


def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed (pip install dilkit[transformers])")


def _of(family: str, kind: str = "ForCausalLM", grouped: bool = True, **options):
    package, heads = transformers(), dict(num_key_value_heads=2) if grouped else {}
    torch.manual_seed(1)
    made = getattr(package, f"{family.removesuffix('Text')}{kind}")
    return made(getattr(package, f"{family}Config")(**(SIZES | heads | options))).eval()


EXPERTS = dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1)
LATENT = dict(q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, first_k_dense_replace=2)
llama, qwen2, qwen3 = partial(_of, "Llama"), partial(_of, "Qwen2"), partial(_of, "Qwen3", head_dim=8)
bert = partial(_of, "Bert", "Model", grouped=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
gpt_oss = partial(_of, "GptOss", layer_types=["full_attention"] * 2, **EXPERTS)
deepseek = partial(_of, "DeepseekV3", grouped=False, num_key_value_heads=4, v_head_dim=4, **LATENT)
deepseek_v2 = partial(_of, "DeepseekV2", grouped=False, num_key_value_heads=4, v_head_dim=16, **LATENT)
"""The values of the first are narrower than its keys, those of the second wider."""
WINDOW = 6
ALTERNATING = dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
CAPPED = dict(head_dim=8, attn_logit_softcapping=0.001, query_pre_attn_scalar=1)
ENDS = dict.fromkeys(["bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"], 1)
WINDOWED = dict(
    mistral=partial(_of, "Mistral", sliding_window=WINDOW),
    gemma2=partial(_of, "Gemma2", **CAPPED, **ALTERNATING),
    gemma3=partial(_of, "Gemma3Text", head_dim=8, **ALTERNATING),
    qwen2=partial(qwen2, use_sliding_window=True, **ALTERNATING),
    gpt_oss=partial(gpt_oss, **ALTERNATING),
)
"""Models with a window in all layers, or in the first of two."""
TWO_SIDED = dict(
    modernbert=partial(_of, "ModernBert", "Model", False, local_attention=2 * WINDOW, global_attn_every_n_layers=2, **ENDS),
    embedding_gemma=partial(_of, "Gemma3Text", "TextModel", head_dim=8, use_bidirectional_attention=True, **ALTERNATING),
)
"""Encoders with windows on both sides of a token in one of two layers."""
MODELS = dict(llama=llama, qwen2=qwen2, qwen3=qwen3, bert=bert, gpt_oss=gpt_oss, deepseek=deepseek)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(3, SIZES["vocab_size"], (length,)) for length in lengths]


def padded(parts: list[Tensor], side: str) -> dict[str, Tensor]:
    """Pad sequences to a batch with a mask: on the left, on the right, or in the midst of the longest two."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left" if side == "left" else "right")
    ids, mask = pad(parts), pad([torch.ones_like(x) for x in parts])
    if side == "between":
        mask[1:3, 3:5] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    return dict(input_ids=ids, attention_mask=mask, position_ids=places)


def packed(parts: list[Tensor]) -> dict[str, Tensor]:
    ids = torch.cat(parts)[None]
    return dict(input_ids=ids, position_ids=torch.cat([torch.arange(len(x)) for x in parts])[None])


def result(model, **inputs) -> Tensor:
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def alone(model, parts: list[Tensor]) -> list[Tensor]:
    return [result(model, input_ids=x[None])[0] for x in parts]
