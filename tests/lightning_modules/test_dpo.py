"""Preference tuning: the published loss, equal on every layout, with the reference as a model or in the data."""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import ConfigurationError
from lightning_megatron.data import PreferenceSamples, load_chat_template, load_rows, load_tokenizer
from lightning_megatron.data.preference_samples import prepare_preferences
from lightning_megatron.lightning_modules import AdamWConfig, DpoModule, PreferenceDataConfig, PreferenceDataModule
from lightning_megatron.lightning_modules.preference_data import WriteReferences
from lightning_megatron.testing import certify
from tests.data.chats import write_rows
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.preferences import pairs, write_pairs
from tests.lightning_modules.pretrained import write_model
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("dpo")
    write_model(path / "tiny")
    write_pairs(path / "pairs.jsonl")
    return path


def data(folder: Path, **options: Any) -> PreferenceDataModule:
    defaults: dict[str, Any] = {
        "tokenizer": str(folder / "tiny"),
        "path": str(folder / "pairs.jsonl"),
        "sequence_length": 64,
        "global_batch_size": 4,
        "validation_fraction": 0.0,
        "cache_directory": str(folder / "cache"),
    }
    return PreferenceDataModule(PreferenceDataConfig(**(defaults | options)))


def module(folder: Path, **options: Any) -> DpoModule:
    return DpoModule(str(folder / "tiny"), AdamWConfig(lr=1e-2, warmup_steps=0), **({"beta": 0.5} | options))


@torch.no_grad()
def answer_log_probability(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    """Of one row by itself, token for token."""
    logs = model(input_ids=tokens[None]).logits[0].double().log_softmax(dim=-1)
    return sum(float(logs[place, label]) for place, label in enumerate(labels.tolist()) if label >= 0)


def test_the_loss_is_the_published_one(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loader = data(folder)
    loader.setup("fit")
    batch = next(iter(loader.train_dataloader()))
    tuned = module(folder)
    tuned.configure_model()
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "tiny"))
    with torch.no_grad():
        tuned.model.lm_head.weight[:40] += 0.1
    margins = []
    for row in range(4):
        ratios = [
            answer_log_probability(tuned.model, batch[f"{name}_tokens"][row], batch[f"{name}_labels"][row])
            - answer_log_probability(reference, batch[f"{name}_tokens"][row], batch[f"{name}_labels"][row])
            for name in ("chosen", "rejected")
        ]
        margins.append(0.5 * (ratios[0] - ratios[1]))
    logged: dict[str, float] = {}
    tuned.log = lambda name, value, **_: logged.update({name: value.item()})  # type: ignore[method-assign,assignment]
    loss = tuned.training_step(batch, 0)["loss"].item()
    wanted = sum(math.log1p(math.exp(-margin)) for margin in margins) / 4
    assert loss == pytest.approx(wanted, abs=1e-5) and abs(loss - math.log(2)) > 1e-2
    assert logged["train_margin"] == pytest.approx(sum(margins) / 4, abs=1e-5)
    assert logged["train_accuracy"] == sum(margin > 0 for margin in margins) / 4


@pytest.mark.matrix
@pytest.mark.slow
def test_two_models_in_one_module_are_equal_on_every_layout(folder: Path) -> None:
    make = functools.partial(module, folder), functools.partial(data, folder)
    found = certify(*make, layouts=every_nth(("pp2", "tp2", "dp2-zero", "dp2-zero3"), 4), steps=2, rows=4)
    found.assert_equal()
    assert found.facts.precision == "64-true"


def predicted(layout: Layout, folder: Path, out: str) -> None:
    trainer = make_trainer(layout, callbacks=[WriteReferences(out)])
    trainer.predict(module(folder, reference="data"), datamodule=data(folder, path=str(folder / "odd.jsonl")))


def fitted(layout: Layout, folder: Path, source: Any, path: str) -> list[float]:
    trainer = make_trainer(layout, max_steps=3, max_epochs=-1)
    losses: list[float] = []
    tuned = module(folder, reference=source)
    trainer.fit(tuned, datamodule=data(folder, path=path, validation_fraction=0.2))
    losses += [float(trainer.callback_metrics[name]) for name in ("train_loss", "train_margin")]
    assert (tuned.guide is None) == (source == "data")
    return losses


def test_a_pass_before_gives_the_log_probabilities_of_the_reference(folder: Path) -> None:
    # The last batch of the pass is not full.
    write_rows(folder / "odd.jsonl", pairs(3)[:7])
    outs = [str(folder / f"with_{name}.jsonl") for name in ("one", "pp2", "dp2")]
    for out, layout in zip(outs, (PLAIN, Layout(world=2, pp=2, microbatches=2), Layout(world=2)), strict=True):
        run_on_ranks(layout.world, predicted, layout, folder, out, init=False)
    one, *others = [[json.loads(line) for line in Path(out).read_text().splitlines()] for out in outs]
    assert len(one) == 7 and all(row["reference_chosen"] < 0 for row in one)
    for rows in others:
        for row, wanted in zip(rows, one, strict=True):
            assert row["prompt"] == wanted["prompt"]
            for name in ("reference_chosen", "reference_rejected"):
                assert row[name] == pytest.approx(wanted[name], rel=1e-6)
    layout = Layout(world=2, pp=2, microbatches=2)
    [with_model, *_] = run_on_ranks(2, fitted, layout, folder, "model", outs[0], init=False)
    [with_data, *_] = run_on_ranks(2, fitted, layout, folder, "data", outs[0], init=False)
    assert with_data == pytest.approx(with_model, rel=1e-5) and with_data[1] > 1e-3


def test_data_without_references_is_refused_with_the_way_out(folder: Path) -> None:
    trainer = make_trainer(PLAIN, max_steps=1)
    with pytest.raises(ConfigurationError, match=r"compute them by predict with --references\.path"):
        trainer.fit(module(folder, reference="data"), datamodule=data(folder))
    with pytest.raises(ConfigurationError, match="packing"):
        data(folder, packing="documents").setup("fit")


def samples_of(rows: list[dict[str, Any]], folder: Path, length: int) -> PreferenceSamples:
    table = load_rows(path=str(write_rows(folder / "rows.jsonl", rows)), cache_dir=folder / "documents")
    tokenizer, template = (load(folder / "tiny") for load in (load_tokenizer, load_chat_template))
    return PreferenceSamples(
        prepare_preferences(table, tokenizer, template, sequence_length=length, directory=folder / "made")
    )


def test_of_conversations_the_last_answer_alone_has_labels(folder: Path) -> None:
    shared = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Me."},
        {"role": "user", "content": "And?"},
    ]
    answers = {"chosen": "Yes", "rejected": "No"}
    row = {name: [*shared, {"role": "assistant", "content": text}] for name, text in answers.items()}
    samples = samples_of([row], folder, 128)
    tokenizer = load_tokenizer(folder / "tiny")
    for name, text in answers.items():
        labels = samples[0][f"{name}_labels"]
        assert tokenizer.decode(labels[labels >= 0].tolist()).strip() == f"{text}<|end|>"


def test_a_prompt_of_messages_goes_in_front_of_both_answers(folder: Path) -> None:
    asked = [{"role": "user", "content": "Who?"}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    apart = samples_of([{"prompt": asked, **answers}], folder, 128)[0]
    # The text says again what the conversations begin with.
    whole = {"prompt": "Who?", **{name: asked + answer for name, answer in answers.items()}}
    wanted = samples_of([whole], folder, 128)[0]
    assert all(torch.equal(value, wanted[name]) for name, value in apart.items())
    with pytest.raises(ValueError, match="'chosen' must have a message in front of its answer, and a row has"):
        samples_of([answers], folder, 128)


def test_rows_of_which_an_answer_is_left_out_are_dropped_and_counted(folder: Path) -> None:
    samples = samples_of([{"prompt": "a" * 60, "chosen": "b", "rejected": "c"}, *pairs(1)], folder, 40)
    assert (samples.counts.samples, samples.counts.dropped) == (3, 1)
    assert samples.rows.tolist() == [1, 2, 3] and not samples.has_references
    with pytest.raises(ValueError, match="preference tuning needs 'chosen' and 'rejected'"):
        samples_of([{"text": "a"}], folder, 40)
