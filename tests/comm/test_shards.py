"""Shards, their cuts, files of tokens and positions."""

import time
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from dilkit import Pattern
from dilkit.comm import PlanMismatch, load_shard, positions, run_threads, shard, shard_cuts, unshard


@given(st.integers(1, 10**6), st.integers(1, 64), st.lists(st.integers(1, 5000), max_size=3))
def test_cuts_share_out_all_rows(seq, world_size, lengths):
    if seq < world_size:
        return
    pattern = Pattern(lengths, [1] * len(lengths)) if lengths else None
    cuts = shard_cuts(seq, world_size, pattern)
    sizes = [stop - start for start, stop in pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(sizes)) == (0, seq, world_size)
    assert min(sizes) >= 1
    assert max(sizes) <= max(1.03 * seq / world_size, -(-seq // world_size))


def test_cuts_are_where_segments_begin_if_that_is_nearly_even():
    assert shard_cuts(1000, 3, Pattern([8, 16], [1, 2])) == (0, 336, 672, 1000)
    assert shard_cuts(1000, 3, Pattern([8, 400], [1, 2])) == (0, 336, 664, 1000)
    assert shard_cuts(10, 3, Pattern([8], [1])) == (0, 3, 6, 10)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_shards_put_together_are_the_whole(dim, dtype):
    x = (torch.randn(7, 11, 5) * 3).to(dtype)

    def on_rank(comm):
        part = shard(x, comm, dim=dim)
        assert part.is_contiguous()
        assert torch.equal(unshard(part, comm, dim=dim), x)

    run_threads(4, on_rank)


def test_a_sequence_of_numbers_and_rows_of_no_width():
    def on_rank(comm):
        for x in (torch.arange(9), torch.empty(9, 0)):
            assert torch.equal(unshard(shard(x, comm, dim=0), comm, dim=0), x)

    run_threads(2, on_rank)


def test_shards_of_no_rows_are_put_together_too():
    def on_rank(comm):
        return unshard(torch.arange(3.0).view(1, 3)[:, : 3 * comm.rank], comm)

    assert [x.tolist() for x in run_threads(2, on_rank)] == [[[0.0, 1.0, 2.0]]] * 2


def test_a_shard_hands_its_gradient_to_its_rows():
    def on_rank(comm):
        x = torch.zeros(1, 6, requires_grad=True)
        (shard(x, comm) * (comm.rank + 1)).sum().backward()
        return x.grad

    assert sum(run_threads(3, on_rank)).tolist() == [[1, 1, 2, 2, 3, 3]]


def test_a_whole_that_hands_no_gradients_back_is_refused_on_every_rank():
    def on_rank(comm):
        own = torch.ones(1, 2, requires_grad=comm.rank == 1)
        with pytest.raises(ValueError, match=r"x of shape \(1, 2\) requires gradients, but unshard has no backward pass"):
            unshard(own, comm)
        with torch.no_grad():
            unshard(own, comm)
        unshard(own.detach(), comm)

    run_threads(3, on_rank)


def test_shards_that_do_not_fit_each_other_are_refused_on_every_rank():
    def on_rank(comm):
        odd = comm.rank == 1
        said = []
        for x in (
            torch.zeros(1, 2, 3 + odd),
            torch.zeros(1, 2, dtype=torch.float64 if odd else None),
            "x" if odd else torch.zeros(1, 2),
        ):
            with pytest.raises((PlanMismatch, TypeError), match=r"arguments of unshard|x is a str") as caught:
                unshard(x, comm)
            said.append(str(caught.value))
        return said

    for said in (run_threads(3, on_rank)[rank] for rank in (0, 2)):
        assert "rank 1 has shape=[1, 4], the others [1, 3]" in said[0]
        assert "rank 1 has dtype='torch.float64', the others 'torch.float32'" in said[1]
        assert "on rank 1: TypeError: x is a str" in said[2]


@pytest.mark.parametrize("pattern", [None, Pattern([16], [2])])
def test_each_rank_reads_its_tokens_from_a_file(tmp_path, pattern):
    tokens = np.arange(1000, dtype=np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.astype("<i2").tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "pairs.npy", tokens.reshape(-1, 2).astype(">i4"))
    np.save(tmp_path / "columns.npy", np.asfortranarray(tokens.reshape(-1, 2)))

    def on_rank(comm):
        part = load_shard(tmp_path / "tokens.npy", comm, pattern)
        assert torch.equal(part, shard(torch.from_numpy(tokens), comm, pattern, dim=0))
        assert torch.equal(load_shard(str(tmp_path / "tokens.bin"), comm, pattern, dtype="<i2"), part.to(torch.int16))
        for name in ("pairs.npy", "columns.npy"):  # bytes in the other order; columns one after the other
            assert torch.equal(load_shard(tmp_path / name, comm).int(), shard(torch.from_numpy(tokens).view(-1, 2), comm, dim=0))

    run_threads(3, on_rank)


def test_ranks_of_one_process_read_headers_in_turn(tmp_path, monkeypatch):
    """CPython 3.11 counts parse depth for all threads together, which can end in a SystemError."""
    np.save(tmp_path / "tokens.npy", np.arange(6))
    open_memmap, reading, at_once = np.lib.format.open_memmap, [], []

    def slow_open(*args, **kwargs):
        reading.append(None)
        at_once.append(len(reading))
        time.sleep(0.01)  # the other ranks arrive
        reading.pop()
        return open_memmap(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "open_memmap", slow_open)
    run_threads(3, lambda comm: load_shard(tmp_path / "tokens.npy", comm))
    assert at_once == [1, 1, 1]


def npy(header, content=bytes(24)):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content


def saved(*arrays, save=np.save):
    file = BytesIO()
    for array in arrays:
        save(file, array)
    return file.getvalue()


FIELDS = "{'descr': '<i4', 'fortran_order': False, 'shape': "
DAMAGED = {
    "open bracket": (npy(FIELDS + "(6,\n"), "cannot be read as .npy"),
    "sums without end": (npy("1" + "+1" * 3000), "cannot be read as .npy"),
    "header cut off": (npy(FIELDS + "(6,), }")[:40], "cannot be read as .npy"),
    "numbers cut off": (saved(np.arange(9))[:-1], "cannot be read as .npy: mmap length is greater"),
    "more bytes": (saved(np.arange(9)) + bytes(3), r"goes on for 3 bytes after the \(9,\) numbers"),
    "more than memory has": (npy(FIELDS + "(4611686018427387904, 8), }\n"), "cannot be read as .npy"),
    "no tokens": (npy(FIELDS + "(), }\n", bytes(4)), "numbers .seq, .... are needed"),
    "pairs by name": (saved(np.zeros(4, [("a", "<i4")])), "numbers .seq, .... are needed"),
    "archive": (saved(np.arange(9), save=np.savez), "cannot be read as .npy: the magic string is not correct"),
}


@pytest.mark.parametrize(("content", "text"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_by_name(content, text, tmp_path):
    (tmp_path / "tokens.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"tokens\.npy' {text}" if "needed" not in text else text):
        run_threads(1, lambda comm: load_shard(tmp_path / "tokens.npy", comm))


def test_files_that_hold_something_else_than_raw_numbers(tmp_path):
    (tmp_path / "tokens").write_bytes(saved(np.arange(9)))
    with pytest.raises(ValueError, match=r"tokens' begins like an .npy file"):
        run_threads(1, lambda comm: load_shard(tmp_path / "tokens", comm, dtype="uint16"))
    for dtype in ("S0", "V0", "O", "u2,u2", "M8[s]"):
        with pytest.raises(ValueError, match=r"numbers \(seq, \.\.\.\) are needed"):
            run_threads(1, lambda comm, dtype=dtype: load_shard(tmp_path / "tokens", comm, dtype=dtype))


def test_positions():
    def on_rank(comm):
        return positions([2, 1, 4][comm.rank], comm).tolist()

    assert run_threads(3, on_rank) == [[0, 1], [2], [3, 4, 5, 6]]


def test_positions_of_no_number_of_rows_are_refused_on_every_rank():
    def on_rank(comm):
        for odd, text in ((2.5, "rows=2.5 is a float"), (-1, "rows=-1 must be at least 0")):
            with pytest.raises((TypeError, ValueError), match=text):
                positions(odd if comm.rank == 1 else 3, comm)

    run_threads(3, on_rank)
