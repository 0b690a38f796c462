"""`read_labels`: the slides of a CSV file with their labels or survival times. Imports no torch."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilkit import files
from dilkit.checks import shown

SPLITS = ("train", "val", "test")
KNOWN = ("slide", "patient", "label", "time", "event", "split")
EVENTS = {"0": False, "1": True}
MOST_COMPLAINTS = 10
"""As many as one error lists."""


@dataclass(frozen=True)
class Example:
    """A slide with what is to be learnt of it, as a line of the file says.

    `patient` is the slide's own name where the file has no such column. `label` is there for classes, `time` and `event` (whether
    it was seen at that time; if not, observation ended then) for survival.
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
        """True if time and event are learnt, not a label."""
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
    """Return the names of the columns, and the cells of each line that has any, with its number."""
    try:
        text = files.read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is no UTF-8; save the table as CSV in UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    while True:
        line = reader.line_num + 1
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            break
        except csv.Error as error:
            raise ValueError(f"{path}: line {line} is no line of CSV: {error}") from None
        if any(cells):
            rows.append((line, cells))
    if not rows:
        raise ValueError(f"{path} is empty; line 1 has to name the columns, such as slide,label,patient")
    return rows[0][1], rows[1:]


def _check_header(path: Path, header: list[str]) -> None:
    """Raise ValueError where a column is there twice, or what is needed is not."""
    twice = sorted({name for name in header if header.count(name) > 1})
    targets = {name for name in ("label", "time", "event") if name in header}
    if twice:
        raise ValueError(f"{path}: line 1 names a column twice: {', '.join(map(shown, twice))}")
    if "slide" not in header or targets not in ({"label"}, {"time", "event"}):
        raise ValueError(f"{path}: line 1 names {', '.join(header)}; slide is needed, and label, or else time and event")


def _example(line: int, cells: list[str], header: list[str], complaints: list[str]) -> Example | None:
    """Return the slide of a line; None where it does not fit, with a complaint added to `complaints`."""
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
    """Yield the faults in the values of a line."""
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
    """Yield lines that cannot both be right."""
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
    """Raise ValueError with the first complaints, if there are any."""
    if complaints:
        more = f"; and {len(complaints) - MOST_COMPLAINTS} more" if len(complaints) > MOST_COMPLAINTS else ""
        raise ValueError(f"{source}: {'; '.join(complaints[:MOST_COMPLAINTS])}{more}")
