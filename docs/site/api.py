"""The API reference: a page for each package that exports names, from signatures and docstrings, read and not imported.

What is exported stands in the package's `__all__`; where it is defined is followed through the imports of the sources.
So the site is built without torch.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Packages whose exports are documented, each with what a user finds there.
PACKAGES = {
    "lightning_megatron": "the strategy, its configurations, and norms for hooks",
    "lightning_megatron.models": "GPT, BERT, T5, LLaVA, and generation",
    "lightning_megatron.lightning_modules": "ready LightningModules and data modules",
    "lightning_megatron.trainer.callbacks": "throughput, memory, timelines, expert load",
    "lightning_megatron.hf": "Hugging Face models, read and written",
    "lightning_megatron.testing": "certify in your own tests",
    "lightning_megatron.data": "from text to batches, without Lightning",
    "lightning_megatron.checkpoint": "checkpoint directories, without Lightning",
}

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Found:
    """A definition, and the module in which it stands."""

    module: str
    node: ast.stmt


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def exports(package: str) -> list[str]:
    """Names in the `__all__` of a package that its own sources define."""
    for node in _tree(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    raise ValueError(f"{package} has no __all__")


def definition(module: str, name: str) -> Found:
    """Where a name of a module is defined, through the imports that pass it on."""
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name and node in _tree(module).body:
            return Found(module, node)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lightning_megatron"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in _tree(module).body:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                return Found(module, node)
    raise ValueError(f"{module} exports {name}, which no source defines")


def spelled_out(annotation: str, module: str) -> str:
    """An annotation with the choices of its alias, `Literal[...]`, in place of the alias's name."""
    try:
        found = definition(module, annotation.removesuffix(" | None"))
    except ValueError:
        return annotation
    is_choice = isinstance(found.node, ast.Assign) and ast.unparse(found.node.value).startswith("Literal[")
    return (
        annotation.replace(annotation.removesuffix(" | None"), ast.unparse(found.node.value))
        if is_choice
        else annotation
    )


def page(package: str) -> str:
    """The page of a package: its docstring, and each of its exports in a directive of Sphinx's Python domain."""
    lines = [f"# {package}", "", _code_of_indented(ast.get_docstring(_tree(package)) or ""), ""]
    lines += [f"```{{py:module}} {package}", "```", ""]
    for name in exports(package):
        found = definition(package, name)
        lines += [*_block(name, found), f"Defined in `{found.module.replace('.', '/')}.py`.", "", ":::::", ""]
    return "\n".join(lines)


def index() -> str:
    """The page above those of the packages."""
    rows = [f"| [{package}]({package}.md) | {what} |" for package, what in PACKAGES.items()]
    names = "\n".join(f"/api/{package}" for package in PACKAGES)
    head = "# API\n\nWhat the packages export, from their docstrings.\n\n| package | what is there |\n|---|---|\n"
    return head + "\n".join(rows) + f"\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def write(folder: Path) -> None:
    """Writes all pages of the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.md").write_text(index())
    for package in PACKAGES:
        (folder / f"{package}.md").write_text(page(package))


def _block(name: str, found: Found) -> list[str]:
    """The open directive of a definition with what belongs to it; the caller closes it."""
    node = found.node
    if isinstance(node, ast.FunctionDef):
        return [f":::::{{py:function}} {_signature(name, node)}", "", _doc(node), ""]
    if not isinstance(node, ast.ClassDef):
        return [f":::::{{py:data}} {name}", "", f"`{ast.unparse(node)}`", ""]
    fields = _fields(node)
    start = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    head = name if start is None else _signature(name, start, bound=True)
    if start is None and fields:
        head = f"{name}(*, {', '.join(_parameter(field) for field in fields)})"
    lines = [f":::::{{py:class}} {head}", "", _doc(node), ""]
    for field, text in fields.items():
        lines += [
            f"::::{{py:attribute}} {name}.{ast.unparse(field.target)}",
            f":type: {spelled_out(ast.unparse(field.annotation), found.module)}",
        ]
        if field.value is not None:
            lines.append(f":value: {ast.unparse(field.value)}")
        lines += ["", text, "", "::::", ""]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            decorators = {ast.unparse(one).rpartition(".")[2] for one in method.decorator_list}
            kind = "property" if decorators & {"property", "cached_property"} else "method"
            text = f"{name}.{method.name}" if kind == "property" else _signature(f"{name}.{method.name}", method, True)
            lines += [f"::::{{py:{kind}}} {text}", "", _doc(method), "", "::::", ""]
    return lines


def _fields(node: ast.ClassDef) -> dict[ast.AnnAssign, str]:
    """Fields of a dataclass with their docstrings; none of a class that is no dataclass."""
    if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        return {}
    found = {}
    for field, below in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = below.value.value if is_text else ""
            found[field] = " ".join(str(text).split())
    return found


def _parameter(field: ast.AnnAssign) -> str:
    text = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}"
    return text if field.value is None else f"{text} = {ast.unparse(field.value)}"


def _signature(name: str, node: ast.FunctionDef, bound: bool = False) -> str:
    arguments = ast.unparse(node.args)
    if bound:
        arguments = arguments.partition(",")[2].strip() if "," in arguments else ""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{name}({arguments}){returns}"


def _doc(node: Definition) -> str:
    return _code_of_indented(ast.get_docstring(node) or "")


def _code_of_indented(text: str) -> str:
    """A docstring as Markdown: what it shows as code, in lines with ` = ` or calls and no full stop, as a block."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        looks_like_code = len(lines) > 1 and all("#" in line or line.rstrip().endswith(")") for line in lines)
        paragraphs.append(f"```python\n{paragraph}\n```" if looks_like_code else paragraph)
    return "\n\n".join(paragraphs)
