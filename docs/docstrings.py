"""For mkdocstrings: turns the Sphinx roles and literal blocks of docstrings into Markdown."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:func|meth|class|mod|data|attr|exc):`([^`]+)`")
_LITERAL = re.compile(r"^(?P<indent> *)(?P<text>.*)::\n\n(?P<code>(?:(?P=indent) {4}.*\n|\n)+)", re.MULTILINE)


def public_names() -> set[str]:
    """``print`` and the names in ``ignite_dist.__all__``, read without importing the package."""
    source = Path(__file__).parent.parent / "ignite_dist" / "__init__.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {"print", *ast.literal_eval(node.value)}
    raise LookupError(f"no __all__ in {source}")


PUBLIC_NAMES = public_names()


def to_markdown(docstring: str) -> str:
    """``docstring`` with links for roles, and fenced blocks for literal ones."""

    def link(role: re.Match[str]) -> str:
        name = role[1].lstrip("~.")
        return f"[`{name}`][ignite_dist.{name}]" if name in PUBLIC_NAMES else f"`{name}`"

    def fence(block: re.Match[str]) -> str:
        indent, text = block["indent"], block["text"]
        heading = f"**{text}**" if text == "Example" else f"{text}:"
        code = textwrap.dedent(block["code"]).strip("\n")
        fenced = f"{heading}\n\n```python\n{code}\n```"
        return textwrap.indent(fenced, indent) + "\n\n"

    return _LITERAL.sub(fence, _ROLE.sub(link, docstring) + "\n").strip()


class MarkdownDocstrings(Extension):
    """Converts the docstring of every object."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Convert the docstring before it is parsed."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
