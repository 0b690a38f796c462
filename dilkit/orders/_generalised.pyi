from collections.abc import Sequence

from dilkit.plan import Index

def generalised_hilbert(out: Index, shape: Sequence[int], threads: int = 1) -> None: ...
