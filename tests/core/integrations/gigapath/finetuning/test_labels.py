"""Tables of slides: what is read, that each complaint names its line, and how patients are split."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from helpers.slide_tables import table
from hypothesis import assume, given, strategies as st

from dilkit.integrations.gigapath.finetuning import read_labels, split_examples
from dilkit.integrations.gigapath.finetuning.labels import SPLITS, Example, Labels, Splits, check_splits

TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
ROWS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=2, max_size=12, unique_by=lambda row: row[0])


@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("labels") / "labels.csv"
    lines = (",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in [("slide", "patient", "label"), *rows])
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    classes = tuple(sorted({label for *_, label in rows}))
    if len(classes) < 2:
        with pytest.raises(ValueError, match="two classes are needed"):
            read_labels(path)
        return
    labels = read_labels(path)
    assert [(one.slide, one.patient, one.label) for one in labels.examples] == rows
    assert [one.line for one in labels.examples] == list(range(2, len(rows) + 2))
    assert labels.classes == classes
    assert labels.has_patients
    assert not labels.is_survival


def test_survival_and_what_is_not_read(tmp_path):
    labels = read_labels(table(tmp_path, "time,slide,event,age", "1.5,a,1,60", "", "0,b,0,70"))
    assert labels.examples == (Example(2, "a", "a", time=1.5, event=True), Example(4, "b", "b", time=0.0, event=False))
    assert labels.is_survival
    assert not labels.has_patients
    assert labels.unread == ("age",)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["slide,label"], "line 1 is followed by no slides"),
        (["slide,label", "a,x", "b,x"], "line 1 is followed by the one label 'x'; two classes are needed"),
        (["slide,label,label", "a,x,x"], "line 1 names a column twice: 'label'"),
        (["slide,time", "a,1"], "line 1 names slide, time; slide is needed, and label, or else time and event"),
        (["slide,label,time,event", "a,x,1,1"], "slide is needed, and label, or else time and event"),
        (["name,label", "a,x"], "line 1 names name, label; slide is needed"),
        (["slide,label", "a,x", "b"], "line 3 has 1 values, and line 1 names 2 columns"),
        (["slide,label", "a,x", ",y"], "line 3: slide is empty"),
        (["slide,label,patient", "a,x,1", "b,y,"], "line 3: patient is empty"),
        (["slide,label", "a,x", "b,"], "line 3: label is empty"),
        (["slide,label", "a,x", "b,y", "a,y"], "line 4: slide 'a' is that of line 2"),
        (["slide,time,event", "a,-1,1"], "line 2: time='-1' is no number of 0 or more"),
        (["slide,time,event", "a,nan,1"], "line 2: time='nan' is no number"),
        (["slide,time,event", "a,1_0,1"], "line 2: time='1_0' is no number"),
        (["slide,time,event", "a,1,yes"], "line 2: event='yes' must be 1 (seen) or 0"),
        (["slide,label,split", "a,x,training"], "line 2: split='training' must be one of train, val, test"),
        (
            ["slide,label,patient,split", "a,x,1,train", "b,y,1,test"],
            "line 3: patient '1' is in split test, but in train on line 2",
        ),
        (["slide,time,event,patient", "a,1,1,p", "b,2,1,p"], "line 3: patient 'p' has another time or event than on line 2"),
        (["slide,label", '"a,x'], "line 2 is no line of CSV"),
        ([""], "is empty; line 1 has to name the columns"),
    ],
)
def test_complaints_name_the_line(tmp_path, lines, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as raised:
        read_labels(table(tmp_path, *lines))
    assert str(tmp_path / "labels.csv") in str(raised.value)


def test_complaints_are_counted_and_name_what_is_no_text(tmp_path):
    with pytest.raises(ValueError, match=r"line 2: time='x'.*line 11: time='x'[^;]*; and 5 more$"):
        read_labels(table(tmp_path, "slide,time,event", *(f"{i},x,1" for i in range(15))))
    (tmp_path / "labels.csv").write_bytes(b"slide,label\n\xff,x\n")
    with pytest.raises(ValueError, match="byte 12 is no UTF-8"):
        read_labels(tmp_path / "labels.csv")


def labels_of(patients):
    examples = tuple(Example(i + 2, f"s{i}", f"p{who}", label=label) for i, (who, label) in enumerate(patients))
    return Labels("labels.csv", examples, tuple(sorted({label for _, label in patients})), has_patients=True, has_splits=False)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from("ab")), min_size=4, max_size=80), st.integers(0, 9))
def test_a_patient_is_on_one_side_and_shares_are_kept(patients, seed):
    labels = labels_of(patients)
    firsts = Counter(dict(reversed(patients)).values())
    assume(len(labels.classes) == 2)
    try:
        splits = split_examples(labels, seed, val_share=0.1, test_share=0.3)
    except ValueError as error:
        assert "has no slide" in str(error)  # noqa: PT017
        assert min(firsts["a"], firsts["b"]) < 2  # a class of two patients has both sides
        assume(False)
    sides = {name: {labels.examples[i].patient for i in getattr(splits, name)} for name in SPLITS}
    everyone = {one.patient for one in labels.examples}
    assert sum(map(len, sides.values())) == len(everyone) == len(set.union(*sides.values()))
    assert sorted([*splits.train, *splits.val, *splits.test]) == list(range(len(patients)))
    few = min(firsts["a"], firsts["b"]) < 4
    assert abs(len(sides["test"]) - 0.3 * len(everyone)) <= 0.5 + few
    assert abs(len(sides["val"]) - 0.1 * len(everyone)) <= 1 + few
    assert splits == split_examples(labels, seed, val_share=0.1, test_share=0.3)


def test_classes_are_spread_evenly_and_the_seed_matters():
    labels = labels_of([(i, "rare" if i % 10 == 0 else "usual") for i in range(200)])
    splits = split_examples(labels)
    assert Counter(labels.examples[i].label for i in splits.test) == {"usual": 36, "rare": 4}
    assert Counter(labels.examples[i].label for i in splits.val) == {"usual": 18, "rare": 2}
    assert splits.drawn
    assert split_examples(labels, seed=1).test != splits.test


def test_splits_of_the_file(tmp_path):
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
        ("slide,label", ["a,x", "b,x", "c,y"], "is of; the class has one patient"),
        ("slide,time,event,split", ["a,1,0,train", "b,1,1,test", "c,2,1,test"], "split train has no event=1"),
        ("slide,time,event,split", ["a,1,1,train", "b,1,1,test", "c,1,0,test"], "no two patients in split test have times"),
    ],
)
def test_splits_of_which_nothing_can_be_learnt_or_judged(tmp_path, header, lines, complaint):
    with pytest.raises(ValueError, match=re.escape(complaint)) as raised:
        split_examples(read_labels(table(tmp_path, header, *lines)))
    assert re.search("choose another seed or larger shares|has one patient, and both need one: add patients", str(raised.value))


def test_splits_with_a_patient_on_both_sides_are_refused(tmp_path):
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
def test_shares(shares, complaint):
    labels = labels_of([(i, "ab"[i % 2]) for i in range(20)])
    with pytest.raises(ValueError, match=complaint):
        split_examples(labels, **shares)
    assert split_examples(labels, val_share=0.0).val == ()
    with pytest.raises(ValueError, match="split test has no slides"):
        split_examples(replace(labels, examples=labels.examples[:2]), val_share=0.0)
