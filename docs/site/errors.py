"""A page of every error and warning that the package says, for the search: read from its sources, a section a room.

Values that a message puts in are shown as `...`. Errors are raised, listed, returned and put together in many ways, so
the page has every text of the sources that could be one, and with them some lines of reports.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_megatron"

# Fewer words are parts of a message, or names.
_FEWEST_WORDS = 4
# What describes options, by the names of functions and of constants.
_DESCRIBES = re.compile(r"add_\w*(parser|options|arguments)|\w*_(EPILOG|HELP)")


def page() -> str:
    """The page, as Markdown."""
    lines = ["# Every error text", "", "What the package raises, warns of or reports, by room; `...` is a value.", ""]
    for title, paths in _rooms():
        found = {text: path for path in paths for text in messages(path)}
        if found:
            lines += [f"## {title}", ""]
            lines += [f"- ``{text}`` ({path.relative_to(ROOT)})" for text, path in sorted(found.items())]
            lines.append("")
    return "\n".join(lines)


def _rooms() -> Iterator[tuple[str, list[Path]]]:
    """Each room with its modules; those beside the rooms come first."""
    yield PACKAGE.name, sorted(PACKAGE.glob("*.py"))
    for room in sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()):
        yield room.name, sorted(room.rglob("*.py"))


def messages(path: Path) -> list[str]:
    """The texts of a module that users may read: not docstrings, slips of our own (`assert`), or help of options."""
    texts = [text for node in _said(ast.parse(path.read_text())) if (text := _text_of(node))]
    # A part of a joined text is a text to `ast.walk` too.
    return [text for text in dict.fromkeys(texts) if not any(text in other and text != other for other in texts)]


def _said(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a module that are no description."""
    if isinstance(node, ast.Assert) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if isinstance(node, ast.FunctionDef) and _DESCRIBES.fullmatch(node.name):
        return
    if isinstance(node, ast.Assign) and all(_DESCRIBES.fullmatch(ast.unparse(target)) for target in node.targets):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _said(child)


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return ""
    words = " ".join(text.replace("`", "'").split())
    return words if len(words.split()) >= _FEWEST_WORDS else ""
