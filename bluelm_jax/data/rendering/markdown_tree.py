"""Markdown as blocks and styled runs: CommonMark, tables, strikethrough, and math in dollars."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from bluelm_jax.data.rendering import scripts

if TYPE_CHECKING:
    from markdown_it.rules_inline import StateInline
    from markdown_it.tree import SyntaxTreeNode

MISSING = "rendering Markdown needs markdown-it-py: pip install markdown-it-py"


@dataclasses.dataclass(frozen=True)
class Run:
    """Text of one style. `math` holds LaTeX; `newline` runs are hard line breaks."""

    text: str
    bold: bool = False
    italic: bool = False
    code: bool = False
    strike: bool = False
    math: bool = False
    newline: bool = False


@functools.cache
def _parser() -> Any:
    try:
        import markdown_it
    except ImportError as error:
        raise ImportError(MISSING) from error
    parser = markdown_it.MarkdownIt("commonmark").enable(["table", "strikethrough"])
    # Before `escape`: a backslash in a formula is LaTeX's.
    parser.inline.ruler.before("escape", "math_inline", _math_rule)
    return parser


def _math_rule(state: StateInline, silent: bool) -> bool:
    """`$...$` without space inside the dollars and without a digit after them, as Pandoc has it."""
    source, start = state.src, state.pos
    if source[start] != "$" or start + 1 >= state.posMax or source[start + 1].isspace():
        return False
    end = source.find("$", start + 1)
    while end > 0 and source[end - 1] == "\\":
        end = source.find("$", end + 1)
    if end <= start + 1 or end >= state.posMax or source[end - 1].isspace():
        return False
    if source[end + 1 : end + 2].isdigit():
        return False
    if not silent:
        token = state.push("math_inline", "math", 0)
        token.content = source[start + 1 : end]
    state.pos = end + 1
    return True


def parse(source: str) -> list[SyntaxTreeNode]:
    """Parses a document into its top-level blocks.

    Raises:
      ImportError: without markdown-it-py.
    """
    parser = _parser()
    from markdown_it.tree import SyntaxTreeNode

    return list(SyntaxTreeNode(parser.parse(source)).children)


def split_blocks(source: str) -> list[str]:
    """The source of each top-level block, without the empty lines between."""
    lines = source.split("\n")
    found = []
    for node in parse(source):
        if node.map is not None:
            text = "\n".join(lines[node.map[0] : node.map[1]]).strip("\n").rstrip()
            found += [text] if text else []
    return found


def hides_something(node: SyntaxTreeNode) -> bool:
    """Whether a block's source holds what the page does not show: link targets, images, HTML."""
    for inner in node.walk():
        if inner.type in ("html_block", "html_inline", "image"):
            return True
        shown = "".join(child.content for child in inner.children)
        if inner.type == "link" and inner.attrs.get("href") not in (shown, f"mailto:{shown}"):
            return True
    return False


def runs(node: SyntaxTreeNode) -> list[Run]:
    """The styled text below an inline node; images stand for their description."""
    found: list[Run] = []
    _collect(node, Run(""), found)
    return found


_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}


def _collect(node: SyntaxTreeNode, style: Run, found: list[Run]) -> None:
    for child in node.children:
        if child.type in ("text", "text_special", "html_inline"):
            found.append(dataclasses.replace(style, text=scripts.clean(child.content)))
        elif child.type in ("softbreak", "hardbreak"):
            hard = child.type == "hardbreak"
            found.append(dataclasses.replace(style, text=" ", newline=hard))
        elif child.type == "code_inline":
            text = scripts.clean(child.content)
            found.append(dataclasses.replace(style, text=text, code=True))
        elif child.type == "math_inline":
            found.append(Run(child.content, math=True))
        else:
            name = _STYLES.get(child.type)
            inner = dataclasses.replace(style, **{name: True}) if name else style
            _collect(child, inner, found)


def plain_text(node: SyntaxTreeNode) -> str:
    """All text that faces have to cover, formulas left out."""
    if node.type == "inline":
        return "".join(run.text for run in runs(node) if not run.math)
    if node.type in ("fence", "code_block", "html_block"):
        return scripts.clean(node.content)
    return "".join(map(plain_text, node.children))
