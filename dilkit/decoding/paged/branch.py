"""`BranchStreams`: what one sequence keeps of one branch."""

from __future__ import annotations

from collections.abc import Sequence

from dilkit.decoding._kept_tokens import OfSegments
from dilkit.decoding.paged.stream import Stream


class BranchStreams:
    """The streams of a branch, one or several by their heads."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)
        kept = [stream.kept for stream in streams]
        segments = [one for one in kept if isinstance(one, OfSegments)]
        self._length = segments[0].length if segments else 0
        self._rate = segments[0].rate if segments else 1
        self._by_offset = {one.offset: stream for one, stream in zip(segments, streams, strict=False)}

    def of(self, token: int) -> Sequence[Stream]:
        """The streams that keep a token, or some of which its row sees: of segments those of the heads that keep it."""
        if not self._length:
            return self.streams
        stream = self._by_offset.get(token % self._length % self._rate)
        return () if stream is None else (stream,)

    def forget(self, before: int, row: int) -> None:
        """Give the pages back that no row from `row` on sees, as was done for `before`. Of segments when one has ended."""
        if self._length and before // self._length == row // self._length:
            return
        for stream in self.streams:
            stream.forget_before(stream.kept.needed(row))
