"""`--ranks N`: processes of this machine that embed a share of the slides each, and are followed by what they write.

They exchange nothing: each is given the whole plan in a file, and leaves what became of its slides in another.
"""

from __future__ import annotations

import math
import pickle
import sys
import tempfile
import time
from pathlib import Path

from dilkit import environment
from dilkit.comm.launch.processes import Ended, Job, start
from dilkit.integrations.gigapath.cohort.manifest import read_manifest
from dilkit.integrations.gigapath.cohort.run import Plan, Progress
from dilkit.threads import usable_cores
from dilkit.tools.commands.encode_slide.ranks import together_of
from dilkit.tools.commands.encode_slide.task import Outcome, Task

PLAN, OUTCOME = "plan", "outcome-{rank}"
_LOOK = 0.5
"""Seconds between two looks at what is there."""
_MOST_LINES = 40


def embed_in_processes(task: Task, plan: Plan, ranks: int, progress: Progress) -> Outcome:
    """What became of the slides of all ranks.

    Raises ChildProcessError where a process fails or is killed; what has been written until then stays, and is kept next time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, limit = Path(name), 0.0
        (folder / PLAN).write_bytes(pickle.dumps((task, plan)))
        threads = max(1, usable_cores() // ranks)
        job = start("torch", ranks, ["-m", "dilkit.tools.commands.encode_slide.processes", name], threads=threads)
        try:
            _follow(job, task, plan, progress)
            limit = math.inf  # they have ended, or one has failed
        finally:
            ended = job.finish(limit)
        outcomes = [folder / OUTCOME.format(rank=rank) for rank in range(ranks)]
        if ended.code or not all(path.exists() for path in outcomes):
            raise ChildProcessError(_complaint(ranks, ended))
        return together_of([pickle.loads(path.read_bytes()) for path in outcomes])


def _follow(job: Job, task: Task, plan: Plan, progress: Progress) -> None:
    """Wait until all processes have ended or one has failed; report the tiles of slides whose records are there."""
    wanted = {slide.output.name: slide.tiles for share in plan.shares for pack in share for slide in pack}
    while job.code is None and not any(process.poll() for process in job.processes):
        time.sleep(_LOOK)
        done = wanted.keys() & read_manifest(task.job.out, task.job.model).slides.keys()
        progress(sum(wanted.pop(name) for name in done))


def _complaint(ranks: int, ended: Ended) -> str:
    printed = "\n".join(ended.text.strip().splitlines()[-_MOST_LINES:])
    return f"--ranks {ranks}: a process ended with {ended.code}, and all have been ended. They printed:\n{printed or 'nothing'}"


def main(folder: Path) -> int:
    """What each of the processes runs."""
    task, plan = pickle.loads((folder / PLAN).read_bytes())
    started = environment.launch()
    rank = 0 if started is None else started.rank
    outcome = task.embed(plan, rank, lambda tiles: None)
    (folder / OUTCOME.format(rank=rank)).write_bytes(pickle.dumps(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
