"""`context_parallel`: a model of transformers over the ranks that its sequence is cut over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from dilkit.integrations.ranks import digest, over_ranks
from dilkit.integrations.transformers.biases.tables import has_table
from dilkit.integrations.transformers.checks import source_of
from dilkit.integrations.transformers.context.attention import BY_POSITIONS, KEPT_AS, LayerRanks
from dilkit.integrations.transformers.context.batch import OF_ROWS, Positions, WholeBatch, whole_batch
from dilkit.integrations.transformers.conversion import attention_layers, convert
from dilkit.integrations.transformers.kept_layers import KEEPS
from dilkit.integrations.transformers.patterns import FULL, WINDOWED, has_windows, pattern_of
from dilkit.integrations.transformers.registration import is_registered, patterns_registered
from dilkit.pattern import Pattern

STEP = "batch of ContextParallel.shard"


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that a model's sequence is cut over, as `context_parallel` makes it.

    - `comm`: the ranks with the parts of a sequence, a `dilkit.comm.Comm`. `replicas`: the ranks with other batches, or None.
    - `averages`: whether gradients are averaged over all of them after the backward pass, as FSDP2 and DDP do, or summed.
    - `pattern`: where sequences are best cut, if all layers have the same.
    - `positions`: those that the model gives tokens that come without.
    - `window`: the narrowest window of a layer, which counts padding between tokens: it is refused then. 1 beside T5's bias.

        >>> import torch
        >>> from dilkit.comm import run_threads
        >>> from dilkit.integrations.transformers import ContextParallel
        >>> batch = dict(input_ids=torch.tensor([[3, 5, 7, 9]]), labels=torch.tensor([[3, 5, 7, 9]]))
        >>> first, second = run_threads(2, lambda comm: ContextParallel(comm).shard(batch))
        >>> second["input_ids"].tolist(), second["position_ids"].tolist(), second["shift_labels"].tolist()
        ([[7, 9]], [[2, 3]], [[9, -100]])
        >>> second["num_items_in_batch"].item()  # 3 labels / 2 ranks
        1.5
    """

    comm: Any
    replicas: Any = None
    averages: bool = True
    pattern: Pattern | None = None
    positions: Positions = OF_ROWS
    window: int | None = None

    @property
    def ranks(self) -> int:
        """All ranks: those of a sequence, times the replicas."""
        return int(self.comm.size * (1 if self.replicas is None else self.replicas.size))

    def shard(self, batch: Mapping[str, Any], labelled: int | None = None) -> dict[str, Any]:
        """Return this rank's part of `batch`, which all ranks of a sequence hold whole: the arguments of the model's `forward`.

            loss of the model = ranks / labelled * sum over this rank's rows of -log p(label)

        so that the average over `ranks` is the mean over all tokens, and averaged gradients are those of it; without `averages`
        the factor `ranks` is left out, for gradients that are summed.

        - `batch`: `input_ids` or `inputs_embeds`, `labels`, `position_ids`, `token_type_ids` `(batch, seq)`; padding by
          `attention_mask`, or packed sequences by `cu_seq_lens_q` or by positions that restart. Labels are shifted before the
          cut. Padded sequences are packed, `(1, total)`, without their padding; others stay `(batch, rows)`.
        - `labelled`: how many rows predict a token, in all batches of the step on all replicas; None: `num_items_in_batch` of the
          batch, which says the same, or else those of this batch, which every replica counts of its own. With several batches a
          step: `count(*batches)`.

        Raises ValueError or TypeError for a batch that does not fit, on all ranks, and PlanMismatch where they hold others.
        """
        whole: list[WholeBatch] = []

        def digests() -> dict[str, Any]:
            whole.append(whole_batch(batch, self.positions, self.window))
            self.positions.check(whole[0].rows["position_ids"])
            return {name: f"{x.dtype} {tuple(x.shape)} {digest(x)}" for name, x in whole[0].rows.items()}

        over_ranks().agree_on(self.comm, digests, STEP)
        ready = whole[0]
        start, stop = self._cuts(ready)[self.comm.rank : self.comm.rank + 2]
        part: dict[str, Any] = {name: x[:, start:stop].contiguous() for name, x in ready.rows.items()}
        if ready.cu_seqlens is not None:
            longest = int(ready.cu_seqlens.diff().max())
            part |= dict(
                cu_seq_lens_q=ready.cu_seqlens, cu_seq_lens_k=ready.cu_seqlens, max_length_q=longest, max_length_k=longest
            )
        if ready.by_positions:
            part[BY_POSITIONS] = True
        if "shift_labels" in part:
            stated = batch.get("num_items_in_batch") if labelled is None else labelled
            items = self._over_replicas(ready.labelled) if stated is None else stated
            part["num_items_in_batch"] = torch.tensor(max(float(items), 1) / (self.ranks if self.averages else 1))
        return part

    def count(self, *batches: Mapping[str, Any]) -> int:
        """Count the rows of `batches` that predict a token, on all replicas: `labelled` of a step that accumulates gradients."""
        return self._over_replicas(sum(whole_batch(batch, self.positions).labelled for batch in batches))

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the rows of all ranks of a sequence put together along `dim`, such as logits, without gradients."""
        whole: Tensor = over_ranks().unshard(x.detach(), self.comm, dim)
        return whole

    def mean(self, loss: Tensor) -> float:
        """Return the mean over all tokens, of what each rank's model found as its loss: the same number on every rank."""
        total = loss.detach().double().reshape(1).cpu()
        for comm in (self.comm, self.replicas):
            if comm is not None:
                over_ranks().sum_over_ranks([total], comm)
        return total.item() / (self.ranks if self.averages else 1)

    def _cuts(self, batch: WholeBatch) -> Sequence[int]:
        if batch.cu_seqlens is None:
            return list(over_ranks().shard_cuts(batch.seq, self.comm.size, self.pattern))
        begins = batch.cu_seqlens.tolist()
        cuts = [*over_ranks().packed_cuts([stop - start for start, stop in pairwise(begins)], self.comm.size, self.pattern)]
        if batch.by_positions and {*begins} <= {*cuts}:  # one begin within a shard, where the model's mask shows if it cuts there
            place = cuts.index(begins[1])
            cuts[place] += 1 if cuts[place + 1] - cuts[place] > 1 else -1
        return cuts

    def _over_replicas(self, number: int) -> int:
        if self.replicas is None:
            return number
        total = torch.tensor([float(number)], dtype=torch.float64)
        over_ranks().sum_over_ranks([total], self.replicas)
        return int(total)


def context_parallel(
    model: Any,
    mesh: Any,
    *,
    replicas: Any = None,
    pattern: Pattern | Sequence[Pattern] | None = None,
    averages: bool = True,
    schedule: str | None = None,
    keep: str = "rows",
) -> ContextParallel:
    """Let `model`, of transformers, compute sequences that are cut over the ranks of `mesh`: each holds some rows of them.

        logits of rank t = logits of the whole sequence, rows cuts[t] .. cuts[t + 1] - 1

    Attention runs over the ranks (`dilkit.comm.ring_dilated_attention`), each layer by its own pattern: segments, windows, sinks,
    grouped heads. Everything else of a decoder is of each row by itself. Parameters stay as they are; wrap the model afterwards,
    by `fully_shard` or DDP.

    - `mesh`: the `DeviceMesh` of one dimension, such as `mesh["cp"]`, a process group, or a `dilkit.comm.Comm` (`MPIComm`).
    - `replicas`: the ranks that compute other batches in the same step, likewise: losses are then weighted by the tokens of all.
    - `pattern`: as in `convert`, which is called with it. None: what the model computes, by its registration, `config.dilkit`, or
      its configuration: windows, or full attention, which is `Pattern.dense()`.
    - `schedule`: as in `dilkit.comm.ExchangePlan`. None: "balanced" in layers with full attention, whose work grows with the
      square of the sequence and is the last ranks' under causality, "auto" in others.
    - `keep`: as in `dilkit.comm.ExchangePlan`: "nothing" saves the memory of the rows that each layer receives, and sends them
      once more in the backward pass.
    - `averages`: as in `ContextParallel`, the result. Its `shard` makes the arguments of the model.

    Layers that mix rows by themselves, as convolutions and recurrences do, see the rows of a rank alone; such models are refused
    where their layers show it. Raises TypeError or ValueError for a model or a mesh that does not fit, as `convert` and
    `dilkit.comm.TorchComm` do.

    Example, on a group of one process:

        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from transformers import MistralConfig, MistralForCausalLM
        >>> from dilkit.integrations.transformers import context_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        >>> model = MistralForCausalLM(MistralConfig(**sizes, vocab_size=100, sliding_window=16))
        >>> ranks = context_parallel(model, mesh["cp"])
        >>> tokens = torch.randint(3, 100, (2, 50))
        >>> loss = model(**ranks.shard(dict(input_ids=tokens, labels=tokens))).loss
        >>> loss.backward()  # fully_shard or DDP average gradients over the ranks
        >>> round(ranks.mean(loss) - loss.item(), 5)  # one rank has all
        0.0
        >>> dist.destroy_process_group()
    """
    layers = attention_layers(model)
    if mesh is None:
        raise TypeError("mesh=None; a DeviceMesh of one dimension, such as mesh['cp'], a process group or a Comm is needed")
    _check_model(model, layers)
    positions = Positions.of_model(model)
    comm, others = (None if group is None else over_ranks().transport(group) for group in (mesh, replicas))
    if pattern is not None or not is_registered(model.config._attn_implementation):
        text = model.config.get_text_config()
        has_pattern = getattr(text, "dilkit", None) is not None or has_windows(text)
        convert(model, Pattern.dense() if pattern is None and not has_pattern else pattern)
    if own := next((path for path, layer in layers.items() if hasattr(layer, KEEPS)), None):
        raise ValueError(f"{own} keeps its own attention, as convert says, and would see the rows of one rank alone")
    registered = patterns_registered(model.config._attn_implementation)
    layers = {path: layer for path, layer in layers.items() if is_registered(layer.config._attn_implementation)}
    patterns = {pattern_of(registered, layer) for layer in layers.values()}
    first = {id(layer.config): layer for layer in reversed(layers.values())}  # of each part, as one for images is
    for layer in layers.values():
        setattr(layer, KEPT_AS, LayerRanks(over_ranks(), comm, schedule, keep, layer is first[id(layer.config)]))
    by_distance = (branch for pattern in patterns for branch in pattern.branches if branch.goes_by_distance)
    widths = [getattr(branch, "reach", 0) + 1 for branch in by_distance] + [1] * any(map(has_table, layers.values()))
    window = min(widths, default=None)
    return ContextParallel(comm, others, averages, patterns.pop() if len(patterns) == 1 else None, positions, window)


def _check_model(model: Any, layers: Mapping[str, Any]) -> None:
    name, config = type(model).__name__, model.config
    has_two = getattr(config, "is_encoder_decoder", False) and any(getattr(x, "is_decoder", True) for x in layers.values())
    if has_two or getattr(config, "add_cross_attention", False):
        raise ValueError(f"{name} has cross-attention, of two sequences; over ranks one sequence is cut")
    if types := set(getattr(config, "layer_types", None) or ()) - {FULL, WINDOWED}:
        raise ValueError(f"{name} has layers of {', '.join(sorted(types))}, which mix rows and would see those of one rank alone")
    mixes = ((path, isinstance(x, (nn.Conv1d, nn.RNNBase)) or hasattr(x, "expert_capacity")) for path, x in model.named_modules())
    mixing = next((path for path, mixed in mixes if mixed), None)
    if mixing is not None or getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} has {mixing or 'recurrent layers'}, which mixes rows and would see those of one rank alone")
    forward = type(model).forward
    pools = "WithPooling" in str(inspect.signature(forward).return_annotation) and getattr(model, "pooler", name) is not None
    if model.loss_type not in (None, "ForCausalLM") or pools or "Loss(" in source_of(forward):
        raise ValueError(
            f"{name} pools rows, or weights its loss by itself ({model.loss_type}); take the model below it, one ForCausalLM, or "
            "one made with add_pooling_layer=False"
        )
    if getattr(config, "token_dropout", False):
        raise ValueError(f"{name} scales its embeddings by the mask tokens of a whole sequence (token_dropout); set it to False")
    if getattr(config, "output_router_logits", False):
        raise ValueError(f"{name} adds a loss of its routers (output_router_logits), which is no sum over rows; set it to False")
