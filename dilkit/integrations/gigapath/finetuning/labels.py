"""The slides of a CSV file with their labels or survival times, and their splits by patient. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from dilkit import files
from dilkit.checks import integer, shown
from dilkit.integrations.gigapath.config import check_share

SPLITS = ("train", "val", "test")
KNOWN = ("slide", "patient", "label", "time", "event", "split")
EVENTS = {"0": False, "1": True}
MOST_COMPLAINTS = 10


@dataclass(frozen=True)
class Example:
    """A slide with its target, as a line of the file has it.

    `patient` is the slide's own name where the file has no such column. `label` is there for classes, `time` and `event` (True:
    seen then, False: observation ended) for survival.
    """

    line: int
    slide: str
    patient: str
    split: str | None = None
    label: str | None = None
    time: float | None = None
    event: bool | None = None


@dataclass(frozen=True)
class Labels:
    """The slides of one file, in its order. `classes` are the labels, sorted; none for survival. `unread` are other columns."""

    source: str
    examples: tuple[Example, ...]
    classes: tuple[str, ...]
    has_patients: bool
    has_splits: bool
    unread: tuple[str, ...] = ()

    @property
    def is_survival(self) -> bool:
        return not self.classes


def read_labels(path: str | Path) -> Labels:
    """Read the slides of a CSV file in UTF-8, one a line, with a header.

    - `slide`: the name of its file of tile features, without the ending.
    - `label`, any text; or `time` (0 or more, of one unit) and `event` (1: seen at that time, 0: observation ended then).
    - `patient`, optional: the splits keep a patient's slides together.
    - `split`, optional: train, val or test.

    Raises OSError for a file that cannot be read, ValueError naming the lines for what is missing or does not fit: columns,
    values, slides that are there twice, a patient with two times or in two splits.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath.finetuning import read_labels
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels.csv")
        ...     _ = path.write_text("slide,label,patient\\na,benign,1\\nb,tumour,1\\nc,benign,2\\n")
        ...     labels = read_labels(path)
        >>> labels.classes, [one.patient for one in labels.examples]
        (('benign', 'tumour'), ['1', '1', '2'])
    """
    path = Path(path)
    header, rows = _rows(path)
    _check_header(path, header)
    complaints: list[str] = []
    examples = [one for line, cells in rows if (one := _example(line, cells, header, complaints))]
    refuse(str(path), [*complaints, *_disagreements(examples)])
    classes = tuple(sorted({one.label for one in examples if one.label is not None}))
    if not examples or ("label" in header and len(classes) < 2):
        what = f"the one label {shown(classes[0])}" if classes else "no slides"
        raise ValueError(f"{path}: line 1 is followed by {what}; two classes are needed at least, or time and event")
    unread = tuple(name for name in header if name not in KNOWN)
    return Labels(str(path), tuple(examples), classes, "patient" in header, "split" in header, unread)


def _rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8; save the table as CSV in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for row in reader:
            if any(cells := [cell.strip() for cell in row]):
                rows.append((line, cells))
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: line {line} is no line of CSV: {error}") from None
    if not rows:
        raise ValueError(f"{path} is empty; line 1 has to name the columns, such as slide,label,patient")
    return rows[0][1], rows[1:]


def _check_header(path: Path, header: list[str]) -> None:
    twice = sorted({name for name in header if header.count(name) > 1})
    targets = {name for name in ("label", "time", "event") if name in header}
    if twice:
        raise ValueError(f"{path}: line 1 names a column twice: {', '.join(map(shown, twice))}")
    if "slide" not in header or targets not in ({"label"}, {"time", "event"}):
        raise ValueError(f"{path}: line 1 names {', '.join(header)}; slide is needed, and label, or else time and event")


def _example(line: int, cells: list[str], header: list[str], complaints: list[str]) -> Example | None:
    if len(cells) != len(header):
        complaints.append(f"line {line} has {len(cells)} values, and line 1 names {len(header)} columns")
        return None
    row = dict(zip(header, cells, strict=True))
    wrong = [f"line {line}: {text}" for text in _faults(row)]
    complaints += wrong
    if wrong:
        return None
    timed = "time" in row
    return Example(
        line, row["slide"], row.get("patient", row["slide"]), row.get("split"), row.get("label"),
        time=float(row["time"]) if timed else None, event=EVENTS[row["event"]] if timed else None,
    )  # fmt: skip


def _faults(row: dict[str, str]) -> Iterator[str]:
    for name in ("slide", "patient", "label"):
        if row.get(name) == "":
            yield f"{name} is empty; give it, or leave the line out"
    if "time" in row and not _is_time(row["time"]):
        yield f"time={shown(row['time'])} is no number of 0 or more"
    if "event" in row and row["event"] not in EVENTS:
        yield f"event={shown(row['event'])} must be 1 (seen) or 0 (observation ended)"
    if "split" in row and row["split"] not in SPLITS:
        yield f"split={shown(row['split'])} must be one of {', '.join(SPLITS)}"


def _is_time(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf and "_" not in text
    except ValueError:
        return False


def _disagreements(examples: Sequence[Example]) -> Iterator[str]:
    slides: dict[str, int] = {}
    patients: dict[str, Example] = {}
    for one in examples:
        if (before := slides.setdefault(one.slide, one.line)) != one.line:
            yield f"line {one.line}: slide {shown(one.slide)} is that of line {before}"
        first = patients.setdefault(one.patient, one)
        who = f"line {one.line}: patient {shown(one.patient)}"
        if one.split != first.split:
            yield f"{who} is in split {one.split}, but in {first.split} on line {first.line}; a patient must be in one split"
        if (one.time, one.event) != (first.time, first.event):
            yield f"{who} has another time or event than on line {first.line}"


def refuse(source: str, complaints: Sequence[str]) -> None:
    if complaints:
        more = f"; and {len(complaints) - MOST_COMPLAINTS} more" if len(complaints) > MOST_COMPLAINTS else ""
        raise ValueError(f"{source}: {'; '.join(complaints[:MOST_COMPLAINTS])}{more}")


OTHERWISE = "choose another seed or larger shares (--seed, --test-share), or give a column split"


@dataclass(frozen=True)
class Splits:
    """The slides of each split, as indices into `Labels.examples`. `drawn`: by chance, not by the file."""

    train: tuple[int, ...]
    val: tuple[int, ...]
    test: tuple[int, ...]
    drawn: bool


def split_examples(labels: Labels, seed: int = 0, val_share: float = 0.1, test_share: float = 0.2) -> Splits:
    """Split by the file, or else draw `test_share` and `val_share` of the patients; the rest is `train`.

    Patients of each class (for survival, with and without the event) are spread evenly over the splits. Of a class with two or
    more, however few, test and train have one each. A patient is of the class of the first slide. A share of 0 draws none.

    Raises ValueError for shares that leave nothing to learn from, and for splits of which nothing can be learnt or judged: a
    class that only one of train and test has, no event, no pair of patients whose times can be compared.

        >>> import tempfile
        >>> from pathlib import Path
        >>> from dilkit.integrations.gigapath.finetuning import read_labels, split_examples
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "labels.csv")
        ...     _ = path.write_text("slide,label\\n" + "".join(f"{i},{'ab'[i % 2]}\\n" for i in range(20)))
        ...     splits = split_examples(read_labels(path))
        >>> len(splits.train), len(splits.val), len(splits.test)
        (14, 2, 4)
    """
    if labels.has_splits:
        splits = _members(labels, {one.patient: str(one.split) for one in labels.examples}, drawn=False)
    else:
        splits = _drawn(labels, seed, val_share, test_share)
    check_splits(labels, splits)
    return splits


def _drawn(labels: Labels, seed: int, val_share: float, test_share: float) -> Splits:
    for name, share in (("val_share", val_share), ("test_share", test_share)):
        check_share(name, share)
    test, val = Fraction(str(test_share)), Fraction(str(val_share))
    if test + val >= 1:
        raise ValueError(f"val_share={val_share} and test_share={test_share} leave nothing to learn from: less than 1 is needed")
    groups = _shuffled_by_class(labels, integer("seed", seed))
    patients = [patient for group in groups for patient in group]
    tested = _every(patients, test)
    if test:
        tested |= {group[0]: None for group in groups if len(group) > 1 and tested.keys().isdisjoint(group)}
    rest = [one for one in patients if one not in tested]
    watched = _every(rest, val / (1 - test))
    for group in groups:
        if all(one in tested or one in watched for one in group):
            watched = {one: None for one in watched if one not in group}
    side = {**dict.fromkeys(patients, "train"), **dict.fromkeys(tested, "test"), **dict.fromkeys(watched, "val")}
    return _members(labels, side, drawn=True)


def _members(labels: Labels, side: dict[str, str], drawn: bool) -> Splits:
    train, val, test = (tuple(i for i, one in enumerate(labels.examples) if side[one.patient] == name) for name in SPLITS)
    return Splits(train, val, test, drawn)


def _shuffled_by_class(labels: Labels, seed: int) -> list[list[str]]:
    firsts = {one.patient: one for one in reversed(labels.examples)}
    by_class: dict[str, list[str]] = defaultdict(list)
    for patient, one in firsts.items():
        by_class[str(one.event if labels.is_survival else one.label)].append(patient)
    chance = random.Random(seed)
    groups = [sorted(by_class[name]) for name in sorted(by_class)]
    for group in groups:
        chance.shuffle(group)
    return groups


def _every(patients: list[str], share: Fraction) -> dict[str, None]:
    half = Fraction(1, 2)
    chosen = (one for i, one in enumerate(patients) if math.floor((i + 1) * share + half) > math.floor(i * share + half))
    return dict.fromkeys(chosen)


def check_splits(labels: Labels, splits: Splits) -> None:
    """Raise ValueError where nothing can be learnt from `train` or judged on `test`, or a patient is on both sides."""
    sides: dict[str, str] = {}
    for name in SPLITS:
        for one in (labels.examples[i] for i in getattr(splits, name)):
            if (before := sides.setdefault(one.patient, name)) != name:
                raise ValueError(f"{labels.source}: line {one.line}: patient {one.patient!r} is in splits {before} and {name}")
    train, test = ([labels.examples[i] for i in indices] for indices in (splits.train, splits.test))
    if not train or not test:
        empty = "test" if train else "train"
        raise ValueError(f"{labels.source}: split {empty} has no slides ({len(labels.examples)} in all); {OTHERWISE}")
    if labels.is_survival:
        if not any(one.event for one in train):
            raise ValueError(f"{labels.source}: split train has no event=1, so nothing can be learnt; {OTHERWISE}")
        timed = [(one.time, one.event) for one in test if one.time is not None]
        first = min((time for time, event in timed if event), default=math.inf)
        if all(time <= first for time, _ in timed):
            raise ValueError(f"{labels.source}: no two patients in split test have times that can be compared; {OTHERWISE}")
    for name, own, other, others in (("train", train, "test", test), ("test", test, "train", train)):
        classes = {one.label for one in own}
        if lacking := [one for one in others if one.label not in classes]:
            patients = {one.patient for one in labels.examples if one.label == lacking[0].label}
            only = "the class has one patient, and both need one: add patients, or leave it out"
            raise ValueError(
                f"{labels.source}: split {name} has no slide of class {lacking[0].label!r}, which line {lacking[0].line} of "
                f"split {other} is of; {OTHERWISE if len(patients) > 1 else only}"
            )
