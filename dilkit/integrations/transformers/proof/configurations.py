"""Tiny configurations of any class of transformers.

A configuration has the sizes in `SMALL` that its class has. Several `VARIANTS` are tried, and then `scaled`: the usual sizes,
divided by one factor.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

SEQ, VOCABULARY, IMAGE = 20, 64, 32


def _sizes(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **_sizes(32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size decoder_hidden_size"),
    **_sizes(32, "model_dim word_embed_proj_dim emb_dim d_embed projection_dim lru_width"),
    **_sizes(32, "output_dim out_hidden_size image_size crop_size upsample_groups"),
    **_sizes(48, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim d_inner mlp_dim"),
    **_sizes(16, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size num_mel_bins"),
    **_sizes(16, "q_lora_rank kv_lora_rank qk_head_dim mamba_d_head"),
    **_sizes(2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth"),
    **_sizes(2, "num_encoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk type_vocab_size num_codebooks"),
    **_sizes(2, "eos_token_id mamba_expand encoder_num_hidden_layers top_k_experts"),
    **_sizes(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"),
    **_sizes(4, "encoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads"),
    **_sizes(8, "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size mamba_d_state mamba_chunk_size"),
    **_sizes(8, "relative_attention_num_buckets ssm_state_size hidden_size_per_layer_input"),
    "vocabulary_map": {"<image>": 3},
    **_sizes(1, "n_group topk_group first_k_dense_replace n_shared_experts bos_token_id decoder_start_token_id mamba_n_groups"),
    **_sizes(3, "num_channels mask_token_id prediction_length image_token_id image_token_index video_token_index"),
    **_sizes(VOCABULARY, "vocab_size codebook_size index_topk vocab_size_per_layer_input mamba_d_ssm"),
    **_sizes(128, "max_position_embeddings n_positions n_ctx max_target_positions max_source_positions max_seq_len seq_length"),
    **_sizes(128, "attention_window window_size"),
    "sliding_window": 1024,  # longer than any sequence, as the pattern is dense
    **_sizes(
        0,
        "num_kv_shared_layers pad_token_id attention_dropout hidden_dropout_prob attention_probs_dropout_prob dropout layerdrop",
    ),
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    *({"num_hidden_layers": count} for count in (4, 8, 12)),
    *({"head_dim": width} for width in (16, 32, 64, 128)),
    {"head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8},
    {"head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8, "num_hidden_layers": 8},
    {"head_dim": 16, "qk_rope_head_dim": 16},
    {"attn_layer_indices": [1]},
    {"rope_parameters": ROPE},
    {"rope_parameters": {"full_attention": ROPE}},
    {"mlp_layer_types": ["dense", "sparse"]},
    {"window_size": 2},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"layer_types": ["sliding_attention", "sliding_attention"]},
    {"layer_types": ["linear_attention", "full_attention"], "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8},
    {"head_dim": 128, "num_hidden_layers": 4},
    {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 4},
    {"hidden_size": 512, "num_hidden_layers": 4},
)


def config_of(kind: Any, variant: dict[str, Any]) -> Any:
    known, sizes = _known(kind), copy.deepcopy(SMALL | variant)  # classes change what they are given
    chosen = {name: size for name, size in sizes.items() if name in known and not _fixed(kind, name)}
    for name, part in _parts(kind).items():
        chosen[name] = config_of(part, variant).to_dict()
    for _ in range(10):  # without the sizes that an error names
        try:
            return kind(**chosen)
        except Exception as error:
            named = [name for name in chosen if name in str(error)]
            if not named:
                raise
            for name in named:
                del chosen[name]
    return kind()


def _known(kind: Any) -> set[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        names |= {*vars(base).get("__annotations__", {})}
        if "__init__" in vars(base):
            names |= {*inspect.signature(base.__init__).parameters}
    return names


def _fixed(kind: Any, name: str) -> bool:
    usual = getattr(kind, name, 0)
    if name == "rope_parameters" and "vocab_size" not in _known(kind):  # of images
        return True
    if name == "num_key_value_heads" and usual == 1:
        return True
    return isinstance(usual, (list, tuple)) or (usual is None and name in ("q_lora_rank", "window_size", "n_inner"))


def _parts(kind: Any) -> dict[str, Any]:
    parts = getattr(kind, "sub_configs", None) or {}
    usual = kind() if parts else None
    return {name: type(part) for name in parts if (part := getattr(usual, name, None)) is not None}


UNSCALED = ("image_size", "spec_size", "patch", "rate", "kernel", "stride", "factor", "shape", "mel", "ratio")
DEPTHS = ("layers", "depth", "n_layer", "num_blocks")


def configurations(kind: Any) -> Iterator[Any]:
    """Yield tiny configurations of the class `kind`, each once, the simplest first. Raises the first error if there are none."""
    made: list[Any] = []
    errors: list[Exception] = []
    makes = [partial(config_of, kind, variant) for variant in VARIANTS]
    makes += [partial(scaled, kind, factor, heads) for factor, heads in ((16, 16), (8, 8), (4, 4), (16, 1), (8, 1))]
    for make in makes:
        try:
            config = make()
        except Exception as error:
            errors.append(error)
            continue
        if (sizes := config.to_dict()) not in made:
            made.append(sizes)
            yield config
    if not made:
        raise errors[0]


def scaled(kind: Any, factor: int, heads: int, usual: Any = None) -> Any:
    """Return the `usual` configuration with its widths divided by `factor`, heads by `heads`, and at most two layers."""
    chosen = {} if usual is None else _differing(usual)
    usual = kind() if usual is None else usual
    chosen |= {name: _scaled(name, vars(usual).get(name), factor, heads) for name in _known(kind)}
    for name in getattr(kind, "sub_configs", None) or {}:
        if (part := getattr(usual, name, None)) is not None:
            chosen[name] = scaled(type(part), factor, heads, part).to_dict()
    return kind(**{name: size for name, size in chosen.items() if size is not None})


def _differing(part: Any) -> dict[str, Any]:
    """Return what the configuration of a part has otherwise than its class, such as the stages of a backbone that are taken."""
    usual, known = vars(type(part)()), {*_known(type(part)), "_out_features", "_out_indices"}
    return {name.lstrip("_"): x for name, x in vars(part).items() if name in known and x != usual.get(name)}


def _scaled(name: str, value: Any, factor: int, heads: int) -> Any:
    if any(word in name for word in UNSCALED):
        return None
    if isinstance(value, (list, tuple)) and value and all(type(x) is int for x in value):
        return [_scaled(name, x, factor, heads) for x in value]
    if type(value) is not int:
        return None
    if any(word in name for word in DEPTHS):
        return min(value, 2)
    if "head" in name and "dim" not in name:
        return max(value // heads, 1)
    if value < 64 or ("head" in name and heads > 1):
        return value
    return max(value // factor, VOCABULARY if "vocab" in name else 16)
