"""Two ranks that share the device, forward and backward, against one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from dilkit import environment
from dilkit.comm.launch import processes, task
from dilkit.device import device_named
from dilkit.testing.accuracy import shortened
from dilkit.tools.bench.rank_jobs import check_calls
from dilkit.tools.gpu_day import backends
from dilkit.tools.gpu_day.step import Context, Item, judged

RANKS, LIMIT = 2, 60.0


def two_ranks(context: Context) -> Iterator[Item]:
    """The results of two ranks put together: beside the oracle, and beside one rank bit for bit."""
    kind = processes.transports()[0]
    for name in backends.ours(context):
        os.environ[environment.BACKEND.name] = name  # which the ranks inherit
        for dtype in ("float32",) if context.rehearse else ("float32", "bfloat16"):
            asked = shortened(backends.problem(device_named(context.device), dtype=dtype, requires_grad=True))
            problems = {name: replace(asked, is_causal=name == "causal") for name in ("all pairs", "causal")}
            compare = partial(check_calls, problems=problems, schedules=("auto",), compared_in=dtype)
            values = [row.values for row in task.run(kind, RANKS, compare, limit=LIMIT)]
            worst = max(one["ratio"] for one in values if "ratio" in one)
            same = all(one["bitwise"] for one in values if "bitwise" in one)
            wrong = f"the error is {worst:.2f} of what is allowed" if worst > 1 else ""
            wrong = wrong or ("" if same else "branch by branch, the bits differ from those of one rank")
            text = f"the error is {worst:.2f} of what is allowed; branch by branch, the bits of one rank"
            yield judged(f"{name}, {dtype}, {RANKS} ranks over {kind}", wrong, name, dtype, text)
