"""Distillation: the published loss by a frozen teacher, equal on every layout."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import AdamWConfig, ChatDataModule, DistillModule
from lightning_megatron.testing import certify
from tests.harness.sample import every_nth
from tests.lightning_modules.pretrained import chat_data, write_chats, write_model
from tests.trainer.layouts import PLAIN, QUIET, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("distill")
    write_model(path / "tiny")
    write_model(path / "teacher", hidden_size=48, num_hidden_layers=3)
    write_model(path / "larger", vocab_size=320)
    write_chats(path / "chats.jsonl", copies=8)
    return path


def data(folder: Path, **options: Any) -> ChatDataModule:
    return chat_data(folder, validation_fraction=0.0, **options)


def module(folder: Path, teacher: str = "teacher", **options: Any) -> DistillModule:
    settings = {"temperature": 2.0, "label_fraction": 0.25} | options
    return DistillModule(str(folder / "tiny"), str(folder / teacher), AdamWConfig(lr=1e-2), **settings)


def test_the_loss_is_the_published_one(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loader = data(folder)
    loader.setup("fit")
    batch = next(iter(loader.train_dataloader()))
    made = module(folder)
    made.configure_model()
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(str(folder / one)).double() for one in ("tiny", "teacher")
    ]
    total, count = 0.0, 0
    with torch.no_grad():
        student, teacher = (model(input_ids=batch["tokens"]).logits for model in models)
    for row, labels in enumerate(batch["labels"].tolist()):
        for place, label in enumerate(labels):
            if label < 0:
                continue
            likelihood = -student[row, place].log_softmax(dim=-1)[label].item()
            wanted, found = ((logits[row, place] / 2.0).softmax(dim=-1) for logits in (teacher, student))
            divergence = 4.0 * (wanted * (wanted.log() - found.log())).sum().item()
            total, count = total + 0.25 * likelihood + 0.75 * divergence, count + 1
    made.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    returned = made.training_step(batch, 0)
    assert returned["loss"].item() == pytest.approx(total / count, rel=1e-5)
    assert returned["loss_weight"].item() == count


@pytest.mark.matrix
@pytest.mark.slow
def test_a_student_beside_its_teacher_is_equal_on_every_layout(folder: Path) -> None:
    make = functools.partial(module, folder), functools.partial(data, folder)
    found = certify(*make, layouts=every_nth(("dp2pp2", "tp2", "pp2", "dp2-zero3"), 4), steps=2, rows=4)
    found.assert_equal()
    assert found.facts.precision == "64-true"


def test_what_cannot_be_distilled_is_refused(folder: Path) -> None:
    trainer = make_trainer(PLAIN, max_steps=1)
    with pytest.raises(ValueError, match=r"a vocabulary of 320, and the model in .* one of 304"):
        module(folder, "larger")
    with pytest.raises(ConfigurationError, match=r"packing .* is not for distillation"):
        trainer.fit(module(folder), datamodule=data(folder, packing="documents"))
    # Before a process is started, and all at once.
    wanted = r"temperature \(0\) must be above 0.*\n.*label_fraction \(2\).*\nthe frozen model: .*gone' is no folder"
    with pytest.raises(ValueError, match=wanted):
        module(folder, "gone", temperature=0, label_fraction=2)
