"""A page of every error and warning that the package says, for the search: read from its sources, a section a room.

Values that a message puts in are shown as `...`.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_megatron"

_WARNS = {"warn", "rank_zero_warn", "warn_once"}
# Fewer words are parts of a message, or names.
_FEWEST_WORDS = 4


def page() -> str:
    """The page, as Markdown."""
    lines = ["# Every error text", "", "What the package raises or warns of, by room; `...` stands for a value.", ""]
    for room in sorted(path for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()):
        found = {text: path for path in sorted(room.rglob("*.py")) for text in messages(path)}
        if found:
            lines += [f"## {room.name}", ""]
            lines += [f"- ``{text}`` ({path.relative_to(ROOT)})" for text, path in sorted(found.items())]
            lines.append("")
    return "\n".join(lines)


def messages(path: Path) -> list[str]:
    """Texts in raised exceptions, in warnings, and in what lists faults, of one module."""
    texts = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) or _is_warning(node) or _lists_faults(node):
            texts += [text for part in ast.walk(node) if (text := _text_of(part))]
    # A part of a joined text is a text to `ast.walk` too.
    return [text for text in dict.fromkeys(texts) if not any(text in other and text != other for other in texts)]


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return ""
    words = " ".join(text.replace("`", "'").split())
    return words if len(words.split()) >= _FEWEST_WORDS else ""


def _is_warning(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _WARNS


def _lists_faults(node: ast.AST) -> bool:
    """Whether a statement or a call adds to a list of faults, or a rule returns or yields one."""
    if isinstance(node, ast.AugAssign | ast.Assign):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        return "fault" in ast.unparse(target)
    if isinstance(node, ast.Call):
        return "fault" in ast.unparse(node.func)
    return False
