"""Mutants of `backends/`."""

from __future__ import annotations

from mutants.mutant import Mutant

NATIVE, SDPA, TILES, CUDA, TRITON, NUMBA = (
    f"tests/backends/{name}" for name in ("native", "sdpa", "tiles", "cuda", "triton", "numba")
)

KERNEL = (
    Mutant(
        "a row after a segment is taken for one of it",
        "backends/native/kernels/visibility.h",
        "if (x < segment->start || x >= segment->stop)",
        "if (x < segment->start || x > segment->stop)",
        f"{NATIVE}/test_chunks.py {NATIVE}/test_kinds.py::test_random_mixes",
    ),
    Mutant(
        "what was summed up before is not scaled to the new maximum",
        "backends/native/kernels/online_softmax.h",
        "ratio * N(load_vector)(running_sum + r) + sum",
        "N(load_vector)(running_sum + r) + sum",
        f"{NATIVE}/test_chunks.py {NATIVE}/test_kinds.py::test_random_mixes",
    ),
    Mutant(
        "gradients of chunks of keys have the scale of those of values",
        "backends/native/kernels/results.h",
        "(REAL)(a ? task->p->keep_scale : task->p->scale)",
        "(REAL)(a ? task->p->scale : task->p->keep_scale)",
        f"{NATIVE}/test_chunks.py",
    ),
    Mutant(
        "gradients of weights lack the factor of those that dropout keeps",
        "backends/native/kernels/online_softmax.h",
        "(N(load_vector)(g) * keep_scale - delta[k])",
        "(N(load_vector)(g) - delta[k])",
        "tests/core/op/test_dropout.py",
    ),
    Mutant(
        "products of bf16 pairs are taken where they are slow",
        "backends/native/_native.pyx",
        "for i in sorted(here, key=is_slow)",
        "for i in here",
        f"{NATIVE}/test_bf16.py",
    ),
    Mutant(
        "the last rows of a cached sequence read the keys of other places",
        "backends/native/kernels/sequences.h",
        "move_rows(by_key[n], batch, first);",
        "move_rows(by_key[n], batch, first - p.first_row);",
        "tests/core/decoding/test_kvcache.py::test_few_rows",
    ),
    Mutant(
        "all query heads of a group see what the first one does",
        "backends/native/kernels/stored_rows.h",
        " + member * span->unseen_group",
        "",
        f"{NATIVE}/test_stored_rows.py",
    ),
    Mutant(
        "each piece of a span begins with its first row",
        "backends/native/kernels/stored_rows.h",
        "piece->from = piece_of_head * PIECE_ROWS",
        "piece->from = 0 * piece_of_head",
        f"{NATIVE}/test_stored_rows.py",
    ),
    Mutant(
        "rows of a span are left to one that shows the tokens between them",
        "backends/native/kernels/repeats.h",
        " || (last - a->position) % a->position_step",
        "",
        f"{NATIVE}/test_stored_rows.py",
    ),
    Mutant(
        "rows that some query heads do not see are left to others",
        "backends/native/kernels/repeats.h",
        " || a->unseen || b->unseen",
        " || b->unseen",
        f"{NATIVE}/test_stored_rows.py tests/core/decoding/test_cache.py",
    ),
    Mutant(
        "two of four neighbouring keys are dropped together",
        "backends/native/kernels/dropout.h",
        "x[keys[k] & 3]",
        "x[keys[k] & 1]",
        "tests/core/op/test_dropout.py::test_every_backend_and_dtype_drops_the_same",
    ),
    Mutant(
        "the last pairs of a narrow window count again in the wide one",
        "backends/native/kernels/branches.h",
        "task->after = -beyond;",
        "task->after = 1 - beyond;",
        f"{NATIVE}/test_kinds.py::test_pairs_of_several_bands_count_once",
    ),
)

ON_CPUS = (
    Mutant(
        "windows with a stride end early in each residue class",
        "backends/native/branches.py",
        "-(-length // classes)",
        "length // classes",
        f"{NATIVE}/test_kinds.py::test_bands_whose_rows_fall_into_classes",
    ),
    Mutant(
        "rows behind the last global token see what its row sees",
        "backends/native/branches.py",
        "seen = [outside, inside] * len(rows) + [outside]",
        "seen = [outside, inside] * len(rows) + [inside]",
        f"{NATIVE}/test_kinds.py::test_random_mixes",
    ),
    Mutant(
        "packed sequences longer than a layout read beyond it",
        "backends/native/backend.py",
        "for length in sorted(set(lengths.tolist()) - {0}):",
        "for length in sorted(set(lengths.tolist()) - {0})[:1]:",
        f"{NATIVE}/test_kinds.py::test_packed_sequences_longer_than_a_layout_are_an_error",
    ),
    Mutant(
        "gradients of queries and keys lack the scale",
        "backends/reference.py",
        "dscores * problem.scale if slope is None",
        "dscores if slope is None",
        "tests/core/op/test_sinks.py::test_gradients_of_every_backend",
    ),
    Mutant(
        "of several calls, the gradient of the last is all",
        "backends/sdpa/accumulators.py",
        "view.add_(part)",
        "view.copy_(part)",
        f"{SDPA}/test_kinds.py::test_any_mix_agrees_with_the_oracle",
    ),
    Mutant(
        "the last short block of a window sees keys one too early",
        "backends/sdpa/grids/tiles.py",
        "Tile(last, last - reach + rest, rest, reach - rest)",
        "Tile(last, last - reach + rest - 1, rest, reach - rest)",
        f"{SDPA}/test_kinds.py::test_tiles_add_up_to_the_count_and_no_pair_is_masked_out",
    ),
    Mutant(
        "heads of later offsets keep rows beyond the end of a short segment",
        "backends/sdpa/grids/problem_grid.py",
        "cut = min(max(longer - first, 0), count)",
        "cut = min(longer, count)",
        f"{SDPA}/test_problem_grid.py::test_grids_add_up_to_the_count",
    ),
    Mutant(
        "the last rows do not see themselves",
        "backends/sdpa/last_rows.py",
        "key_at[:, None] > query_at.unsqueeze(-1)",
        "key_at[:, None] >= query_at.unsqueeze(-1)",
        "tests/core/decoding/test_kvcache.py::test_last_rows_are_those_of_the_whole",
    ),
    Mutant(
        "rows that share memory are handed to torch's kernel, which leaves results unwritten",
        "backends/sdpa/layouts.py",
        "x.stride(1) < x.shape[3]",
        "x.stride(1) < 0",
        f"{SDPA}/test_backend.py::test_rows_that_share_memory",
    ),
)

ON_GPUS = (
    Mutant(
        "a step without new rows writes what tables say later",
        "backends/tiles/steps.py",
        "0 if step.key is None else len(placed.writes)",
        "len(placed.writes)",
        f"{TRITON}/test_stored_rows.py",
    ),
    Mutant(
        "a tile of rows reaches over the end of a segment",
        "backends/tiles/_tiles.pyx",
        "(start // branches[b, 0] + 1) * branches[b, 0]",
        "(start // branches[b, 0] + 2) * branches[b, 0]",
        f"{TILES}/test_schedule.py::test_tiles_show_the_count",
    ),
    Mutant(
        "keys behind a narrow window count again in the wide one",
        "backends/tiles/relations.py",
        "bounds = [(back, -form.first), (-form.first, ahead)]",
        "bounds = [(back, -form.first), (1 - form.first, ahead)]",
        f"{TILES}/test_relations.py::test_relations_show_the_count",
    ),
    Mutant(
        "rows see no more runs of columns than a launch takes",
        "backends/tiles/relations.py",
        "for first in range(0, most, MOST_RUNS):",
        "for first in range(0, 1):",
        f"{TILES}/test_relations.py::test_rows_that_see_many_runs_are_in_a_relation_for_so_many_each",
    ),
    Mutant(
        "tiles see the columns of the part before theirs",
        "backends/tiles/relation_tiles.py",
        "parts = [(p + 1, part)",
        "parts = [(p, part)",
        f"{TRITON}/test_tables.py::test_strips_show_the_count_of_runs",
    ),
    Mutant(
        "the longest tiles are computed last",
        "backends/tiles/schedule.py",
        "np.argsort(-keys",
        "np.argsort(keys",
        f"{TILES}/test_schedule.py::test_the_tiles_with_the_most_keys_come_first",
    ),
    Mutant(
        "a window leaves out what one of another rate has not shown",
        "dilkit/pattern/lowering/once.py",
        "return form.rate % other.rate == 0 and ",
        "return ",
        f"{NATIVE}/test_kinds.py::test_pairs_of_several_bands_count_once",
    ),
    Mutant(
        "a band without another that never reaches ahead begins behind its end on both sides",
        "dilkit/pattern/lowering/once.py",
        "other.begin == 0 and other.back == other.ahead",
        "other.begin == 0",
        "tests/core/test_lowering.py::test_bands_that_reach_farther_on_one_side",
    ),
    Mutant(
        "query heads of a key/value head keep the rows of the last of them",
        "dilkit/pattern/lowering/forms.py",
        "return len(offsets) == len({kv_head for kv_head, _ in offsets})",
        "return True",
        "tests/core/kinds/test_own_kinds.py::test_forms_that_kinds_of_dilkit_do_not_have",
    ),
    Mutant(
        "a mask is read with its sizes for strides",
        "backends/cuda/arguments.py",
        "(0, 0) if mask is None else mask.stride()",
        "(0, 0) if mask is None else mask.shape",
        f"{CUDA}/test_arguments.py::test_arguments_hold_what_the_problem_and_the_tensors_are",
    ),
    Mutant(
        "bfloat16 runs on tensor cores that have none for it",
        "backends/cuda/table.py",
        '"bfloat16": (8, 0)}',
        '"bfloat16": (7, 5)}',
        f"{CUDA}/test_table.py",
    ),
    Mutant(
        "more blocks are expected at once than a GPU has threads for",
        "backends/cuda/occupancy.py",
        "min(kernel.blocks, device.threads // kernel.threads, by_shared)",
        "min(kernel.blocks, by_shared)",
        f"{CUDA}/test_occupancy.py::test_threads_and_shared_memory_limit_as_well",
    ),
    Mutant(
        "code for a newer GPU is loaded on an older one",
        "backends/cuda/compile.py",
        "if number // 10 == major and number % 10 <= minor]",
        "if number // 10 == major]",
        f"{CUDA}/test_compile.py::test_the_architecture_is_the_newest_that_runs_there",
        needs="cupy",
    ),
    Mutant(
        "runs of keys end one too late",
        "backends/triton/segment_strips.py",
        "count = (stop - first - 1) // rate + 1",
        "count = (stop - first) // rate + 1",
        f"{TRITON}/test_tables.py::test_strips_show_the_count",
    ),
    Mutant(
        "strips at the edge of a window are taken for whole ones",
        "backends/triton/tables.py",
        'np.searchsorted(first, stop - back, side="left"),',
        'np.searchsorted(first, start - back, side="left"),',
        f"{TRITON}/test_tables.py::test_strips_show_the_count_of_every_kind",
    ),
    Mutant(
        "a kernel is handed fewer numbers of a tensor than it reads",
        "backends/numba/arguments.py",
        "span = 1 + sum(",
        "span = sum(",
        f"{NUMBA}/test_arguments.py",
    ),
    Mutant(
        "later groups of branches overwrite what earlier ones found",
        "backends/numba/backend.py",
        "LaunchGroup(tiles, branches, int(i == 0))",
        "LaunchGroup(tiles, branches, 1)",
        f"{NUMBA}/test_backend.py::test_forward_launches_each_group_once",
    ),
)

KERNELS_FOR_GPUS = (
    Mutant(
        "rowsum(dout * out) lacks half of the lanes",
        "backends/cuda/kernels/row_dots.cu",
        "for (int lanes = 1; lanes < LANES; lanes *= 2)",
        "for (int lanes = 1; lanes < LANES / 2; lanes *= 2)",
        f"{CUDA}/test_row_dots.py",
        needs="g++",
    ),
    Mutant(
        "keys are copied over rows of the tile that another warp still reads",
        "backends/cuda/kernels/mma_dquery_pairs.cu",
        "        synchronize();\n        copy_step(buffer, &columns, 0,",
        "        copy_step(buffer, &columns, 0,",
        f"{CUDA}/test_mma_backward.py::test_every_access_is_checked",
        needs="g++",
    ),
    Mutant(
        "gradients of the weights of a bias are added to those of the next tile as well",
        "backends/cuda/kernels/scores.cuh",
        "STORE(sums + thread, 0.0f);",
        ";",
        f"{CUDA}/test_conformance.py::test_the_kernels_change_scores_rightly",
        needs="g++",
    ),
    Mutant(
        "the derivative of a softcap is left out",
        "backends/cuda/kernels/scores.cuh",
        "return 1.0f - share * share;",
        "return 1.0f;",
        f"{CUDA}/test_conformance.py::test_the_kernels_change_scores_rightly",
        needs="g++",
    ),
    Mutant(
        "blocks take tiles from a counter while they sum gradients of the weights of a bias",
        "backends/cuda/backend.py",
        "elif items > blocks:",
        "if items > blocks:",
        f"{CUDA}/test_scores.py::test_blocks_that_sum_gradients_of_weights_have_tiles_of_their_own",
    ),
)

BACKENDS = (*KERNEL, *ON_CPUS, *ON_GPUS, *KERNELS_FOR_GPUS)
