"""The ready BERT: what it steps, logs and fills in is the same on every layout."""

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import RecomputeConfig
from lightning_megatron.lightning_modules import AdamWConfig, BertModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Sizes
from lightning_megatron.models.bert_cost import bert_training_flops
from lightning_megatron.transformer import cost
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.losses import Losses, resumed_losses
from tests.lightning_modules.sentences import SEQUENCE, bert_config, bert_data
from tests.lightning_modules.test_gpt import Run
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer, share_of

pytestmark = pytest.mark.filterwarnings(QUIET)

LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2),
    "cp=2": Layout(world=2, cp=2),
}
STEPS = 4
PROMPTS = ["The cat[MASK] on a mat.", "It ran[MASK][MASK] to eat some fish. Then it[MASK]."]


def bert(steps: int = 0, **options: Any) -> BertModule:
    optimizer = AdamWConfig(lr=1e-2, warmup_steps=1, total_steps=steps, epsilon=1e-6)
    return BertModule(bert_config(hidden_dropout=0.1, **options), optimizer)


def run(layout: Layout, folder: Path, has_order: bool) -> Run:
    """Steps with validation after the last, then a test and two prompts."""
    torch.manual_seed(7)
    losses = Losses()
    # Without an order there are no token types either.
    module = bert() if has_order else bert(add_binary_head=False, num_token_types=0, norm_placement="pre")
    trainer = make_trainer(
        layout,
        callbacks=[losses],
        check_val_every_n_epoch=None,
        max_steps=STEPS,
        max_epochs=-1,
        val_check_interval=STEPS,
    )
    text = bert_data(folder, sentence_order=has_order, prompts=PROMPTS)
    trainer.fit(module, datamodule=text)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in trainer.test(module, datamodule=text, verbose=False)[0].items()}
    predicted = trainer.predict(module, datamodule=text)
    assert predicted is not None
    return Run(losses.losses, metrics, [row.tolist() for batch in predicted for row in batch])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("bert")
    for has_order in (True, False):
        bert_data(path, sentence_order=has_order).setup("fit")  # the text is prepared once, for all layouts
    return path


@functools.cache
def runs(layout: Layout, folder: Path, has_order: bool) -> list[Run]:
    return run_on_ranks(layout.world, run, layout, folder, has_order, init=False)


@pytest.mark.matrix
@pytest.mark.parametrize("has_order", [True, False], ids=["order", "no order"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_losses_metrics_and_what_is_filled_in_are_those_of_one_device(name: str, has_order: bool, folder: Path) -> None:
    [wanted] = runs(PLAIN, folder, has_order)
    assert wanted.losses[-1] < wanted.losses[0] - 0.05, "it learns, so a step that is left out would show"
    for rank, found in enumerate(runs(LAYOUTS[name], folder, has_order)):
        assert found.losses == pytest.approx(wanted.losses, abs=1e-9)
        assert found.metrics.keys() == wanted.metrics.keys() >= {"train_loss", "val_loss", "test_loss"}
        assert ("val_sentence_order_accuracy" in found.metrics) == has_order
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
        assert found.texts == share_of(wanted.texts, LAYOUTS[name], rank) != []


def test_the_accuracy_of_orders_counts_each_sample_once(folder: Path) -> None:
    torch.manual_seed(7)
    # Large, so that the head says now this and now that.
    module, text = bert(init_std=0.5), bert_data(folder, global_batch_size=8)
    [logged] = make_trainer(PLAIN).validate(module, datamodule=text, verbose=False)
    samples = text._held_out
    assert samples is not None and module.model is not None and samples.count % 8, "the last batch has copies"
    right, shown = 0, set()
    with torch.no_grad():
        for i in range(samples.count):
            one = {name: value[None] for name, value in samples.dataset[i].items()}
            inputs = {name: one[name] for name in ("token_types", "padding_mask")}
            order = module.model.eval()(one["tokens"], **inputs).sentence_order
            right += int(order.argmax()) == int(one["sentence_order_labels"])
            shown.add(int(order.argmax()))
    assert logged["val_sentence_order_accuracy"] == right / samples.count and shown == {0, 1}
    assert 0 < right < samples.count


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("token_types", 2, r"token_types\[1, 3\] is 2, and must be from 0 to 1; num_token_types \(2\)"),
        ("sentence_order_labels", 2, r"sentence_order_labels\[1\] is 2, and must be from 0 to 1, or -100 for none"),
        ("sentence_order_labels", -100, ""),
    ],
)
def test_invalid_numbers_are_reported_by_their_position(folder: Path, name: str, value: int, shown: str) -> None:
    class Wrong(torch.utils.data.Dataset[Any]):
        def __getitem__(self, index: int) -> Any:
            sample = dict(text._held_out.dataset[index])  # type: ignore[union-attr]
            if index == 1:
                sample[name] = sample[name].clone()
                sample[name][(3,) if sample[name].dim() else ()] = value
            return sample

        def __len__(self) -> int:
            return 4

    text = bert_data(folder)
    text.setup("fit")
    loader = torch.utils.data.DataLoader(Wrong(), batch_size=2)
    trainer = make_trainer(Layout(), max_epochs=1)
    if not shown:
        trainer.validate(bert(), loader, verbose=False)
        return
    with pytest.raises(ValueError, match=shown):
        trainer.validate(bert(), loader, verbose=False)


def test_gaps_get_the_likeliest_tokens_and_all_else_stays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Large, so that whoever sees padding says something else.
    prompts = [*PROMPTS, "A cat[SEP] and a[MASK].[CLS]"]
    module, text = bert(init_std=1.0), bert_data(folder, prompts=prompts)
    trainer = make_trainer(PLAIN, callbacks=[PrintText()])
    predicted = trainer.predict(module, datamodule=text)
    assert predicted is not None and text.tokenizer is not None and module.model is not None
    rows = [row for batch in predicted for row in batch]
    first, separator, mask = (text.tokenizer.token_id(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
    for prompt, row, (ids, _) in zip(prompts, rows, text.tokenizer.encode_spelled(prompts), strict=True):
        asked = [first, *ids, separator]
        assert ids.count(mask) == prompt.count("[MASK]")
        with torch.no_grad():
            logits = module.model.eval()(torch.tensor([asked])).tokens[0]
        filled = [int(logits[i].argmax()) if token == mask else token for i, token in enumerate(asked)]
        # Of the tokens around the text nothing is left, wherever the prompt has them.
        assert row.tolist() == [
            token for token, before in zip(filled, asked, strict=True) if before not in (first, separator)
        ]
    printed = capsys.readouterr().out
    assert "--- text 1 ---\nIt ran" in printed and "to eat some fish" in printed


def test_a_gap_that_is_filled_with_a_separator_keeps_it(folder: Path) -> None:
    module, text = bert(tie_embeddings=False), bert_data(folder, prompts=PROMPTS[:1])
    text.setup("predict")
    assert text.tokenizer is not None
    separator = text.tokenizer.token_id("[SEP]")
    module.configure_model()
    assert module.model is not None
    with torch.no_grad():
        module.model.get_parameter("head.masked_tokens.bias")[separator] = 1e3
    [[row]] = make_trainer(PLAIN).predict(module, datamodule=text)  # type: ignore[misc]
    [(ids, _)] = text.tokenizer.encode_spelled(PROMPTS[:1])
    assert len(row) == len(ids) and row.tolist().count(separator) == 1


def resumed(folder: Path, layout: Layout, ckpt_path: str | None) -> list[float]:
    return resumed_losses(bert(steps=4), bert_data(folder), folder, layout, ckpt_path)


def test_a_run_goes_on_alike_on_another_layout(folder: Path) -> None:
    [first, _] = run_on_ranks(2, resumed, folder, LAYOUTS["tp=2 sp"], None, init=False)
    path = str(folder / "saved" / "step=2.ckpt")
    for found in run_on_ranks(2, resumed, folder, LAYOUTS["pp=2"], path, init=False):
        assert found == pytest.approx(first[2:], abs=1e-9)


def test_tokens_and_flops_of_a_batch_are_those_of_its_texts() -> None:
    module = bert()
    lengths = torch.tensor([5, SEQUENCE, 5, 0])
    batch = {
        "tokens": torch.zeros(4, SEQUENCE).long(),
        "padding_mask": torch.arange(SEQUENCE) < lengths.unsqueeze(1),
    }
    assert module.batch_tokens(batch) == 10 + SEQUENCE
    wanted = sum(bert_training_flops(module.config, batch=1, sequence=length) for length in (5, 5, SEQUENCE))
    # An empty row has a first token for the binary head all the same.
    assert module.batch_flops(batch) - wanted == bert_training_flops(module.config, batch=1, sequence=0)
    whole = {"tokens": batch["tokens"]}
    assert module.batch_tokens(whole) == 4 * SEQUENCE
    assert module.batch_flops(whole) == bert_training_flops(module.config, batch=4, sequence=SEQUENCE)
    config, full = module.config, RecomputeConfig(granularity="full")
    layers = sum(
        cost.layer_linear_flops(config, num_tokens=length, layer=layer)
        + cost.layer_attention_flops(config, batch=1, sequence=length, is_causal=False)
        for length in (5, 5, SEQUENCE)
        for layer in range(config.num_layers)
    )
    assert module.batch_recomputed_flops(batch, full, Sizes()) == layers


def test_an_order_that_the_model_has_no_head_for_is_refused(folder: Path) -> None:
    trainer = make_trainer(PLAIN, max_steps=2, limit_val_batches=0)
    with pytest.raises(ValueError, match="no binary head to learn them"):
        trainer.fit(bert(add_binary_head=False), datamodule=bert_data(folder))


def test_prediction_without_a_tokenizer_says_what_it_needs() -> None:
    batch = {"tokens": torch.zeros(1, 4).long(), "lengths": torch.tensor([4])}
    loader: Any = torch.utils.data.DataLoader([batch], batch_size=None)
    with pytest.raises(ValueError, match="needs a data module with a tokenizer"):
        L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False).predict(
            bert(), dataloaders=loader
        )
