"""Tiny models of any class of transformers, compared with eager attention: forward pass, padding, cached steps, generation.

A configuration has the sizes in `SMALL` that its class has. Several `VARIANTS` are tried; the first whose model runs is taken.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dilkit.integrations.transformers import registration
from dilkit.integrations.transformers.attention import attend
from dilkit.pattern import Pattern

SEQ, VOCABULARY, IMAGE = 20, 64, 32
LARGEST = 30_000_000


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


def config_of(kind: Any, variant: dict[str, Any]) -> Any:
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
    names: set[str] = set()
    for base in kind.__mro__:
        names |= {*vars(base).get("__annotations__", {})}
        if "__init__" in vars(base):
            names |= {*inspect.signature(base.__init__).parameters}
    return names


def _fixed(kind: Any, name: str) -> bool:
    usual = getattr(kind, name, 0)
    if name == "num_key_value_heads" and usual == 1:
        return True
    return isinstance(usual, (list, tuple)) or (usual is None and name in ("q_lora_rank", "window_size", "n_inner"))


def _parts(kind: Any) -> dict[str, Any]:
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


DENSE = "dilkit_dense"
CLOSE = 2e-5
NEW_TOKENS = 8


class Tiny:
    def __init__(self, kind: Any, config_kind: Any, variant: dict[str, Any]) -> None:
        self.kind, self.config = kind, config_of(config_kind, variant)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(self.config)).parameters())
        if size > LARGEST:
            raise ValueError(f"it cannot be made small: {size:,} parameters")
        torch.manual_seed(1)
        self.eager = self._made("eager")
        self.inputs, self.wanted = self._computed()

    def _computed(self) -> tuple[dict[str, Any], Tensor]:
        first, more = inputs_of(self.eager), inputs_of(self.eager, and_images=True)
        try:
            return first, computed(self.eager, first)
        except Exception:
            if more.keys() == first.keys():
                raise
        return more, computed(self.eager, more)

    def _made(self, name: str) -> Any:
        config = copy.deepcopy(self.config)
        config._attn_implementation = name
        return self.kind(config).eval()

    def other(self, name: str) -> Any:
        model = self._made(name)
        model.load_state_dict(self.eager.state_dict(), strict=False)
        return model


def first_that_runs(kind: Any, config_kind: Any) -> Tiny:
    """Return a tiny model of the class `kind`, if possible one that asks for attention. Raises the first error if none runs."""
    registration.register(Pattern.dense(), DENSE)
    first_error: Exception | None = None
    without_attention: Tiny | None = None
    for variant in VARIANTS:
        try:
            tiny = Tiny(kind, config_kind, variant)
        except ImportError:
            raise
        except Exception as error:
            first_error = first_error or error
            continue
        if not kind._can_set_attn_implementation() or _asked(tiny):
            return tiny
        without_attention = without_attention or tiny
    if without_attention is not None:
        return without_attention
    assert first_error is not None
    raise first_error


def _asked(tiny: Tiny) -> bool:
    try:
        with asking() as layers:
            computed(tiny.other(DENSE), tiny.inputs)
    except Exception:
        return True
    return bool(layers)


@contextmanager
def asking() -> Iterator[list[Any]]:
    """Yield a list, to which the layers that ask for dilated attention meanwhile are added."""
    interface, layers = registration.transformers().AttentionInterface, []
    before = interface().get(DENSE)

    def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
        layers.append(module)
        return attend(Pattern.dense(), None, module, *args, **kwargs)

    interface.register(DENSE, counted)
    try:
        yield layers
    finally:
        interface.register(DENSE, before)


@dataclass(frozen=True)
class Compared:
    """A model beside eager attention: checks that are equal, wrong and refused, and the layers that asked."""

    model: Any
    layers: list[Any]
    equal: list[str]
    wrong: list[str]
    refused: list[str]


def compare(tiny: Tiny) -> Compared:
    model = tiny.other(DENSE)
    with asking() as layers:
        compared = Compared(model, layers, [], [], [])
        for trial in trials(tiny, model):
            try:
                difference = trial.difference()
            except Exception as error:
                if not compared.equal + compared.wrong:
                    raise
                refused = isinstance(error, ValueError)
                (compared.refused if refused else compared.wrong).append(f"{trial.name} is refused: {in_words(error)}")
            else:
                (compared.wrong if difference else compared.equal).append(trial.name + (difference and f" is {difference}"))
    return compared


@dataclass(frozen=True)
class Trial:
    """One comparison: `run` computes on dilated attention, `wanted` is what eager attention gives. `exact`: to the bit."""

    name: str
    run: Callable[[], Tensor]
    wanted: Tensor
    exact: bool = False

    def difference(self) -> str:
        result = self.run()
        if result.shape != self.wanted.shape:
            return f"of shape {tuple(result.shape)}, not {tuple(self.wanted.shape)}"
        off = float((result - self.wanted).abs().max())
        most = 0.0 if self.exact else CLOSE * max(1.0, float(self.wanted.abs().max()))
        return "" if off <= most else f"off by {off:.2g}"


def trials(tiny: Tiny, model: Any) -> Iterator[Trial]:
    yield Trial("a forward pass", partial(computed, model, tiny.inputs), tiny.wanted)
    if "input_ids" not in tiny.inputs:
        return
    after, of_rows = changed(tiny.inputs, -1), tiny.wanted.dim() == 3 and tiny.wanted.shape[1] > 1
    if of_rows and torch.equal(computed(tiny.eager, after)[:, :-1], tiny.wanted[:, :-1]):
        yield Trial("no look ahead", lambda: computed(model, after)[:, :-1], computed(model, tiny.inputs)[:, :-1], exact=True)
    for side, padding in (("left", slice(0, 7)), ("right", slice(-7, None))):
        mask = torch.ones_like(tiny.inputs["input_ids"])
        mask[0, padding] = 0
        padded, tokens = tiny.inputs | dict(attention_mask=mask), mask.bool()
        other = padded | dict(input_ids=torch.where(tokens, padded["input_ids"], 5))
        wanted, by_other = (_if_possible(computed, tiny.eager, inputs) for inputs in (padded, other))
        if wanted is None or by_other is None or wanted.shape[:2] != mask.shape:
            continue
        if same(wanted[tokens], by_other[tokens]):  # else what the padding holds counts, as in layers that are recurrent
            yield Trial(
                f"padding on the {side}",
                partial(lambda inputs, tokens: computed(model, inputs)[tokens], padded, tokens),
                wanted[tokens],
            )
    wanted = _if_possible(_generated, tiny.eager, tiny.inputs) if tiny.eager.can_generate() else None
    if wanted is not None:
        yield Trial("generation by cached steps", partial(_generated, model, tiny.inputs), wanted)


def _generated(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the logits of new tokens, which tell more than the tokens do, or these where a model says no logits."""
    options: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    options |= dict(use_cache=True, output_logits=True, return_dict_in_generate=True)
    text = model.generate(**options, **{key: value for key, value in inputs.items() if key not in options})
    return torch.stack(text.logits) if getattr(text, "logits", None) else getattr(text, "sequences", text)


def _if_possible(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except Exception:
        return None


def changed(inputs: dict[str, Any], place: int) -> dict[str, Any]:
    ids = inputs["input_ids"].clone()
    ids[:, place] = (ids[:, place] + 7) % 50 + 4
    return inputs | {name: ids for name in ("input_ids", "decoder_input_ids") if name in inputs}


def same(found: Tensor, wanted: Tensor) -> bool:
    return not Trial("", lambda: found, wanted).difference()


def computed(model: Any, inputs: dict[str, Any]) -> Tensor:
    """Return the first result of a model that is a tensor of numbers, logits before others."""
    torch.manual_seed(3)
    out = model(**inputs)
    results = [
        getattr(out, "logits", None),
        getattr(out, "last_hidden_state", None),
        *(out if isinstance(out, tuple) else out.values()),
    ]
    return next(x for x in results if isinstance(x, Tensor) and x.is_floating_point())


def in_words(error: BaseException) -> str:
    """Return what an error says, in one line; its class too, unless it is a ValueError."""
    text = " ".join(str(error).split())
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:300]
