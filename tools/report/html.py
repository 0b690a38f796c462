"""A report as one HTML page that needs nothing else: styles and pictures are inside, no scripts, all texts escaped."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from itertools import count

from dilkit.tools.report.document import Plot, Section, Table

LONG = 24
"""Rows of a table beyond which it is folded away."""
SHORT = 22
"""Characters of a cell up to which it stays in one line."""
_NUMBER = re.compile(r"[-~]?\d|-$|\?$|$")

_STYLE = """\
:root {
  color-scheme: light dark;
  --back: #fbfaf8; --card: #fff; --line: #e4e1dc; --ink: #1f2328; --pale: #676d76; --faint: #e3e0db; --link: #0b6e99;
  --good: #2e7040; --good-back: #e2f1e4; --bad: #a23322; --bad-back: #fae5e0; --other-back: #eeece8;
  --series-1: #0b6e99; --series-2: #d1495b; --series-3: #c77700; --series-4: #3a7d44; --series-5: #6a4c93; --series-6: #5c5c5c;
  --series-7: #12a193; --series-8: #d66fb3; --series-9: #92901f; --series-10: #8b5a3c;
  --series-11: #6aa3e0; --series-12: #b0a7b9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #15181c; --card: #1c2025; --line: #333941; --ink: #e3e6ea; --pale: #9aa3ad; --faint: #333941; --link: #5cb8dd;
    --good: #86cf94; --good-back: #1d3524; --bad: #f0917f; --bad-back: #42211c; --other-back: #2a2f36;
    --series-1: #4fb3dc; --series-2: #f0808e; --series-3: #eba84a; --series-4: #74c281; --series-5: #b197dd; --series-6: #a9a9a9;
    --series-7: #5fd6c8; --series-8: #f2a3d5; --series-9: #d0cf66; --series-10: #c99a7b;
    --series-11: #9cc6f5; --series-12: #dcd6e2;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main, header { max-width: 76rem; margin: 0 auto; padding: 0 1rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; list-style: none; margin: 0; padding: 0; }
nav li, p, li { overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 1.2rem 0; padding: 1.1rem; }
.kind, .where, .note, .method { color: var(--pale); }
.kind { font-weight: normal; font-size: .95rem; }
.where, .note, .method, .notes { font-size: .88rem; }
.where { margin: .2rem 0 0; }
.plots { columns: 2 27rem; column-gap: 1.6rem; margin-top: 1.4rem; }
figure { margin: 0 0 1.6rem; break-inside: avoid; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
svg { display: block; width: 100%; height: auto; max-width: 34rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
th { border-top: 0; color: var(--pale); font-weight: 600; white-space: nowrap; }
td.short { white-space: nowrap; }
td.text { min-width: min(12rem, 42vw); overflow-wrap: anywhere; }
.n { text-align: right; white-space: nowrap; }
.good, .bad, .other { border-radius: 4px; padding: 0 .4em; display: inline-block; }
.good { color: var(--good); background: var(--good-back); }
.bad { color: var(--bad); background: var(--bad-back); }
.other { background: var(--other-back); }
summary { cursor: pointer; margin: 1.4rem 0 .4rem; font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .82rem; background: var(--other-back); padding: .5rem .7rem;
  border-radius: 6px; }
@media (max-width: 40rem) {
  section { padding: .8rem; border-radius: 8px; }
  main, header { padding: 0 .5rem; }
  .cards thead { display: none; }
  .cards tr { display: block; padding: .4rem .6rem; border-top: 1px solid var(--line); }
  .cards tr:first-child { border-top: 0; }
  .cards td { display: inline-block; border: 0; padding: 0 .9rem 0 0; text-align: left; white-space: normal; min-width: 0; }
  .cards td:first-child { display: block; font-weight: 600; padding: 0; }
  .cards td:empty { display: none; }
  .cards td::before { content: attr(data-of); color: var(--pale); margin-right: .4em; font-weight: normal; }
  .long td:first-child { position: sticky; left: 0; background: var(--card); }
}
"""


def page(sections: Sequence[Section], draw: Callable[[Plot, int], str] | None, note: str = "") -> str:
    """The whole page. `draw` makes an `<svg>` element of a plot and its number; None: no pictures, and `note` says why."""
    links = "".join(f'<li><a href="#result-{i}">{escape(one.name)}</a></li>' for i, one in enumerate(sections))
    navigation = f"<nav><ul>{links}</ul></nav>" if len(sections) > 1 else ""
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    numbers = count()

    def picture(plot: Plot) -> str:
        return f"<figure><figcaption>{escape(plot.title)}</figcaption>{draw(plot, next(numbers))}</figure>" if draw else ""

    parts = (_section(section, i, picture) for i, section in enumerate(sections))
    return _PAGE.format(style=_STYLE, navigation=navigation, note=told, sections="\n".join(parts))


_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>dilkit: measurements</title>
<style>
{style}</style>
</head>
<body>
<header><h1>Measurements</h1>{navigation}{note}</header>
<main>
{sections}
</main>
</body>
</html>
"""


def _section(section: Section, number: int, picture: Callable[[Plot], str]) -> str:
    """Where and what, the first table, the plots, the other tables, and what is to be known besides."""
    told = section.told
    first, *others = map(_table, told.tables) if told.tables else [""]
    pictures = "".join(map(picture, told.plots))
    notes = "".join(f"<li>{escape(line)}</li>" for line in told.notes)
    parts = [
        f'<section id="result-{number}">',
        f'<h2>{escape(section.name)} <span class="kind">{escape(section.kind)}</span></h2>',
        *(f'<p class="where">{escape(line)}</p>' for line in told.headline),
        first,
        f'<div class="plots">{pictures}</div>' if pictures else "",
        *others,
        f'<h3>Notes</h3><ul class="notes">{notes}</ul>' if notes else "",
        f'<p class="method">{escape(told.method)}</p>' if told.method else "",
        f"<pre>{escape(section.command)}</pre>",
        "</section>",
    ]
    return "\n".join(filter(None, parts))


def _table(table: Table) -> str:
    """The table in a box that scrolls by itself; folded away if it is long. On phones the rows of a short one are cards."""
    numeric = [all(_is_number(row[i]) for row in table.rows) for i in range(len(table.header))]
    pairs = zip(table.header, numeric, strict=True)
    head = "".join(f'<th scope="col"{_class(right, "")}>{escape(name)}</th>' for name, right in pairs)
    body = "".join(f"<tr>{''.join(map(_cell, row, table.header, numeric))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    long = len(table.rows) > LONG
    shown = f'<table class="{"long" if long else "cards"}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    box = f'<div class="wide" tabindex="0">{shown}</div>{note}'
    if not long:
        return f"<h3>{escape(table.title)}</h3>{box}"
    return f"<details><summary>{escape(table.title)} ({len(table.rows)} rows)</summary>{box}</details>"


def _is_number(cell: str) -> bool:
    return len(cell) <= SHORT and _NUMBER.match(cell) is not None


def _cell(cell: str, column: str, right: bool) -> str:
    shown = escape(cell)
    if column == "verdict":
        kind = "good" if cell in ("met", "aim met") else "bad" if cell == "short" else "other"
        shown = f'<span class="{kind}">{shown}</span>'
    of = f' data-of="{escape(column)}"' if column else ""
    return f"<td{_class(right, 'short' if len(cell) <= SHORT else 'text')}{of}>{shown}</td>"


def _class(right: bool, otherwise: str) -> str:
    name = "n" if right else otherwise
    return f' class="{name}"' if name else ""
