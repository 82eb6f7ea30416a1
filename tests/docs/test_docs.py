"""The documentation is true: what it names exists, what it quotes is said, what it shows running runs."""

import argparse
import ast
import contextlib
import inspect
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.distributed import run as torchrun

import lightning_megatron.lightning_modules
import lightning_megatron.models
from lightning_megatron import MegatronStrategy
from lightning_megatron.cli.main import command_line, main
from lightning_megatron.lightning_modules import (
    AdamWConfig,
    BertDataConfig,
    CausalModule,
    ChatDataConfig,
    DistillModule,
    DpoModule,
    GenerationConfig,
    GPTDataConfig,
    LlavaDataConfig,
    LlavaModule,
    T5DataConfig,
)
from lightning_megatron.lightning_modules.finetune import finetune_module
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig
from lightning_megatron.trainer.precision import SUPPORTED
from lightning_megatron.transformer.lora import LoraConfig
from tests.certificate.cases import HALF_LAYOUTS, HALF_ROUNDOFF, LAYOUTS, VARIANTS
from tests.certificate.families import FAMILIES, FAMILY_LAYOUTS
from tests.harness.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])

LOGGERS = (CSVLogger, TensorBoardLogger, WandbLogger, MLFlowLogger)
# What a reader is to make, and what the commands make.
MADE_BY_USERS = {"train.py", "texts/", "checkpoints/", "llama/", "llama/config.json", "out/", "moe.yaml", "ours.yaml"}
MADE_BY_USERS |= {"logs/config.yaml"}
# What `lightning-megatron recipes copy` puts into a user's folder.
MADE_BY_USERS |= {path.name for path in (ROOT / "recipes").rglob("*") if path.suffix in (".py", ".yaml")}
ROOMS = sorted(path.name for path in (ROOT / "lightning_megatron").iterdir() if (path / "__init__.py").is_file())

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
# A path, and perhaps a name in it: folder/file.py::Class.method
PLACE = re.compile(r"^([\w./-]+(?:\.(?:py|md|toml|yaml|sh|txt)|/))(?:::([\w.]+))?$")
OPTION = re.compile(r"(?<![\w-])--([\w.-]+)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its words after the fence, and its text."""

    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    return [Block(kind.strip(), text) for kind, text in FENCE.findall(page.read_text())]


def spans_of(page: Path) -> list[str]:
    """Inline code, outside of blocks."""
    return INLINE.findall(FENCE.sub("", page.read_text()))


def candidates(path: str, page: Path) -> list[Path]:
    """Where a path that a page names may lie: from the root, within the package, or in the room that the page is of."""
    roots = [ROOT, ROOT / "lightning_megatron", ROOT / "lightning_megatron" / page.stem]
    return [root / path for root in roots]


def names_in(source: str) -> set[str]:
    """Classes, functions and methods of a module, with their full names in it."""
    found = set()

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(source).body, "")
    return found


def faults_of_place(span: str, page: Path) -> str:
    """What is wrong with a place that a page names; empty where nothing is or the span is no place."""
    match = PLACE.match(span)
    if match is None or span in MADE_BY_USERS or "://" in span:
        return ""
    path, name = match.groups()
    existing = [place for place in candidates(path, page) if place.exists()]
    if not existing:
        return f"{span}: no such path"
    if name and all(name not in names_in(place.read_text()) for place in existing if place.is_file()):
        return f"{span}: no such name in it"
    return ""


@each_page
def test_every_path_and_name_exists(page: Path) -> None:
    faults = [fault for span in spans_of(page) if (fault := faults_of_place(span, page))]
    commands = "\n".join(block.text for block in blocks_of(page) if block.kind == "bash")
    for word in commands.split():
        if fault := faults_of_place(word, page):
            faults.append(fault)
    assert not faults, faults


@pytest.mark.parametrize(
    ("span", "fault"),
    [
        ("lightning_megatron/mesh.py::Mesh.imagine", ""),
        ("pipeline/schedules/one_f_one_b.py::one_f_one_b", ""),
        ("schedule.py", ""),
        ("lightning_megatron/mash.py", "no such path"),
        ("lightning_megatron/mesh.py::Mesh.imagined", "no such name"),
        ("tests/nowhere/", "no such path"),
    ],
)
def test_a_place_that_is_not_there_is_found(span: str, fault: str) -> None:
    found = faults_of_place(span, ROOT / "docs/pipeline.md")
    assert (fault in found) if fault else not found


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", page.read_text())) if "://" not in link]
    lost = [link for link in links if not (page.parent / link.partition("#")[0]).exists()]
    assert not lost, lost


def test_every_room_has_a_page() -> None:
    page = (ROOT / "docs/how_it_is_built.md").read_text()
    assert [room for room in ["mesh", "sharding", *ROOMS] if f"({room}.md)" not in page] == []


# ----------------------------------------------------------------------------------------------------------------------
# Code


def run_as_file(source: str, path: str) -> None:
    """On this rank, as torchrun would start it."""
    exec(compile(source, path, "exec"), {"__name__": "__main__", "__file__": path})


def runnable(page: Path) -> Iterator[tuple[str, str | None]]:
    """Each block that is marked as running, and what it prints where a block says so."""
    blocks = blocks_of(page)
    for i, block in enumerate(blocks):
        if block.kind == "python run":
            following = blocks[i + 1] if i + 1 < len(blocks) else None
            yield block.text, following.text if following is not None and following.kind == "text output" else None


@each_page
def test_code_parses_and_what_is_said_to_run_prints_what_is_said(page: Path) -> None:
    for block in blocks_of(page):
        assert block.kind in ("python run", "python", "text output", "text", "bash", "yaml"), block.kind
        if block.kind == "python":
            ast.parse(block.text)
    if page.name == "README.md":
        return  # it starts a Trainer of two processes: see below
    for source, wanted in runnable(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run_as_file(source, page.name)
        assert wanted is None or printed.getvalue() == wanted, printed.getvalue()


def fit_example(source: str, folder: str, num_steps: int) -> list[float]:
    """The losses of the first steps of the example on this rank, run in the folder."""
    losses = []

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            losses.append(float(trainer.callback_metrics["train_loss"]))
            trainer.should_stop = len(losses) == num_steps

    # Which logger is the default depends on what is installed.
    source = source.replace("max_steps=60", "max_steps=20, logger=False, callbacks=[Losses()]")
    with contextlib.chdir(folder):
        scope: dict[str, object] = {"__name__": "__main__", "Losses": Losses}
        exec(compile(source, "README.md", "exec"), scope)
    return losses


@pytest.mark.slow
def test_the_example_trains_as_typed_and_alike_on_every_layout_that_it_names(tmp_path: Path) -> None:
    [(source, _)] = runnable(ROOT / "README.md")
    others = re.findall(r"^strategy = .*$", blocks_of(ROOT / "README.md")[1].text, re.MULTILINE)
    assert len(others) == 2
    # The first is to learn, too; the others are to do what it does.
    variants = [(2, source, 20)]
    for line in others:
        changed, count = re.subn(r"\bstrategy = .*$", line, source, flags=re.MULTILINE)
        assert count == 1
        world = 1 if "auto" in line else 2
        variants.append((world, changed.replace("devices=2", f"devices={world}"), 6))
    runs = [run_on_ranks(world, fit_example, text, str(tmp_path), n, init=False) for world, text, n in variants]
    for ranks, (_, _, num_steps) in zip(runs, variants, strict=True):
        for losses in ranks:
            assert losses == pytest.approx(runs[0][0][:num_steps], rel=1e-4)
    losses = runs[0][0]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]


def test_the_example_is_what_the_certificate_is_asked_for() -> None:
    [(source, _)] = runnable(ROOT / "README.md")
    named = set(re.findall(r"\btrain\.py:(\w+)", (ROOT / "README.md").read_text()))
    scope: dict[str, object] = {"__name__": "train"}
    exec(compile(source, "train.py", "exec"), scope)
    assert len(named) == 2 and named <= scope.keys()
    # Importing it trains nothing.
    assert "trainer" not in scope


# ----------------------------------------------------------------------------------------------------------------------
# Words


@cache
def _texts_of_package() -> list[str]:
    """Every text in the package, values that are put in left out."""
    texts = []
    for path in (ROOT / "lightning_megatron").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_every_error_that_the_guide_quotes_is_said_by_the_package() -> None:
    page = ROOT / "docs/writing_a_module.md"
    quoted = [span for span in spans_of(page) if " " in span and not re.search(r"[(){}=]|:$", span)]
    assert len(quoted) > 10
    unsaid = [quote for quote in quoted if not any(quote in text for text in _texts_of_package())]
    assert not unsaid, unsaid


def test_every_make_target_exists_and_is_documented() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z]+)`", page.read_text()))
        assert named <= targets, (page, named - targets)
    shown = set(re.findall(r"`make ([a-z]+)`", (ROOT / "README.md").read_text()))
    assert shown >= {"demo", "test", "certificate", "bench"}


def test_what_the_recipes_print_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        assert main(["recipes"]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert main(["recipes", "copy", "toy", "."]) == 0
        copied = capsys.readouterr().out
    for page in (ROOT / "README.md", ROOT / "docs/cli.md"):
        texts = [block.text for block in blocks_of(page) if block.kind == "text"]
        assert texts.count(copied) == 1
        [shown] = [text.splitlines() for text in texts if text.startswith(listed[0])]
        # In their order, with lines left out.
        assert [line for line in listed if line in shown] == [line for line in shown if line != "..."]


def parameters_of(kind: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(kind).parameters)


def known_options() -> set[str]:
    """Options of the recipes, of our own commands, of torchrun, and of srun."""
    options = {"config", "print_config", "ckpt_path", "optimizer", "lr_scheduler"}
    # Those of a class of torch's.
    options |= {"optimizer.lr", "lr_scheduler.T_max"}
    # An option of pip's.
    options |= {"no-build-isolation"}
    # SLURM's: Lightning refuses tasks without it.
    options |= {"ntasks-per-node"}
    options |= {f"trainer.{name}" for name in parameters_of(L.Trainer)}
    # Of one callback or logger, by its class.
    options |= {f"trainer.callbacks.ModelCheckpoint.{name}" for name in parameters_of(ModelCheckpoint)}
    options |= {"trainer.callbacks.CLASS.NAME", "trainer.logger.CLASS.NAME"}
    options |= {f"trainer.logger.{name}" for kind in LOGGERS for name in parameters_of(kind)}
    options |= {f"trainer.strategy.init_args.{name}" for name in parameters_of(MegatronStrategy)}
    options |= {f"data.{name}" for name in parameters_of(GPTDataConfig)}
    options |= {f"data.{name}" for name in parameters_of(ChatDataConfig)} | {"model.path", "export.path"}
    options |= {f"data.{name}" for kind in (LlavaDataConfig, T5DataConfig) for name in parameters_of(kind)}
    options |= {"references.path"}
    options |= {
        f"model.{name}"
        for kind in (LlavaModule, CausalModule, DpoModule, DistillModule, finetune_module)
        for name in parameters_of(kind)
    }
    configs = {"config": GPTConfig, "optimizer": AdamWConfig, "generation": GenerationConfig, "lora": LoraConfig}
    options |= {f"data.{name}" for name in parameters_of(BertDataConfig)}
    options |= {f"model.config.{field.name}" for kind in (BertConfig, LlavaConfig) for field in fields(kind)}
    for name, kind in configs.items():
        options |= {f"model.{name}.{field.name}" for field in fields(kind)}
    for script in (*(ROOT / "tests").glob("*/__main__.py"), *(ROOT / "benchmarks").glob("*.py")):
        options |= set(re.findall(r'add_argument\("--([\w-]+)"', script.read_text()))
    found = options_of(command_line()) | options_of(torchrun.get_args_parser())
    return options | {option.removeprefix("--") for option in found}


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Those of a command and of the commands under it."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for below in action.choices.values() for option in options_of(below)}
    return found


@each_page
def test_every_option_exists(page: Path) -> None:
    commands = [block.text for block in blocks_of(page) if block.kind == "bash"] + spans_of(page)
    named = {option for command in commands for option in OPTION.findall(command)}
    assert named <= known_options(), named - known_options()


# A class with named arguments, as in `OptimizerConfig(kind="distributed")`.
CALLED = re.compile(r"\b([A-Z]\w+)\(([^()]*)")


def unknown_arguments(span: str) -> list[str]:
    """Arguments that a span gives to a class of the package and that the class does not have."""
    packages = (lightning_megatron, lightning_megatron.models, lightning_megatron.lightning_modules)
    found = []
    for name, arguments in CALLED.findall(span):
        kind = next((getattr(one, name) for one in packages if name in one.__all__), None)
        known = parameters_of(kind) if isinstance(kind, type) else set()
        given = re.findall(r"(?:^|[\s,(])(\w+)=", arguments)
        found += [f"{name}({argument}=...)" for argument in given if known and argument not in known]
    return found


@each_page
def test_every_argument_that_is_named_with_its_class_exists(page: Path) -> None:
    faults = [fault for span in spans_of(page) for fault in unknown_arguments(span)]
    assert not faults, faults


def test_what_the_migration_tables_lead_to_is_there() -> None:
    known, page = known_options(), ROOT / "docs/migration.md"
    spans = [span for span in spans_of(page) if re.match(r"(strategy|trainer|data|model)\.[a-z]", span)]
    named = {re.split(r"[^\w.]", span)[0].rstrip(".") for span in spans if not span.endswith("()")}
    named = {re.sub(r"^strategy\.", "trainer.strategy.init_args.", name) for name in named}
    # An option, or what several of them begin with.
    unknown = {name for name in named if not any(f"{option}.".startswith(f"{name}.") for option in known)}
    assert len(named) > 40 and not unknown, unknown


def test_an_argument_that_is_not_there_is_found() -> None:
    assert unknown_arguments('OptimizerConfig(kind="distributed", shards=2)') == ["OptimizerConfig(shards=...)"]
    assert unknown_arguments("Trainer(precision=...)") == []


def test_the_layout_table_names_every_argument_of_the_strategy() -> None:
    layouts = (ROOT / "README.md").read_text().partition("## Layouts")[2].partition("\n## ")[0]
    shown = set(INLINE.findall(layouts))
    assert parameters_of(MegatronStrategy) <= shown, parameters_of(MegatronStrategy) - shown
    rows = re.findall(r"^\| `(\w+)`", layouts, re.MULTILINE)
    assert set(rows) <= parameters_of(MegatronStrategy)


def test_the_documented_precisions_are_those_supported() -> None:
    [line] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("- **Precision**")]
    assert set(INLINE.findall(line)) - {"Trainer(precision=...)"} == set(SUPPORTED)


def test_the_certificate_shown_has_every_layout_and_variant() -> None:
    page = (ROOT / "docs/certificate.md").read_text()
    tables = [table.splitlines() for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    families = tables.pop()
    assert [line.split("|")[1].strip() for line in families[2:]] == list(FAMILY_LAYOUTS)
    assert [cell.strip() for cell in families[0].split("|")[2:-1]] == list(FAMILIES)
    for table, layouts, heads in zip(tables, (LAYOUTS, HALF_LAYOUTS), (VARIANTS, HALF_ROUNDOFF), strict=True):
        rows = [line.split("|")[1:-1] for line in table]
        assert [row[0].strip() for row in rows[2:]] == list(layouts)
        columns = [cell.strip().partition(",")[0] for cell in rows[0][2:]]
        assert list(dict.fromkeys(columns)) == list(heads)
        assert all(re.fullmatch(r" \d?e[+-]\d+ | 0e\+00 | – ", cell) for row in rows[2:] for cell in row[2:])


def test_every_line_of_what_users_write_is_shown_by_a_test() -> None:
    page = (ROOT / "docs/what_users_write.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = [cells for cells in lines if cells[-1] != "shown by"]
    assert len(rows) > 35 and all(len(cells) == 3 for cells in rows)
    for what, _, tests in rows:
        for place in INLINE.findall(tests):
            file, _, name = place.partition("::")
            assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE) and name, (what, place)
        assert INLINE.findall(tests), what
