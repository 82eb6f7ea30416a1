"""A run that the command line makes shorter than the configuration's warm-up starts, and says what it changed."""

import logging
import re
from pathlib import Path

import pytest

from lightning_megatron import hf
from lightning_megatron.lightning_modules import AdamWConfig
from lightning_megatron.optim.rates import RateCurve
from tests.lightning_modules.pretrained import write_model
from tests.recipes.launched import launched
from tests.recipes.parsed import CONFIGS, Parsed, arguments_of, script_of
from tests.recipes.test_configs import ALL, FOLDERS_OF, LLAMA3_8B, SMALL_T5, UNCHANGED

TWO = "--trainer.max_steps=2"
TOLD = "--trainer.max_steps (2) has no room for the configured warm-up of 10000 steps: "


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["recipe.py"])
    # Fine-tuning reads the model's configuration from a folder, which is not here; that of a T5 cannot be upcycled.
    monkeypatch.setattr(
        hf, "config_from_pretrained", lambda path, **options: LLAMA3_8B if "upcycle" in options else SMALL_T5
    )


def adamw_of(name: str, *options: str) -> AdamWConfig:
    """The optimizer's options of a shipped configuration, as `fit` takes them."""
    classes, keywords = arguments_of(script_of(name))
    found: AdamWConfig = Parsed(
        *classes, **keywords, args=["fit", "--config", str(CONFIGS / name), *options]
    ).model.optimizer
    return found


@pytest.mark.parametrize("name", [*ALL, *UNCHANGED])
def test_two_steps_have_a_rate_under_every_configuration(name: str, tmp_path: Path) -> None:
    options = FOLDERS_OF.get(script_of(name).name, ("model.path",)) if name in UNCHANGED else ()
    if options:
        write_model(tmp_path / "model")
    config = adamw_of(name, TWO, *(f"--{option}={tmp_path / 'model'}" for option in options))
    assert RateCurve(total_steps=config.total_steps or 2, warmup_steps=config.warmup_steps)(1) >= 0


def told_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if "warm-up" in message]


def test_the_warm_up_of_the_configuration_is_shortened_and_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert adamw_of("bert_base.yaml", TWO).warmup_steps == 1
        assert told_by(caplog) == [TOLD + "model.optimizer.warmup_steps is 1 in this run"]
        assert adamw_of("bert_base.yaml", "--trainer.max_steps", "1").warmup_steps == 0
        # As many steps as the warm-up has are too few, too: the curve after it has none.
        assert adamw_of("bert_base.yaml", "--trainer.max_steps=10000").warmup_steps == 9999


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("bert_base.yaml", (), 10000),
        ("bert_base.yaml", ("--trainer.max_steps=10001",), 10000),
        ("bert_base.yaml", (TWO, "--model.optimizer.total_steps=20000"), 10000),
        ("toy.yaml", (TWO,), 20),
        # Who says it twice gets an error when the run starts.
        ("bert_base.yaml", (TWO, "--model.optimizer.warmup_steps", "50"), 50),
        # No word of a warm-up that has no effect.
        ("bert_base.yaml", (TWO, "--optimizer=torch.optim.SGD", "--optimizer.lr=1"), 10000),
    ],
)
def test_a_warm_up_that_fits_or_is_asked_for_stays(
    name: str, options: tuple[str, ...], kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert adamw_of(name, *options).warmup_steps == kept
    assert told_by(caplog) == []


def test_steps_of_a_file_are_no_trial(tmp_path: Path) -> None:
    short = tmp_path / "short.yaml"
    short.write_text("trainer: {max_steps: 2}\n")
    assert adamw_of("bert_base.yaml", "--config", str(short)).warmup_steps == 10000


@pytest.mark.slow
def test_a_base_configuration_is_tried_by_two_steps(tmp_path: Path) -> None:
    write = "".join(f"line {n} of a text\n" for n in range(400))
    (tmp_path / "texts").mkdir()
    for n in range(20):
        (tmp_path / "texts" / f"{n}.txt").write_text(write)
    options = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.precision=32-true", "--data.path=texts"]
    options += ["--data.sequence_length=32", "--data.global_batch_size=2", "--data.num_workers=0"]
    options += ["--model.config.num_layers=1", "--model.config.hidden_size=24", "--model.config.vocab_size=384"]
    ended = launched(
        tmp_path,
        *("fit", "--config", str(CONFIGS / "bert_base.yaml"), *options, TWO),
        script="pretrain_bert.py",
        num_ranks=1,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(TOLD) == 1
    assert "`max_steps=2` reached" in ended.stderr
    [saved] = re.findall(r"^Checkpoint: (.*step=2\.ckpt)$", ended.stderr, re.MULTILINE)
    assert (tmp_path / saved).is_dir()
