"""How long threads wait that take the tasks of one queue: list scheduling, simulated.

queue     a b c d e f ...          a thread that is free takes the next task, and begins it when those before it have ended:
thread 0  aaaaccccccc..ffff
thread 1  bbbbbbddddeeeeee..       f waits for e, and then thread 1 has nothing left to take
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Task:
    """A task's work, in any unit, and the numbers of those in the queue that have to end `after` which it begins."""

    work: float
    after: tuple[int, ...] = ()


def idle_share(tasks: Sequence[Task], threads: int) -> float:
    """Of the time of all threads, until the last task ends, the part in which they work on none.

    >>> idle_share([Task(1.0), Task(1.0), Task(2.0, after=(0, 1))], threads=2)
    0.3333333333333333
    """
    free, ends = [0.0] * threads, [0.0] * len(tasks)
    for number, task in enumerate(tasks):
        begin = max(heappop(free), *(ends[before] for before in task.after), 0.0)
        ends[number] = begin + task.work
        heappush(free, ends[number])
    return 1 - sum(task.work for task in tasks) / (threads * max(ends))
