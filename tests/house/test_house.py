"""The house rules that a machine can check, over every file of the repository."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_megatron"

NAMES_THAT_SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc", "base", "manager", "managers"}

# Third parties, or parts of torch, that only these files and folders may import.
DOORS = {
    "lightning": ("trainer/", "lightning_modules/", "testing/", "cli/"),
    "pytorch_lightning": (),
    "datasets": ("data/sources.py",),
    "tokenizers": ("data/tokenizer.py",),
    "sentencepiece": ("data/sentencepiece_tokenizer.py",),
    "tiktoken": ("data/tiktoken_tokenizer.py",),
    "jinja2": ("data/template_sandbox.py",),
    "matplotlib": ("metrics/figure.py",),
    "transformer_engine": ("precision/fp8.py",),
    "safetensors": ("hf/",),
    "transformers": ("hf/", "data/transformers_tokenizer.py"),
    "torch.distributed.checkpoint": ("checkpoint/",),
    "torch.distributed.pipelining": (),
    "torch.testing": (),
}

# Written so that this file does not contain what it looks for.
SLASH = "/"
MACHINE_PATH = re.compile(rf"(?<![\w.{SLASH}]){SLASH}(home|Users|root|work|scratch|mnt){SLASH}[\w.]+")
REGISTRY = re.compile(r"--(extra-)?index" + r"-url|--find" + r"-links|https?://[^\s\"')]*(pypi|index|registry|mirror)")


def repository_files() -> list[Path]:
    """Every file that is or could be committed."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = {ROOT / name for name in listed.stdout.decode().split("\0") if name}
    return sorted(path for path in paths if path.is_file())


@cache
def package_trees() -> list[tuple[str, ast.Module]]:
    """Path within the package and syntax tree of each of its modules."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(), str(path))) for path in paths]


def imports_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "optional_package":
            yield from ((node.lineno, name.value) for name in node.args[:1] if isinstance(name, ast.Constant))


def reads_environment(node: ast.AST) -> bool:
    """`os.environ`, `os.getenv`, or their import."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "getenv") and isinstance(node.value, ast.Name) and node.value.id == "os"
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(a.name in ("environ", "getenv") for a in node.names)
    )


def faults_of_module(path: str, tree: ast.Module) -> list[str]:
    """What one module of the package does against the rules, as `path:line: what`."""
    faults = []
    if ast.get_docstring(tree) is None:
        faults.append(f"{path}:1: no docstring that says what the module is")
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Global):
            faults.append(f"{path}:{line}: a global statement: state has an owner")
        if reads_environment(node) and not path.startswith(("cli/", "trainer/")):
            faults.append(f"{path}:{line}: reads the environment outside cli/ and trainer/")
        if isinstance(node, ast.ImportFrom) and node.level:
            faults.append(f"{path}:{line}: a relative import")
    for line, name in imports_of(tree):
        for third_party, doors in DOORS.items():
            if (name == third_party or name.startswith(f"{third_party}.")) and not path.startswith(doors):
                faults.append(f"{path}:{line}: imports {third_party}, whose door is {' or '.join(doors) or 'nowhere'}")
    return sorted(set(faults))


def test_the_modules_of_the_package_keep_the_rules() -> None:
    faults = [fault for path, tree in package_trees() for fault in faults_of_module(path, tree)]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1", "no docstring"),
        ('"""A."""\ndef f():\n    global x\n', ":3: a global statement"),
        ('"""A."""\nimport os\nx = os.environ["A"]\n', ":3: reads the environment"),
        ('"""A."""\nimport os\nx = os.getenv("A")\n', ":3: reads the environment"),
        ('"""A."""\nfrom os import environ\n', ":2: reads the environment"),
        ('"""A."""\nfrom . import x\n', ":2: a relative import"),
        ('"""A."""\ndef f():\n    import lightning.pytorch\n', ":3: imports lightning"),
        ('"""A."""\nfrom torch.distributed import checkpoint\n', "whose door is checkpoint/"),
        ('"""A."""\nfrom datasets import Dataset\n', "whose door is data/sources.py"),
        ('"""A."""\noptional_package("datasets", "reading")\n', "whose door is data/sources.py"),
    ],
)
def test_a_module_that_breaks_a_rule_is_found(source: str, fault: str) -> None:
    assert any(fault in found for found in faults_of_module("data/pack.py", ast.parse(source)))


def test_files_have_names_that_say_something() -> None:
    python = [path for path in repository_files() if path.suffix == ".py"]
    empty = [path.relative_to(ROOT).as_posix() for path in python if path.stem in NAMES_THAT_SAY_NOTHING]
    assert not empty, f"a file is a noun of the field: {empty}"


def test_no_module_hides_one_of_the_standard_library() -> None:
    hidden = [path for path, _ in package_trees() if Path(path).stem in sys.stdlib_module_names - {"__init__"}]
    assert not hidden, hidden


def test_test_modules_have_docstrings_too() -> None:
    paths = [path for folder in ("tests", "recipes", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    silent = [path.relative_to(ROOT).as_posix() for path in paths if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, silent


def test_no_file_names_a_place_on_some_machine() -> None:
    found = []
    for path in repository_files():
        if path.suffix in (".png", ".bin", ".idx", ".npy", ".parquet", ".gz", ".pdf"):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n" + "\n".join(found)


def test_the_search_for_machine_paths_finds_one() -> None:
    assert MACHINE_PATH.search("torch @ file://" + SLASH + "home" + SLASH + "ann/torch.whl") is None  # part of a URL
    assert MACHINE_PATH.search("data: " + SLASH + "home" + SLASH + "ann/corpus")
    assert REGISTRY.search("pip install --extra-index" + "-url x")
    assert not MACHINE_PATH.search("docs" + SLASH + "work" + SLASH + "plan.md")


def bare_fields(tree: ast.Module, *, is_config: bool) -> Iterator[tuple[int, str]]:
    """Line and name of each field of a configuration that has no docstring beneath it.

    Configurations are the public dataclasses of a module of configurations, and elsewhere those whose name says so.
    """
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or not (is_config or "Config" in node.name):
            continue
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        for field, after in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            is_said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if not is_said:
                yield field.lineno, f"{node.name}.{ast.unparse(field.target)}"


def test_every_field_of_a_configuration_has_a_docstring() -> None:
    faults = [
        f"{path}:{line} {name}"
        for path, tree in package_trees()
        for line, name in bare_fields(tree, is_config=path.endswith("config.py"))
    ]
    assert not faults, faults


def test_a_field_without_a_docstring_is_found() -> None:
    source = '@dataclass\nclass AConfig:\n    one: int\n    """Said."""\n    two: int = 2\n'
    assert list(bare_fields(ast.parse(source), is_config=False)) == [(5, "AConfig.two")]


RULER = re.compile(r"# (-{3,}|fmt: |--- )")
DIRECTIVE = re.compile(r"#!|# (type|noqa|ruff|mypy|pragma)\b")
# Names that are written small at the head of a sentence, and what looks like a name in code: `a_name`, `of()`, `0.5`.
SMALL_NAMES = {"arXiv", "dtypes", "jinja2", "lexists", "pytest", "torch", "torchelastic", "torchrun", "transformers"}
NAME_IN_CODE = re.compile(r"[\w.]*([_.(\d`-]\w|\[)")


def comments_amiss(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment of its own that stands below what it explains, or begins small.

    A comment stands directly above code of its own depth. Rulers stand alone, and so do notes outside of functions and
    classes.
    """
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    own = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()}
    for number, token in own.items():
        text, depth = token.string, token.start[1]
        if number - 1 in own or RULER.match(text) or DIRECTIVE.match(text):
            continue
        end = number
        while end + 1 in own:
            end += 1
        below = lines[end] if end < len(lines) else ""
        stands_alone = depth == 0 and not below.strip()
        if not stands_alone and (not below.strip() or len(below) - len(below.lstrip()) != depth):
            yield number, f"stands above nothing: {text}"
        word = text.removeprefix("#").split()[0] if text.strip("# ") else ""
        if (
            word[:1].islower()
            and not NAME_IN_CODE.match(word)
            and word.rstrip(",:;.").removesuffix("'s") not in SMALL_NAMES
        ):
            yield number, f"begins small: {text}"


def test_comments_stand_above_what_they_explain_and_begin_as_sentences() -> None:
    folders = ("lightning_megatron", "recipes", "benchmarks", "tests")
    faults = [
        f"{path.relative_to(ROOT)}:{line} {what}"
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, what in comments_amiss(path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n".join(faults)


def test_a_comment_below_its_line_is_found() -> None:
    assert [line for line, _ in comments_amiss("def f():\n    x = 1\n    # One.\n\n    return x\n")] == [3]
    assert [line for line, _ in comments_amiss("class A:\n    x = 1\n    # One.\n")] == [3]
    assert [line for line, _ in comments_amiss("# of one\ny = 2\n# Two.\nz = 3\n# torch says so.\n\n")] == [1]
