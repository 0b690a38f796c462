"""Splits: no patient on both sides, the shares that were asked for, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.slide_tables import table
from hypothesis import assume, given
from hypothesis import strategies as st

from dilkit.integrations.gigapath.finetuning import read_labels, split_examples
from dilkit.integrations.gigapath.finetuning.labels import SPLITS, Example, Labels
from dilkit.integrations.gigapath.finetuning.splits import Splits, check_splits


def labels_of(patients: list[tuple[int, str]]) -> Labels:
    """A slide for each (patient, label)."""
    examples = tuple(Example(i + 2, f"s{i}", f"p{who}", label=label) for i, (who, label) in enumerate(patients))
    return Labels("labels.csv", examples, tuple(sorted({label for _, label in patients})), has_patients=True, has_splits=False)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), min_size=20, max_size=80), st.integers(0, 9))
def test_a_patient_is_on_one_side_and_shares_are_kept(patients: list[tuple[int, str]], seed: int) -> None:
    labels = labels_of(patients)
    assume(len(labels.classes) == 2)
    try:
        splits = split_examples(labels, seed, val_share=0.1, test_share=0.3)
    except ValueError as error:
        assert "has no slide" in str(error)  # noqa: PT017  a class may be too small for two sides
        assume(False)
    sides = {name: {labels.examples[i].patient for i in getattr(splits, name)} for name in SPLITS}
    everyone = {one.patient for one in labels.examples}
    assert sum(map(len, sides.values())) == len(everyone) == len(set.union(*sides.values()))
    assert sorted([*splits.train, *splits.val, *splits.test]) == list(range(len(patients)))
    assert abs(len(sides["test"]) - 0.3 * len(everyone)) <= 0.5
    assert abs(len(sides["val"]) - 0.1 * len(everyone)) <= 1
    assert splits == split_examples(labels, seed, val_share=0.1, test_share=0.3)


def test_classes_are_spread_evenly_and_the_seed_matters() -> None:
    labels = labels_of([(i, "rare" if i % 10 == 0 else "usual") for i in range(200)])
    splits = split_examples(labels)
    assert Counter(labels.examples[i].label for i in splits.test) == {"usual": 36, "rare": 4}
    assert Counter(labels.examples[i].label for i in splits.val) == {"usual": 18, "rare": 2}
    assert splits.drawn
    assert split_examples(labels, seed=1).test != splits.test


def test_splits_of_the_file(tmp_path: Path) -> None:
    lines = "a,x,train", "b,y,val", "c,x,test", "d,y,train", "e,y,test"
    splits = split_examples(read_labels(table(tmp_path, "slide,label,split", *lines)))
    assert (splits.train, splits.val, splits.test, splits.drawn) == ((0, 3), (1,), (2, 4), False)


@pytest.mark.parametrize(
    ("header", "lines", "complaint"),
    [
        ("slide,label,split", ["a,x,train", "b,y,train"], "split test has no slides (2 in all)"),
        ("slide,label,split", ["a,x,test", "b,y,val"], "split train has no slides"),
        ("slide,label,split", ["a,x,train", "b,y,train", "c,x,test"], "split test has no slide of class 'y', which line 3"),
        ("slide,label,split", ["a,x,train", "b,y,test", "c,x,test"], "split train has no slide of class 'y', which line 3"),
        ("slide,time,event,split", ["a,1,0,train", "b,1,1,test", "c,2,1,test"], "nobody in split train has event=1"),
        ("slide,time,event,split", ["a,1,1,train", "b,1,1,test", "c,1,0,test"], "no two patients in split test have times"),
    ],
)
def test_splits_of_which_nothing_can_be_learnt_or_judged(tmp_path: Path, header: str, lines: list[str], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the text is looked at
        split_examples(read_labels(table(tmp_path, header, *lines)))
    assert complaint in str(raised.value)
    assert "choose another seed or larger shares, or give a column split" in str(raised.value)


def test_splits_with_a_patient_on_both_sides_are_refused(tmp_path: Path) -> None:
    lines = "a,x,1", "b,y,2", "c,x,3", "d,y,2"
    labels = read_labels(table(tmp_path, "slide,label,patient", *lines))
    with pytest.raises(ValueError, match="line 5: patient '2' is in splits train and test"):
        check_splits(labels, Splits(train=(0, 1), val=(), test=(2, 3), drawn=False))


@pytest.mark.parametrize(
    ("shares", "complaint"),
    [
        (dict(val_share=0.5, test_share=0.5), "val_share=0.5 and test_share=0.5 leave nothing to learn from"),
        (dict(test_share=1.0), "test_share=1.0 must be at least 0 and less than 1"),
        (dict(val_share=-0.1), "val_share=-0.1 must be at least 0"),
    ],
)
def test_shares(shares: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        split_examples(labels_of([(i, "ab"[i % 2]) for i in range(20)]), **shares)


def test_a_share_of_0_draws_none() -> None:
    labels = labels_of([(i, "ab"[i % 2]) for i in range(20)])
    assert split_examples(labels, val_share=0.0).val == ()
    with pytest.raises(ValueError, match="split test has no slides"):
        split_examples(replace(labels, examples=labels.examples[:2]), val_share=0.0)
