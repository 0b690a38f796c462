from collections.abc import Sequence

from dilkit.orders.checks import Index

def generalised_hilbert(out: Index, shape: Sequence[int], threads: int = 1) -> None: ...
