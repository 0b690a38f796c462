"""The state machine: hypothesis chooses steps, the world performs them."""

import faulthandler
from collections import Counter
from typing import Any, ClassVar

from fuzz import strategies as draw
from fuzz.journal import Journal
from fuzz.world import World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from dilkit.comm.plan.exchange_plan import SCHEDULES

HANGS_AFTER = 300
"""Seconds that one step may take; what all threads do is shown then, and the process ends."""


class Machine(RuleBasedStateMachine):
    journal: ClassVar[Journal]
    performed: ClassVar[Counter[str]]

    @initialize()
    def begin(self):
        self.world = World()
        self.journal.begin()
        self.performed["runs"] += 1

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()

    def do(self, name: str, /, **arguments):
        step = dict(do=name, **arguments)
        self.journal.write(step)
        self.performed[name] += 1
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        try:
            self.world.perform(step)
        finally:
            faulthandler.cancel_dump_traceback_later()
        self.performed["compared"] += self.world.compared
        self.world.compared = 0

    @rule(setting=draw.settings)
    def set_to(self, setting: tuple[str, str]):
        self.do("set_to", name=setting[0], value=setting[1])

    @rule()
    def clear(self):
        self.do("clear")

    @rule(call=draw.calls(may_score=True))
    def call(self, call: draw.Data):
        self.do("call", call=call)

    @rule(call=draw.calls(longest=400, ways=("function", "operator"), may_score=True))
    def long_call(self, call: draw.Data):
        self.do("call", call=call)

    @rule(call=draw.plain_calls, threads=st.integers(1, 5))
    def again(self, call: draw.Data, threads: int):
        self.do("again", call=call, threads=threads)

    @rule(
        calls=st.lists(draw.calls(ways=("function", "operator", "autocast")), min_size=2, max_size=4), clears=st.integers(0, 20)
    )
    def together(self, calls: list[draw.Data], clears: int):
        self.do("together", calls=calls, clears=clears)

    @rule(
        cut=draw.calls_with_cuts(draw.calls_of_kinds),
        schedule=st.sampled_from(["auto", *SCHEDULES]),
        fuse=st.sampled_from([True, True, False]),
        small=st.booleans(),
    )
    def ranks(self, cut: tuple[draw.Data, list[int]], schedule: str, fuse: bool, small: bool):
        self.do("ranks", call=cut[0], cuts=cut[1], schedule=schedule, fuse_branches=fuse, small=small)

    @rule(call=draw.calls())
    def forward(self, call: draw.Data):
        self.do("forward", call=call)

    @rule(
        at=st.integers(0, 9),
        after=st.sampled_from(["nothing", "in place", "memory gone", "behind autograd", "other thread"]),
        which=st.integers(0, 9),
    )
    def backward(self, at: int, after: str, which: int):
        self.do("backward", at=at, after=after, which=which)

    @rule(call=draw.plain_calls, wrong=draw.wrong_arguments)
    def wrong(self, call: draw.Data, wrong: tuple[str, str]):
        self.do("wrong", call=call, argument=wrong[0], how=wrong[1])

    @rule(call=draw.plain_calls, at=st.integers(0, 9), how=draw.wrong_tensors, backward=st.booleans())
    def wrong_operator(self, call: draw.Data, at: int, how: str, backward: bool):
        self.do("wrong_operator", call=call, at=at, how=how, backward=backward)

    @rule(call=draw.plain_calls, at=st.integers(0, 200), cut=st.integers(0, 5), put=draw.texts)
    def text(self, call: draw.Data, at: int, cut: int, put: str):
        self.do("text", call=call, at=at, cut=cut, put=put)

    @rule(fields=draw.pattern_fields())
    def pattern(self, fields: draw.Data):
        self.do("pattern", fields=fields)

    @rule(call=draw.plain_calls, own=draw.own_kinds)
    def kind(self, call: draw.Data, own: tuple[str, tuple[Any, ...]]):
        self.do("kind", call=call, name=own[0], numbers=own[1])

    @rule(call=draw.plain_calls, tokens=st.integers(50, 59), mask=st.booleans())
    def giant(self, call: draw.Data, tokens: int, mask: bool):
        self.do("giant", call=call, tokens=tokens, mask=mask)

    @rule(fields=draw.problem_fields(), device=draw.devices)
    def problem(self, fields: draw.Data, device):
        self.do("problem", fields=fields, device=device)

    @rule(grid=draw.grids())
    def order(self, grid: draw.Data):
        self.do("order", **grid)

    @rule(perm=draw.permutations, extra_tokens=st.integers(0, 3))
    def permutation(self, perm: list[int], extra_tokens: int):
        self.do("permutation", perm=perm, extra_tokens=extra_tokens)

    @rule(cloud=draw.clouds())
    def points(self, cloud: draw.Data):
        self.do("points", **cloud)

    @rule(call=draw.plain_calls, shape=draw.sides, curves=draw.curves, cut=st.just(0) | st.integers(1, 60))
    def ordered(self, call: draw.Data, shape: list[int], curves: list[str], cut: int):
        self.do("ordered", call=call, shape=shape, curves=curves, cut=cut)

    @rule(cut=draw.calls_with_cuts(draw.plain_calls), rank=st.integers(0, 6), wrong=draw.wrong_on_a_rank)
    def wrong_rank(self, cut: tuple[draw.Data, list[int]], rank: int, wrong: tuple[str, str]):
        self.do("wrong_rank", call=cut[0], cuts=cut[1], rank=rank, argument=wrong[0], how=wrong[1])

    @rule(call=draw.calls_of_modules, rotary=st.booleans(), layer_norm=st.booleans(), cross=st.booleans())
    def module(self, call: draw.Data, rotary: bool, layer_norm: bool, cross: bool):
        self.do("module", call=call, rotary=rotary, layer_norm=layer_norm, cross=cross)

    @rule(decoding=draw.decodings())
    def decoded(self, decoding: draw.Data):
        self.do("decoded", **decoding)

    @rule(call=draw.plain_calls, batch=st.booleans())
    def empty(self, call: draw.Data, batch: bool):
        self.do("empty", call=call, batch=batch)


def machine_of(step: str | None) -> type[Machine]:
    """The machine; with a name, one that performs that step alone."""
    others = [name for name, x in vars(Machine).items() if hasattr(x, "hypothesis_stateful_rule") and name != step]
    return Machine if step is None else type("One", (Machine,), dict.fromkeys(others))
