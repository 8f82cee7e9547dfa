"""For MkDocs: shows a notebook in a page, at the line ``<!-- notebook: examples/notebook.ipynb -->``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_MARK = re.compile(r"^<!-- notebook: (\S+) -->$", re.MULTILINE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's Markdown, with the cells of its notebooks and their stored outputs. Called by MkDocs."""
    return _MARK.sub(lambda found: _as_markdown(found[1]), markdown)


def _as_markdown(name: str) -> str:
    path = Path(__file__).parent.parent / name
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(re.sub(r"^#", "##", source))  # the page has its own title
        else:
            parts += [_fenced(source, "python"), *map(_output, cell["outputs"])]
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![plot](data:image/png;base64,{data['image/png'].strip()})"
    lines = output.get("text") or data.get("text/plain") or "\n".join(output["traceback"])
    return _fenced(_COLOR.sub("", "".join(lines)).rstrip(), "text")


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```"
