"""Tiny models of transformers, of any class: configurations with small sizes, and inputs that fit.

A configuration is made of the sizes in `SMALL` that its class has, its parts likewise. Classes differ in what fits together, so
that several `VARIANTS` are tried, and the first one whose model runs is taken.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

SEQ, VOCABULARY, IMAGE = 20, 64, 32
LARGEST = 30_000_000
"""Parameters of a model that is still tiny enough."""


def _sizes(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **_sizes(32, "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim encoder_hidden_size decoder_hidden_size"),
    **_sizes(32, "model_dim word_embed_proj_dim emb_dim d_embed projection_dim lru_width output_dim out_hidden_size image_size"),
    **_sizes(48, "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim d_inner mlp_dim"),
    **_sizes(16, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size num_mel_bins"),
    **_sizes(16, "q_lora_rank kv_lora_rank qk_head_dim mamba_d_head"),
    **_sizes(2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth"),
    **_sizes(2, "num_encoder_layers num_key_value_heads num_experts_per_tok moe_k moe_topk type_vocab_size num_codebooks"),
    **_sizes(2, "eos_token_id mamba_expand encoder_num_hidden_layers"),
    **_sizes(4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads"),
    **_sizes(4, "encoder_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads"),
    **_sizes(8, "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim patch_size mamba_d_state mamba_chunk_size"),
    **_sizes(8, "relative_attention_num_buckets ssm_state_size hidden_size_per_layer_input"),
    **_sizes(1, "n_group topk_group first_k_dense_replace n_shared_experts bos_token_id decoder_start_token_id mamba_n_groups"),
    **_sizes(3, "num_channels mask_token_id prediction_length"),
    **_sizes(VOCABULARY, "vocab_size codebook_size index_topk vocab_size_per_layer_input"),
    **_sizes(128, "max_position_embeddings n_positions n_ctx max_target_positions max_source_positions max_seq_len seq_length"),
    **_sizes(128, "sliding_window attention_window window_size"),
    **_sizes(
        0,
        "num_kv_shared_layers pad_token_id attention_dropout hidden_dropout_prob attention_probs_dropout_prob dropout layerdrop",
    ),
}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    *({"num_hidden_layers": count} for count in (4, 8, 12)),
    *({"head_dim": width} for width in (16, 32, 64, 128)),
    {"head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8},
    {"head_dim": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8, "num_hidden_layers": 8},
    {"head_dim": 16, "qk_rope_head_dim": 16},
    {"attn_layer_indices": [1]},
    {"layer_types": ["linear_attention", "full_attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"layer_types": ["linear_attention", "full_attention"], "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "qk_head_dim": 8},
    {"head_dim": 128, "num_hidden_layers": 4},
    {"head_dim": 16, "hidden_size": 64, "num_key_value_heads": 4},
    {"hidden_size": 512, "num_hidden_layers": 4},
)
"""Sizes that differ from `SMALL`."""


def config_of(kind: Any, variant: dict[str, Any]) -> Any:
    """Return a small configuration of the class `kind`. Raises whatever the class does if no sizes fit."""
    known, sizes = _known(kind), SMALL | variant
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
    """Return the arguments of a class of configurations."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= {*vars(base).get("__annotations__", {})}
        if "__init__" in vars(base):
            names |= {*inspect.signature(base.__init__).parameters}
    return names


def _fixed(kind: Any, name: str) -> bool:
    """True if a size is to stay: one for each part, none, or one key/value head that all others share."""
    usual = getattr(kind, name, 0)
    if name == "num_key_value_heads" and usual == 1:
        return True
    return isinstance(usual, (list, tuple)) or (usual is None and name in ("q_lora_rank", "window_size", "n_inner"))


def _parts(kind: Any) -> dict[str, Any]:
    """Return the classes of the configurations that are parts of this one, as they are by default."""
    parts = getattr(kind, "sub_configs", None) or {}
    usual = kind() if parts else None
    return {name: type(part) for name in parts if (part := getattr(usual, name, None)) is not None}


def inputs_of(model: Any, and_images: bool = False) -> dict[str, Any]:
    """Make arguments of `model.forward`: two texts, images or sounds, by its main input, always the same."""
    torch.manual_seed(2)
    accepted, main = inspect.signature(model.forward).parameters, getattr(model, "main_input_name", "input_ids")
    ids, image = torch.randint(4, VOCABULARY - 4, (2, SEQ)), torch.randn(2, 3, IMAGE, IMAGE)
    known: dict[str, Tensor] = dict(input_ids=ids, pixel_values=image, input_values=torch.randn(2, 4000))
    inputs: dict[str, Any] = {main: known.get(main, torch.randn(2, 16, 64))}
    needed = {name for name, argument in accepted.items() if argument.default is inspect.Parameter.empty}
    inputs |= {name: known[name] for name in needed & {*known}}
    if "decoder_input_ids" in accepted and main == "input_ids":
        inputs["decoder_input_ids"] = ids
    if and_images and "pixel_values" in accepted:
        inputs["pixel_values"] = image
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    return inputs
