"""Text that is sampled during training: one on every layout, and no matter for the training itself."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import (
    AdamWConfig,
    CausalModule,
    ChatDataModule,
    GenerationConfig,
    GPTModule,
)
from lightning_megatron.lightning_modules.sample_text import SampleText
from lightning_megatron.models import GPTConfig
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.pretrained import chat_data, write_chats, write_model
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)
PROMPTS = ["What is two and two?", "Who is there?", "Where is the cat?"]
GENERATION = GenerationConfig(max_new_tokens=6, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("samples")
    write_model(path / "tiny")
    write_chats(path / "chats.jsonl", copies=8)
    return path


def data(folder: Path, **options: Any) -> ChatDataModule:
    return chat_data(folder, global_batch_size=2, **options)


def gpt() -> GPTModule:
    config = GPTConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=304, position="rotary", hidden_dropout=0.1
    )
    return GPTModule(config, AdamWConfig(lr=1e-2), GENERATION)


def run(layout: Layout, folder: Path, kind: str, every: int) -> tuple[float, list[dict[str, Any]]]:
    torch.manual_seed(7)
    module = gpt() if kind == "gpt" else CausalModule(str(folder / "tiny"), generation=GENERATION)
    logger = CSVLogger(folder, name=f"{kind}-{layout.world}-{layout.tp}-{layout.pp}", version=every)
    callbacks = [SampleText(every_n_validations=every)] if every else []
    trainer = make_trainer(layout, callbacks=callbacks, logger=logger, max_steps=6, max_epochs=-1, val_check_interval=2)
    trainer.fit(module, datamodule=data(folder, prompts=PROMPTS))
    file = Path(logger.log_dir) / "samples.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return float(trainer.callback_metrics["train_loss"]), rows


@functools.cache
def runs(layout: Layout, folder: Path, kind: str, every: int = 2) -> list[Any]:
    return run_on_ranks(layout.world, run, layout, folder, kind, every, init=False)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("gpt", Layout(world=2, pp=2, microbatches=2)),
        ("gpt", Layout(world=2)),
        ("causal", Layout(world=2, tp=2)),
    ],
    ids=["pp2", "dp2", "tp2 unchanged"],
)
def test_samples_are_those_of_one_device_and_training_goes_on_alike(kind: str, layout: Layout, folder: Path) -> None:
    [(wanted_loss, wanted)] = runs(PLAIN, folder, kind)
    # Of the second validation, and not of the third.
    assert [(row["step"], row["number"]) for row in wanted] == [(4, 0), (4, 1), (4, 2)]
    assert all(prompt in row["text"] for prompt, row in zip(PROMPTS, wanted, strict=True))
    found = runs(layout, folder, kind)
    for loss, rows in found:
        assert loss == pytest.approx(wanted_loss, rel=1e-6) and rows == wanted
    [(loss, none)] = runs(PLAIN, folder, kind, 0)
    assert loss == wanted_loss and not none


def test_without_prompts_it_is_refused(folder: Path) -> None:
    trainer = make_trainer(PLAIN, callbacks=[SampleText()], max_steps=1)
    with pytest.raises(ConfigurationError, match="SampleText has no prompts"):
        trainer.fit(gpt(), datamodule=data(folder))
