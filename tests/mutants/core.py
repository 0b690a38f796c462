"""Mutants of `dilkit/`."""

from __future__ import annotations

from mutants.mutant import Mutant

VALUES, PATTERN = "tests/core/kinds/test_values.py", "tests/core/test_pattern.py"
CACHE, GOING_BACK, KINDS = (f"tests/core/decoding/test_{name}.py" for name in ("cache", "going_back", "kinds"))
TRANSFORMERS, TORCHSCALE, GIGAPATH = (f"tests/core/integrations/{name}" for name in ("transformers", "torchscale", "gigapath"))
HEAD_PARALLEL = "tests/core/test_head_parallel.py::test_heads_over_ranks_are_those_of_one"

PATTERNS = (
    Mutant(
        "a dilated window reaches a step too far",
        "dilkit/pattern/kinds/sliding_window.py",
        "return (self.window - 1) // self.dilation_rate * self.dilation_rate",
        "return self.window // self.dilation_rate * self.dilation_rate",
        f"{VALUES}::test_count_is_the_definition",
    ),
    Mutant(
        "padding of a tail is not counted where the rate does not divide the segment",
        "dilkit/pattern/kinds/dilated_segment.py",
        "missing = -(-length // rate) -",
        "missing = length // rate -",
        "tests/core/op/test_tails.py::test_zero_keys_are_the_padding",
    ),
    Mutant(
        "of windows that edges cut off, what lies before the map is not padded",
        "dilkit/pattern/kinds/neighborhood.py",
        "(before.clamp(max=width // 2) + after",
        "(width // 2 + after",
        f"{VALUES}::test_neighborhoods_that_are_cut_off_stay_around_their_cell",
    ),
    Mutant(
        "pairs of two global tokens count twice in FLOPs",
        "dilkit/pattern/kinds/global_tokens.py",
        "else count * (2 * seq - count)",
        "else count * 2 * seq",
        f"{VALUES}::test_flops_of_every_kind_are_those_of_its_count",
    ),
    Mutant(
        "of a run of rows, residue classes have one row too many",
        "dilkit/pattern/runs.py",
        "(lengths[of] - residue - 1) // rate + 1",
        "(lengths[of] - residue) // rate + 1",
        "tests/backends/tiles/test_relations.py::test_every_row_is_in_one_tile_of_the_first_group",
    ),
    Mutant(
        'offset="block" deals out offsets beyond the rate',
        "dilkit/pattern/heads.py",
        "return (self.first + kv_head) // -(-self.total // rate)",
        "return (self.first + kv_head) // max(1, self.total // rate)",
        f"{PATTERN}::test_count_is_the_definition",
    ),
    Mutant(
        "the last blocks of a layout are lost",
        "dilkit/pattern/kinds/block_layout.py",
        "-(-last_row * self.blocks // 8)",
        "last_row * self.blocks // 8",
        f"{VALUES}::test_runs_of_a_layout_are_what_it_shows",
    ),
    Mutant(
        "head_split leaves heads out",
        "dilkit/pattern/pattern.py",
        "min(b, num_heads % branches)",
        "min(b, num_heads // branches)",
        f"{PATTERN}::test_head_split_deals_out_every_head_once",
    ),
)

OPERATORS = (
    Mutant(
        "tensors of other strides are taken for those that were prepared",
        "dilkit/op/_facts.pyx",
        "memcpy(end + HEADER + dims, x.strides, dims)",
        "memcpy(end + HEADER + dims, x.shape, dims)",
        "tests/core/op/test_boundary.py::test_the_key_of_tensors_is_another_for_other_tensors",
    ),
    Mutant(
        "what is saved for a backward pass may have lost its memory",
        "dilkit/op/plain_call.py",
        "boundary.check_room(boundary.SAVED, tensors, prepared.admission.spans)",
        "pass",
        "tests/core/op/test_boundary.py::test_hooks_that_lose_the_memory_of_what_is_saved_are_refused",
    ),
    Mutant(
        "gradients lack what comes through lse",
        "dilkit/op/rules.py",
        "its if mine is None else mine + its for",
        "its if mine is None else mine for",
        "tests/core/op/test_operators.py::test_the_gradient_of_lse_is_the_oracles_where_rows_see_nothing",
    ),
    Mutant(
        "the gradient of a sink has the wrong sign",
        "dilkit/op/zero_keys.py",
        "rows = rows - torch.stack(",
        "rows = rows + torch.stack(",
        "tests/core/op/test_sinks.py::test_gradients_of_every_backend",
    ),
    Mutant(
        "the first row of a packed sequence is counted with the one before",
        "dilkit/op/sequences.py",
        "rows, right=True) - 1",
        "rows, right=False) - 1",
        "tests/core/packed/test_module.py::test_packed_is_one_by_one",
    ),
    Mutant(
        "new rows are written beyond the capacity of a cache",
        "dilkit/op/kvcache.py",
        "if length < 0 or length + new > capacity:",
        "if length < 0 or length > capacity:",
        "tests/core/decoding/test_kvcache.py::test_an_error_leaves_the_cache_as_it_is",
    ),
    Mutant(
        "weights that are kept are scaled as those that are dropped",
        "dilkit/op/dropout.py",
        "return 2**32 / (2**32 - self.threshold)",
        "return 2**32 / self.threshold",
        "tests/core/op/test_dropout.py::test_the_expectation_of_a_weight_is_the_weight",
    ),
    Mutant(
        "rotary positions turn half of the dimensions the wrong way",
        "dilkit/rotary.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        "tests/core/test_rotary.py::test_it_is_the_formula",
    ),
)

DECODING = (
    Mutant(
        "a ring of rows is read as if each were one later",
        "dilkit/decoding/recent.py",
        "keys = end - 1 - (end - 1 - slots) % room",
        "keys = end - (end - slots) % room",
        f"{KINDS}::test_each_chunk_is_the_last_rows",
    ),
    Mutant(
        "chunks that begin within a segment go to the slots of its start",
        "dilkit/decoding/branch.py",
        "divmod(tokens + row, rate)",
        "divmod(row, rate)",
        f"{CACHE}::test_each_chunk_is_the_last_rows",
    ),
    Mutant(
        "a step does not see its own row of a segment",
        "dilkit/decoding/_kept_tokens.pyx",
        "return Seen(place // self.rate + 1, segment",
        "return Seen(place // self.rate, segment",
        f"{CACHE}::test_each_step_is_the_last_row",
    ),
    Mutant(
        "the second arc of a ring begins at the next token, whatever the rate",
        "dilkit/decoding/_tables.pyx",
        "s.index + before * s.step, s.token",
        "s.index + before, s.token",
        f"{KINDS}::test_each_step_is_the_last_row",
    ),
    Mutant(
        "the last row of a span reaches beyond its tensor",
        "dilkit/decoding/_checked.pyx",
        "limit = c.stored[place[0]].reach - c.width",
        "limit = c.stored[place[0]].reach",
        "tests/core/decoding/test_step.py",
    ),
    Mutant(
        "rows of the batch before are taken after beams were chosen",
        "dilkit/decoding/cache.py",
        "self._layout, self._facts = replace(self._layout, batch=len(chosen)), None",
        "self._layout = replace(self._layout, batch=len(chosen))",
        f"{GOING_BACK}::test_rows_of_the_batch_before_are_refused",
    ),
    Mutant(
        "a row sees global tokens that come after it",
        "dilkit/decoding/_last_rows.pyx",
        "min(runs[i, 1], last + 1) - runs[i, 0]",
        "runs[i, 1] - runs[i, 0]",
        "tests/core/decoding/test_kvcache.py::test_one_row_is_one_step_where_spans_say_what_it_sees",
    ),
    Mutant(
        "a prompt is computed with rows as they are, and stored rounded",
        "dilkit/decoding/cache.py",
        "if stored != dtype:",
        "if stored != dtype and False:",
        "tests/core/decoding/test_stored.py",
    ),
    Mutant(
        "in a chunk, a row sees the one after it",
        "dilkit/decoding/segment.py",
        ".triu(part.first + 1)",
        ".triu(part.first + 2)",
        f"{CACHE}::test_each_chunk_is_the_last_rows",
    ),
    Mutant(
        "a saved cache changes as decoding goes on",
        "dilkit/decoding/state.py",
        "rows=[store.rows.clone() for store in stores]",
        "rows=[store.rows for store in stores]",
        f"{GOING_BACK}::test_a_saved_cache_goes_on",
    ),
    Mutant(
        "with a cache, rotary positions begin at 0 in each call",
        "dilkit/nn/multihead.py",
        "torch.arange(cache.seen, cache.seen + q.shape[1], device=q.device)",
        "torch.arange(q.shape[1], device=q.device)",
        "tests/core/decoding/test_module.py::test_row_by_row_is_the_whole",
    ),
)

ORDERS = (
    Mutant(
        "the blocks that a window needs are counted without its last cells",
        "dilkit/orders/_locality.pyx",
        "high[axis] = min(space[axis], cells[i, axis] + reach[axis] + 1)",
        "high[axis] = min(space[axis], cells[i, axis] + reach[axis])",
        "tests/core/orders/test_locality.py::test_how_many_blocks_a_window_needs",
    ),
    Mutant(
        "codes are sorted without their highest bits",
        "dilkit/orders/_points.pyx",
        "bits = (width + digits - 1) // digits",
        "bits = width // digits",
        "tests/core/orders/test_points.py::test_codes_are_sorted_stably",
    ),
    Mutant(
        "a given permutation is not moved behind the extra tokens",
        "dilkit/orders/token_order.py",
        "cells[extra_tokens:] += extra_tokens",
        "cells[extra_tokens:] += 0",
        "tests/core/orders/test_token_order.py::test_a_given_permutation_is_an_order",
    ),
)

SELECTION = (
    Mutant(
        "a row of the preference table leaves out its oldest GPU",
        "dilkit/selection/preference.py",
        "any(low <= device.capability <= high",
        "any(low < device.capability <= high",
        "tests/core/selection/test_preference.py::test_float32_runs_torch_where_that_has_tensor_cores_for_it",
    ),
    Mutant(
        "the proof of other kernels is believed",
        "dilkit/selection/proof.py",
        "return proof if proof and proof.facts == facts else None",
        "return proof",
        "tests/core/selection/test_proof.py::test_a_record_that_is_not_its_own_is_none",
    ),
    Mutant(
        "a backend is taken that nobody asked for",
        "dilkit/selector.py",
        "may_pick = not requested or candidate.name in requested",
        "may_pick = True",
        "tests/core/selection/test_selector.py::test_those_asked_for_are_tried_in_their_order_and_no_other_is_taken",
    ),
    Mutant(
        "what the cache holds is counted too small once something was dropped",
        "dilkit/_cache.pyx",
        "self.bytes -= entry.size",
        "self.bytes -= 2 * entry.size",
        "tests/core/test_cache.py::test_the_least_recently_used_value_leaves_first "
        "tests/core/test_cache.py::test_agrees_with_a_model_for_any_sequence_of_calls",
    ),
    Mutant(
        "True is taken for the integer 1",
        "dilkit/checks.py",
        'if isinstance(value, bool) or "bool" in str(',
        'if "bool" in str(',
        f"{PATTERN}::test_bools_are_no_integers",
    ),
    Mutant(
        "what the group may write is trusted",
        "dilkit/files.py",
        "(stat.S_IWGRP | stat.S_IWOTH)",
        "(stat.S_IWOTH | stat.S_IWOTH)",
        "tests/core/test_files.py::test_why_others_may_write",
    ),
)

INTEGRATIONS = (
    Mutant(
        "packed positions that jump ahead go on",
        "dilkit/integrations/transformers/packing.py",
        "position_ids.diff() == 1",
        "position_ids.diff() >= 1",
        f"{TRANSFORMERS}/test_packing.py",
    ),
    Mutant(
        "padding is counted as tokens of the next sequence",
        "dilkit/integrations/transformers/packing.py",
        "ends = F.pad(lengths.cumsum(0), (1, 0))",
        "ends = F.pad(lengths.cumsum(0), (1, 0)).clamp(max=seq)",
        f"{TRANSFORMERS}/test_packing.py",
    ),
    Mutant(
        "positions that a model counts are those of rows",
        "dilkit/integrations/transformers/context/positions.py",
        "if self.by_mask and tokens is not None",
        "if False",
        f"{TRANSFORMERS}/test_context_parallel.py",
    ),
    Mutant(
        "positions pack sequences over ranks in every model",
        "dilkit/integrations/transformers/context/attention.py",
        "if not told or not all(told)",
        "if not told",
        f"{TRANSFORMERS}/test_context_parallel.py",
    ),
    Mutant(
        "a cache that has left out what the pattern sees is taken",
        "dilkit/integrations/transformers/masks.py",
        "is_of_windows(pattern, before)",
        "is_of_windows(pattern, before + left_out)",
        f"{TRANSFORMERS}/test_windows.py",
        needs="transformers",
    ),
    Mutant(
        "new rows take the place in a pool's ring of older ones that rows of their batch still see",
        "dilkit/integrations/transformers/continuous/attention.py",
        "    tables = BatchTables.of(",
        "    batch.store(*rows[1:])\n    tables = BatchTables.of(",
        f"{TRANSFORMERS}/test_continuous_batching.py",
        needs="transformers",
    ),
    Mutant(
        "T5's distances have the other sign",
        "dilkit/integrations/transformers/biases/tables.py",
        "of_keys[0, :, 0].flip(-1)",
        "of_keys[0, :, 0]",
        f"{TRANSFORMERS}/test_t5.py",
        needs="transformers",
    ),
    Mutant(
        "padding between tokens moves MPT's distances",
        "dilkit/integrations/transformers/token_mask.py",
        "return (begins > 1).any()",
        "return (begins > 9).any()",
        f"{TRANSFORMERS}/test_alibi.py",
        needs="transformers",
    ),
    Mutant(
        "one row of a decoder sees the first tokens of its encoder alone",
        "dilkit/integrations/transformers/masks.py",
        "if causal is False and q_length != kv_length:",
        "if causal is False and q_length > kv_length:",
        f"{TRANSFORMERS}/test_t5.py",
        needs="transformers",
    ),
    Mutant(
        "a mask on a GPU that was written to is not looked at again",
        "dilkit/integrations/torchscale/masks.py",
        "if last() is not mask or version != mask._version:",
        "if last() is not mask:",
        f"{TORCHSCALE}/test_calls.py::test_a_mask_elsewhere_is_looked_at_once",
    ),
    Mutant(
        "positions of tiles have x and y exchanged",
        "dilkit/integrations/gigapath/positions.py",
        "torch.cat((self.halves[y], self.halves[x]), dim=1)",
        "torch.cat((self.halves[x], self.halves[y]), dim=1)",
        f"{GIGAPATH}/test_encoder.py::test_positions_are_the_rows_of_the_table",
    ),
    Mutant(
        "an untrained class token is pooled without a word",
        "dilkit/integrations/gigapath/longnet_vit.py",
        "if is_pooling_open(found, config):",
        "if is_pooling_open(found, config) and settings:",
        f"{GIGAPATH}/test_create_model.py::test_an_untrained_class_token_is_warned_of_where_it_is_called",
    ),
    Mutant(
        "stand-ins stay under the names that others gave them",
        "dilkit/integrations/gigapath/stand_ins.py",
        "if is_stand_in(module):",
        "if is_stand_in(module) and module.__name__ == name:",
        f"{GIGAPATH}/test_installation.py::test_another_name_of_a_stand_in_goes_with_it",
    ),
    Mutant(
        "an embedding keeps its record while it is replaced",
        "dilkit/integrations/gigapath/cohort/run.py",
        "    manifest.forget(left)\n",
        "",
        f"{GIGAPATH}/cohort/test_run.py::test_what_cannot_be_read_is_made_anew_where_a_record_says_that_it_was_an_embedding",
    ),
    Mutant(
        "an embedding is kept whose coordinates, in a file apart, have changed",
        "dilkit/integrations/gigapath/cohort/listing.py",
        "whence, digest(header.coords), header",
        'whence, "", header',
        f"{GIGAPATH}/cohort/test_run.py::test_what_is_not_the_same_is_made_anew",
    ),
    Mutant(
        "an argument overrules what a checkpoint was trained with",
        "dilkit/integrations/gigapath/checkpoint.py",
        "if found is not None and other:",
        "if found is not None and len(other) > 1:",
        f"{GIGAPATH}/finetuning/test_training.py::test_the_trained_encoder_is_read_again_with_its_settings",
    ),
    Mutant(
        "coordinates in micrometres are taken for pixels",
        "dilkit/integrations/gigapath/features/attributes.py",
        "(coords.double() * pixels / sizes[0]).round()",
        "coords.double().round()",
        f"{GIGAPATH}/test_producers.py::test_a_slide_of_each_producer_has_the_same_embedding",
    ),
)

FINETUNING = (
    Mutant(
        "tied events are taken as if each were the first",
        "dilkit/integrations/gigapath/finetuning/objectives.py",
        "-earlier / events_at_time",
        "0 * earlier / events_at_time",
        f"{GIGAPATH}/finetuning/test_objectives.py::test_the_loss_is_that_of_the_definition",
    ),
    Mutant(
        "a slide that is computed twice drops something else the second time",
        "dilkit/integrations/gigapath/finetuning/accumulation.py",
        "_scored(model, index, seed).backward(",
        "_scored(model, index, seed + 1).backward(",
        f"{GIGAPATH}/finetuning/test_training.py::test_both_passes_drop_the_same",
    ),
    Mutant(
        "a frozen encoder drops at random",
        "dilkit/integrations/gigapath/finetuning/model.py",
        "self.encoder.train(mode and not self.freeze)",
        "self.encoder.train(mode)",
        f"{GIGAPATH}/finetuning/test_training.py::test_a_resumed_run_is_the_uninterrupted_run",
    ),
    Mutant(
        "intervals are of slides, not of patients",
        "dilkit/integrations/gigapath/finetuning/metrics.py",
        "by_patient[patient].append(row)",
        "by_patient[patient + str(row)].append(row)",
        f"{GIGAPATH}/finetuning/test_metrics.py::test_intervals_are_of_whole_patients",
    ),
)

HEADS_OVER_RANKS = (
    Mutant(
        "heads of every rank are computed as if they were the first ones",
        "dilkit/nn/head_parallel.py",
        "first = rank * kv_heads",
        "first = 0",
        HEAD_PARALLEL,
    ),
    Mutant(
        "weights of heads that see the same are dropped as if they were those of the first ones",
        "dilkit/nn/head_parallel.py",
        "inner._parameters = part, dict",
        "inner._parameters = part if pattern.differs_by_head else pattern, dict",
        HEAD_PARALLEL,
    ),
    Mutant(
        "layers that share a weight have one each once their heads are over ranks",
        "dilkit/nn/head_parallel.py",
        "if where not in made:",
        "if True:",
        HEAD_PARALLEL,
    ),
    Mutant(
        "gradients of inputs are those of the heads of one rank",
        "dilkit/nn/rank_heads.py",
        "grad_placements=[Partial()]",
        "grad_placements=[Replicate()]",
        HEAD_PARALLEL,
    ),
    Mutant(
        "a norm over ranks leaves out how far their means are apart",
        "dilkit/nn/rank_heads.py",
        " + (means - mean).square().mean(-1, keepdim=True)",
        "",
        HEAD_PARALLEL,
    ),
)

TESTING = (
    Mutant(
        "results that are no numbers are no distance from right ones",
        "dilkit/testing/accuracy.py",
        "nan_to_num(nan=math.inf)",
        "nan_to_num(nan=0.0)",
        "tests/backends/test_conformance.py::test_suite_finds_a_fault",
    ),
    Mutant(
        "a backend that changes its inputs passes the conformance suite",
        "dilkit/testing/conformance.py",
        '"failed" if complaints or wrong else "passed"',
        '"failed" if wrong else "passed"',
        "tests/backends/test_conformance.py::test_suite_finds_an_input_that_was_changed_though_all_results_are_right",
    ),
)

CORE = (*PATTERNS, *OPERATORS, *DECODING, *ORDERS, *SELECTION, *INTEGRATIONS, *FINETUNING, *HEADS_OVER_RANKS, *TESTING)
