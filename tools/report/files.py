"""A result as files of JSON, Markdown and a picture, and its document on the terminal."""

import json
import sys
from pathlib import Path

from dilkit.tools.report import picture, registry, terminal
from dilkit.tools.report.markdown import document_markdown
from dilkit.tools.results.decode import encode
from dilkit.tools.results.environment import Result
from dilkit.tools.results.file import write_result, write_text


def publish(result: Result, folder: Path, stem: str, title: str, as_json: bool) -> None:
    """Write `stem`.json, .md and, with matplotlib, .png into `folder`, the page under `title`.

    Print the document, or with `as_json` the result; the names of the files go to stderr.
    """
    document = registry.words(result.kind).document(result)
    write_result(result, folder / f"{stem}.json")
    write_text(folder / f"{stem}.md", f"# {title}\n\n{document_markdown(document)}\n\n`{result.command}`\n")
    written = [f"{stem}.json", f"{stem}.md"]
    try:
        if document.plots:
            picture.write_png(document.plots, folder / f"{stem}.png", document.headline)
            written.append(f"{stem}.png")
    except ImportError as error:
        print(f"no picture: {error} (pip install 'dilkit[plot]')", file=sys.stderr)
    print(json.dumps(encode(result), allow_nan=False) if as_json else terminal.document_text(document))
    print(f"wrote {', '.join(written)} in {folder}", file=sys.stderr)
