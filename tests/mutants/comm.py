"""Mutants of `comm/`."""

from __future__ import annotations

from mutants.mutant import Mutant

PLAN, ATTENTION, SHARDS, TRANSPORT, KEPT = (
    f"tests/comm/test_{name}.py" for name in ("exchange_plan", "attention", "shards", "transports", "kept")
)

PLANS = (
    Mutant(
        "under causality a rank's queries do not see the keys of its own group",
        "comm/plan/sharded_segments.py",
        "range(group + 1 if self.is_causal",
        "range(group if self.is_causal",
        f"{PLAN}::test_every_pair_of_the_count_is_computed_once",
    ),
    Mutant(
        "the flags of a mask are not counted among the bytes",
        "comm/plan/traffic.py",
        "return 2 * self.row_bytes + self.key_padding_mask",
        "return 2 * self.row_bytes",
        f"{PLAN}::test_what_is_sent_is_what_is_received_and_its_bytes_are_the_plan_s",
    ),
    Mutant(
        "a causal ring plans gradients from ranks that return none",
        "comm/plan/row_counts.py",
        "(others - self.shards.place if self.is_causal else others)",
        "others",
        "tests/comm/test_plan_numbers.py::test_as_much_is_received_as_is_sent",
    ),
    Mutant(
        "half of the buffers of a ring are forgotten",
        "comm/plan/buffer_bytes.py",
        "return 4 * rows.batch * rows.key_value_bytes * most",
        "return 2 * rows.batch * rows.key_value_bytes * most",
        "tests/comm/test_plan_numbers.py::test_ring_buffers_are_four_blocks",
    ),
    Mutant(
        "layouts of a part of the heads are numbered from the first of the part",
        "comm/plan/kinds/blocks.py",
        "runs[:, 0] += in_model[self.forms[0].heads[0]]",
        "runs[:, 0] += self.forms[0].heads[0]",
        "tests/comm/test_kinds.py::test_blocks",
    ),
)

PASSES = (
    Mutant(
        "compiled exchanges have no order",
        "comm/operators/order.py",
        "latest.get(graph)",
        "None",
        "tests/comm/test_compile.py::test_the_order_of_exchanges_is_that_of_the_program",
    ),
    Mutant(
        "a compiled backward pass has no mask for the keys that a rank received",
        "comm/operators/attention.py",
        "None if mask is None else flags",
        "None",
        "tests/comm/test_compiled_ranks.py::test_two_ranks",
    ),
    Mutant(
        "partial results are merged with each other's share",
        "comm/passes/_rows.pyx",
        "keep, add = <number>(old / total), <number>(new / total)",
        "keep, add = <number>(new / total), <number>(old / total)",
        f"{ATTENTION}::test_every_schedule_and_dtype",
    ),
    Mutant(
        "in a causal ring, rows see a part of the earlier blocks alone",
        "comm/passes/ring/segment.py",
        "causal = self.segment.is_causal and hop == 0",
        "causal = self.segment.is_causal",
        f"{ATTENTION}::test_every_schedule_and_dtype",
    ),
    Mutant(
        "gradients of keys and values are those of the last rank alone",
        "comm/passes/ring/backward.py",
        "total += more.to(total.dtype)",
        "total.copy_(more)",
        f"{ATTENTION}::test_every_schedule_and_dtype",
    ),
)

KEPT_ROWS = (
    Mutant(
        "rows that are sent again are not among the planned bytes",
        "comm/plan/exchange_plan.py",
        'step = "again" if phase == "backward" and self.keep == "nothing" else phase',
        "step = phase",
        f"{KEPT}::test_rows_that_are_sent_again_give_the_same_bits_and_the_planned_bytes",
    ),
    Mutant(
        "gradients of a rank's inputs alone are sent, whatever others ask for",
        "comm/rank_attention.py",
        "asked_on_any_rank(every_rank)",
        "arguments.gradients",
        f"{KEPT}::test_what_one_rank_asks_for_all_compute",
    ),
    Mutant(
        "sums of gradients begin anew at each branch",
        "comm/passes/all_to_all/backward.py",
        "total = self.sums.pop(role) if role in self.sums else self.results.lse.new_zeros(len(rows), d)",
        "total = self.results.lse.new_zeros(len(rows), d)",
        f"{KEPT}::test_rows_that_are_sent_again_give_the_same_bits_and_the_planned_bytes",
    ),
)

TRANSPORTS = (
    Mutant(
        "backward passes of other calls are taken for those of this one",
        "comm/passes/backward_call.py",
        "{CALL: context.began,",
        "{CALL: 0,",
        "tests/comm/test_misuse.py::test_backward_passes_in_another_order_are_errors",
    ),
    Mutant(
        "rows that a rank keeps are counted as sent",
        "comm/transports/base.py",
        "(len(rows) - send_counts[self.rank]) * rows.shape[1]",
        "len(rows) * rows.shape[1]",
        f"{TRANSPORT}::test_threads_conform",
    ),
    Mutant(
        "a record that was damaged on its way is believed",
        "comm/transports/records.py",
        'if crc32(text).to_bytes(4, "little") != row[:4]:',
        'if crc32(text).to_bytes(4, "little") == row[:4] == b"":',
        "tests/comm/test_damaged_records.py",
    ),
    Mutant(
        "a rank may run another version",
        "comm/transports/records.py",
        "if version != common",
        "if version == b''",
        "tests/comm/test_damaged_records.py",
    ),
    Mutant(
        "ranks that are threads share the memory of what they send",
        "comm/transports/threads.py",
        "message = message.clone()",
        "message = message.view(-1)",
        f"{TRANSPORT}::test_what_was_sent_may_be_overwritten_after_the_wait",
    ),
    Mutant(
        "a wait for MPI naps although something moves",
        "comm/transports/mpi/requests.py",
        "before, moved = count, now",
        "before, moved = count, moved",
        f"{TRANSPORT}::TestPoll",
    ),
    Mutant(
        "ranks that differ in their arguments go on",
        "comm/agreement.py",
        "if name not in may_differ:",
        "if name in may_differ:",
        "tests/comm/test_collectives.py tests/comm/test_shards.py",
    ),
    Mutant(
        "parameters are copied from rank 0, whichever is asked for",
        "comm/collectives.py",
        "place = (comm.rank - source) % comm.size",
        "place = comm.rank % comm.size",
        "tests/comm/test_collectives.py::test_copies_are_what_the_source_has",
    ),
    Mutant(
        "the exit code of a job is that of rank 0",
        "comm/launch/ranks.py",
        "return next((code for code in codes if code), 0)",
        "return codes[0]",
        "tests/tools/bench/test_ranks.py::TestWhichRanks::test_threads_give_the_first_code_that_is_not_0_and_name_who_raised",
    ),
)

SHARED_OUT = (
    Mutant(
        "packed sequences are shared out by the last one alone",
        "comm/packed/shares.py",
        "(load + work[i], rank)",
        "(work[i], rank)",
        "tests/comm/test_packed.py::test_whole_sequences_are_sent_nowhere",
    ),
    Mutant(
        "rows along an order are taken for those of the rank before",
        "comm/reorder.py",
        'source = np.searchsorted(cuts[1:], incoming, side="right")',
        'source = np.searchsorted(cuts[1:], incoming, side="left")',
        "tests/comm/test_orders.py::test_tables_of_a_rank_are_as_long_as_its_rows",
    ),
    Mutant(
        "positions of a shard begin at 0 on every rank",
        "comm/shards.py",
        "torch.arange(start, start + rows, device=device)",
        "torch.arange(rows, device=device)",
        f"{SHARDS}::test_positions",
    ),
    Mutant(
        "what follows the array of a file is left out unsaid",
        "comm/token_files.py",
        "if more := path.stat().st_size - tokens.offset - tokens.nbytes:",
        "if more := min(0, path.stat().st_size - tokens.offset - tokens.nbytes):",
        f"{SHARDS}::test_damaged_files_are_refused_by_name",
    ),
)

COMM = (*PLANS, *PASSES, *KEPT_ROWS, *TRANSPORTS, *SHARED_OUT)
