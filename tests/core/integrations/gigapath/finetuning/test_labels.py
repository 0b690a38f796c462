"""Tables of slides: what is read, and that each complaint names its line."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from helpers.slide_tables import table
from hypothesis import given
from hypothesis import strategies as st

from dilkit.integrations.gigapath.finetuning import metrics, rates, read_labels
from dilkit.integrations.gigapath.finetuning.labels import Example

TEXTS = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=8)
ROWS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=2, max_size=12, unique_by=lambda row: row[0])


@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]) -> None:
    """Of any texts, quoted as CSV quotes them."""
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


def test_survival_and_what_is_not_read(tmp_path: Path) -> None:
    labels = read_labels(table(tmp_path, "time,slide,event,age", "1.5,a,1,60", "", "0,b,0,70"))
    assert labels.examples == (
        Example(2, "a", "a", time=1.5, event=True),
        Example(4, "b", "b", time=0.0, event=False),
    )
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
def test_complaints_name_the_line(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the text is looked at
        read_labels(table(tmp_path, *lines))
    assert str(tmp_path / "labels.csv") in str(raised.value)
    assert complaint in str(raised.value)


def test_all_complaints_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2: time='x'.*line 11: time='x'[^;]*; and 5 more$"):
        read_labels(table(tmp_path, "slide,time,event", *(f"{i},x,1" for i in range(15))))


def test_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_bytes(b"slide,label\n\xff,x\n")
    with pytest.raises(ValueError, match="byte 12 is no UTF-8"):
        read_labels(tmp_path / "labels.csv")


@pytest.mark.parametrize("module", [metrics, rates])
def test_examples_of_functions_that_are_not_public(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted
    assert not result.failed
