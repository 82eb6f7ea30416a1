"""`lightning-megatron evaluate`: the perplexity of a text is that of every token predicted once, on any layout."""

import contextlib
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_megatron import progress
from lightning_megatron.cli.main import main
from lightning_megatron.data import load_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.pretrained import write_model
from tests.test_progress import Terminal
from tests.trainer.layouts import QUIET

pytestmark = pytest.mark.filterwarnings(QUIET)
TEXT = "The cat sat on the mat.\nWhat is two and two? It is four, é.\n" * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("evaluate")
    write_model(path / "tiny")
    (path / "text.txt").write_text(TEXT)
    return path


def evaluate(*options: str) -> tuple[int, str]:
    """The exit code, and what is written to stdout."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        code = main(["evaluate", *options, "--accelerator", "cpu"])
    return code, written.getvalue()


def on_rank(*options: str) -> tuple[int, str]:
    return evaluate(*options)


def wanted_loss(folder: Path, length: int) -> tuple[float, int]:
    """Of the tokens of the text but the first, each behind those of its window alone; and their number."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "tiny")).double().eval()
    tokenizer = load_tokenizer(folder / "tiny")
    # Of a text file each line is no document: the file is one.
    [ids] = tokenizer.encode([TEXT])
    ids = [*ids, tokenizer.end_of_text]
    total = 0.0
    for first in range(0, len(ids) - 1, length):
        window = ids[first : first + length + 1]
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([window[:-1]])).logits[0].log_softmax(dim=-1)
        total -= sum(logs[place, label].item() for place, label in enumerate(window[1:]))
    return total / (len(ids) - 1), len(ids) - 1


@pytest.mark.parametrize(("layout", "world"), [(None, 1), ("dp2", 2), ("tp2pp2", 4)])
def test_every_token_is_predicted_once_on_every_layout(layout: str | None, world: int, folder: Path) -> None:
    wanted, num_tokens = wanted_loss(folder, 20)
    options = ["--path", str(folder / "text.txt"), "--sequence-length", "20", "--batch-size", "4", "--json"]
    options += [] if layout is None else ["--layout", layout]
    results = run_on_ranks(world, on_rank, str(folder / "tiny"), *options, init=False)
    assert [code for code, _ in results] == [0] * world
    [printed] = [text for _, text in results if text.strip()]
    found = json.loads(printed.splitlines()[-1])
    # The last window is not full, and neither is the last batch.
    assert found["tokens"] == num_tokens and num_tokens % 20 and -(-num_tokens // 20) % 4
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-4)
    assert found["bytes"] == len(TEXT.encode())
    assert found["bits_per_byte"] == pytest.approx(wanted * num_tokens / len(TEXT.encode()) / math.log(2), rel=1e-5)


def told_on_rank(*options: str) -> str:
    progress._DELAY_SECONDS = 0.0
    sys.stderr = Terminal()
    assert evaluate(*options)[0] == 0
    return sys.stderr.getvalue()


def test_the_first_rank_shows_how_much_is_done(folder: Path) -> None:
    options = ["--path", str(folder / "text.txt"), "--sequence-length", "20", "--batch-size", "4", "--layout", "tp2"]
    first, other = run_on_ranks(2, told_on_rank, str(folder / "tiny"), *options, init=False)
    num_batches = -(-wanted_loss(folder, 20)[1] // (4 * 20))
    assert "evaluating: 100%" in first and f" {num_batches}/{num_batches} [" in first
    assert "evaluating: 100%" not in other


def test_a_checkpoint_has_the_perplexity_of_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = str(folder / "tiny.ckpt")
    assert main(["convert", str(folder / "tiny"), checkpoint]) == 0
    text = ("--path", str(folder / "text.txt"), "--sequence-length", "32", "--json")
    assert evaluate(checkpoint, *text)[0] == 2
    assert "has no tokenizer" in capsys.readouterr().err
    [(code, printed)] = run_on_ranks(1, on_rank, checkpoint, *text, "--tokenizer", str(folder / "tiny"), init=False)
    assert code == 0
    assert json.loads(printed.splitlines()[-1])["loss"] == pytest.approx(wanted_loss(folder, 32)[0], rel=1e-5)


def test_mistakes_are_told_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ("--path", str(folder / "text.txt"))
    for options, words in (
        ((), "nothing to evaluate on"),
        (
            ("--sequence-length", "0", "--batch-size", "0", *text),
            "--sequence-length (0) must be at least 1; --batch-size",
        ),
        (("--dataset", "a", *text), "--path and --dataset are both given"),
        (("--path", "nowhere.txt"), "nowhere.txt"),
        (("--layout", "xx2", *text), "layout 'xx2' must be made of sizes"),
        (
            ("--layout", "pp2-zb_h1-collective", *text),
            "names a schedule (zb_h1), and collective steps",
        ),
    ):
        assert evaluate(str(folder / "tiny"), *options)[0] == 2
        assert words in capsys.readouterr().err
    # An accelerator of another system.
    assert main(["evaluate", str(folder / "tiny"), *text, "--accelerator", "mps"]) == 2
    assert "--accelerator (mps)" in capsys.readouterr().err
    assert evaluate("step=9.ckpt", *text)[0] == 2
    assert "MODEL (step=9.ckpt) does not exist; give a checkpoint, or a folder" in capsys.readouterr().err
    assert evaluate(str(folder), "--tasks", "arc")[0] == 2
    assert "lightning-megatron convert" in capsys.readouterr().err


def test_tasks_of_lm_eval_run_through_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    class TaskManager:
        all_tasks = ("arc_easy",)

        def __init__(self, include_path: str | None) -> None:
            asked["include_path"] = include_path

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        asked.update(options)
        return {
            "results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.25, "acc_stderr,none": "N/A", "sample_len": 3}}
        }

    package, tasks = ModuleType("lm_eval"), ModuleType("lm_eval.tasks")
    package.simple_evaluate, tasks.TaskManager = simple_evaluate, TaskManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    code, printed = evaluate(str(folder / "tiny"), "--tasks", "arc_easy", "--limit", "3")
    assert code == 0 and printed == "arc_easy: acc 0.25\n"
    assert asked["model_args"] == {"pretrained": str(folder / "tiny"), "device": "cpu"} and asked["limit"] == 3
    assert evaluate(str(folder / "tiny"), "--tasks", "arc_easy,nothing")[0] == 2
    assert "lm-eval has no nothing" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert evaluate(str(folder / "tiny"), "--tasks", "arc_easy")[0] == 2
    assert "pip install 'lm-eval[hf]'" in capsys.readouterr().err
