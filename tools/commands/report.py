"""`dilkit report`: result files as text, as Markdown, and as one HTML page. A pure function of the files."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from dilkit.tools.console.text import print_json
from dilkit.tools.report import html, terminal
from dilkit.tools.report.document import Plot
from dilkit.tools.report.markdown import markdown
from dilkit.tools.report.picture import svg
from dilkit.tools.results.file import write_text

HELP = "show what result files say: tables, and plots as HTML or Markdown"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a JSON file that dilkit bench or dilkit demo wrote")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with all tables and plots")
    parser.add_argument("--md", type=Path, metavar="FILE", help="write Markdown, the plots beside it as FILE-1.svg and so on")
    parser.epilog = "Without --html and --md the tables are printed. Plots need matplotlib: pip install 'dilkit[plot]'."


def run(args: argparse.Namespace) -> int:
    """Read all files, then write or print; 0. Raises `ResultError` for the first file that is no result."""
    from dilkit.tools.report import registry  # loads every kind of result, which --help of all commands need not wait for

    sections = registry.sections_of(args.files)
    for option, path in (("--html", args.html), ("--md", args.md)):
        if path is not None and path.is_dir():
            raise ValueError(f"{option}: {path} is a folder; name the file to write in it")
    if args.html is not None and args.html == args.md:
        raise ValueError(f"--md: {args.md} is the file of --html; name another")
    note, written = "", list[Path]()
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        note = f"No plots: {error}. `pip install 'dilkit[plot]'` brings what draws them; the tables are whole."

    def write(path: Path, text: str) -> None:
        write_text(path, text)
        written.append(path)

    def picture(plot: Plot) -> str | None:
        if note:
            return None
        pictures = [path for path in written if path.suffix == ".svg"]
        path = args.md.with_name(f"{args.md.stem}-{len(pictures) + 1}.svg")
        write(path, svg(plot))
        return quote(path.name)

    if args.html:
        write(args.html, html.page(sections, None if note else svg, note))
    if args.md:
        write(args.md, markdown(sections, picture, note))
    if args.json:
        print_json("report", dict(sections=[asdict(one) for one in sections]))
    elif not written:
        print(terminal.text(sections))
    if written:
        print(f"wrote {', '.join(map(str, written))}", *filter(None, [note]), sep="\n", file=sys.stderr)
    return 0
