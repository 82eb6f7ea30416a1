"""The data of a BERT: every span once an epoch, masked differently each time, resumable, with all faults at once."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import tokenizers
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.data import BertSpans, train_tokenizer
from lightning_megatron.lightning_modules.loaders import training_loader
from lightning_megatron.trainer.setup.replica import Replica
from tests.lightning_modules.sentences import SEQUENCE, bert_data, write_sentences
from tests.trainer.layouts import PLAIN, make_trainer


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["tokens"].flatten().tolist()]


class Numbered(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample n holds n."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([number]), "loss_mask": torch.ones(1)}


def loader(replica: Replica = Replica(0, 1)) -> Any:  # noqa: B008
    return training_loader(
        Numbered(), 22, global_batch_size=4, replica=replica, seed=1, num_workers=0, is_new_each_epoch=True
    )


def test_a_sample_of_a_later_epoch_has_a_number_of_its_own_on_any_number_of_dp_ranks() -> None:
    alone, seen = loader(), []
    for epoch in range(3):
        alone.sampler.set_epoch(epoch)
        found = numbers(alone)
        assert len(found) == 20 and all(22 * epoch <= number < 22 * (epoch + 1) for number in found)
        assert found != sorted(found), "it is shuffled"
        seen.append([number - 22 * epoch for number in found])
    assert seen[0] != seen[1] != seen[2], "in an order of its own each time"
    for consumed in (0, 12, 20, 44):
        parts = []
        for rank in range(2):
            own = loader(Replica(rank, 2))
            own.load_state_dict({"consumed_samples": consumed})
            parts.append([batch["tokens"].flatten().tolist() for batch in own])
        found = [number for left, right in zip(*parts, strict=True) for number in left + right]
        epoch, position = divmod(consumed, 20)
        assert found == [22 * epoch + number for number in seen[epoch][position:]]


class Reader(L.LightningModule):
    """Notes every batch that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch)
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert batch["loss_mask"].any()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(folder: Path, max_steps: int, ckpt_path: str | None = None, **options: Any) -> list[dict[str, Tensor]]:
    saver = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(PLAIN, max_steps=max_steps, max_epochs=-1, enable_checkpointing=True, callbacks=[saver])
    module = Reader()
    trainer.fit(module, datamodule=bert_data(folder, **options), ckpt_path=ckpt_path)
    return module.seen


def key_of(sample: dict[str, Tensor]) -> str:
    return str([sample[name].tolist() for name in sorted(sample)])


def original(batch: dict[str, Tensor]) -> list[list[int]]:
    """The texts, with what is hidden put back."""
    return torch.where(batch["labels"] == -100, batch["tokens"], batch["labels"]).tolist()


def test_every_epoch_masks_every_span_differently_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    text = bert_data(tmp_path)
    text.setup("fit")
    assert text._training is not None and isinstance(text._training.dataset, BertSpans)
    spans, count = text._training.dataset, text._training.count
    per_epoch = count // 4
    places = {key_of(spans[number]): number for number in range(3 * count)}
    assert len(places) == 3 * count, "no sample is like another, or the test could not tell"
    wanted = read(tmp_path, 2 * per_epoch + 3)
    seen = [places[key_of({name: value[row] for name, value in batch.items()})] for batch in wanted for row in range(4)]
    assert len(set(seen)) == len(seen)
    for epoch in range(2):
        own = seen[epoch * 4 * per_epoch : (epoch + 1) * 4 * per_epoch]
        assert {number // count for number in own} == {epoch}
    assert {number // count for number in seen[8 * per_epoch :]} == {2}
    for step in (2, per_epoch - 1, per_epoch, per_epoch + 2):
        resumed = read(tmp_path, 2 * per_epoch + 3, str(tmp_path / "saved" / f"step={step}.ckpt"))
        assert len(resumed) == len(wanted) - step
        for one, other in zip(resumed, wanted[step:], strict=True):
            assert all(one[name].equal(other[name]) for name in one), step


def test_a_single_document_is_held_out_by_its_last_spans(tmp_path: Path) -> None:
    write_sentences(tmp_path, num_documents=1, num_sentences=120)
    text = bert_data(tmp_path, validation_fraction=0.1)
    text.setup("fit")
    training, held_out = text._training, text._held_out
    assert (
        training is not None
        and held_out is not None
        and held_out.count == round(0.1 * (training.count + held_out.count))
    )
    full = bert_data(tmp_path, validation_fraction=0.0)
    full.setup("fit")
    assert full._training is not None
    everything, count = full._training.dataset, full._training.count
    assert count == training.count + held_out.count
    for epoch in range(2):
        for position in (0, training.count - 1):
            found = training.dataset[epoch * training.count + position]
            assert found["tokens"].equal(everything[epoch * count + position]["tokens"])
    last = held_out.dataset[held_out.count - 1]
    assert last["tokens"].equal(everything[count - 1]["tokens"])


def test_a_batch_has_the_layout_of_the_model(tmp_path: Path) -> None:
    text = bert_data(tmp_path, mask_prob=0.3, max_ngram=1)
    [batch, *_] = read(tmp_path, 1, mask_prob=0.3, max_ngram=1)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        **dict.fromkeys(("tokens", "token_types", "padding_mask", "labels", "loss_mask"), (4, SEQUENCE)),
        "sentence_order_labels": (4,),
    }
    text.setup("fit")
    assert text.tokenizer is not None
    special = set(text.tokenizer.special_ids())
    assert not special & set(batch["labels"].flatten().tolist()), "special tokens are never hidden"
    assert text._training is not None and isinstance(text._training.dataset, BertSpans)
    assert set(text._training.dataset.masking.special_tokens) == special, "nor drawn, the end of text among them"
    share = batch["loss_mask"].sum() / (batch["padding_mask"].sum() - 3 * 4)
    assert 0.2 < float(share) < 0.35
    without = read(tmp_path, 1, sentence_order=False)[0]
    assert "sentence_order_labels" not in without and not without["token_types"].any()


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    write_sentences(tmp_path)
    plain = tmp_path / "plain.json"
    train_tokenizer(["a b"], 270, plain, ("[CLS]",))
    module = bert_data(
        tmp_path,
        tokenizer=str(plain),
        sequence_length=4,
        mask_prob=1.5,
        max_ngram=0,
        short_seq_prob=-0.1,
        num_workers=-1,
    )
    with pytest.raises(ConfigurationError) as raised:
        module.setup("fit")
    shown = str(raised.value)
    for part in (
        "num_workers (-1)",
        "no token for separator ([SEP] or <sep> or </s>), mask ([MASK] or <mask>), padding",
        "sequence_length (4) must be at least 5",
        "short_seq_prob (-0.1)",
        "mask_prob (1.5)",
        "max_ngram (0)",
    ):
        assert shown.count(part) == 1, (part, shown)


def test_a_text_without_two_sentences_is_a_fault_that_says_why(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.txt").write_text("a single sentence of words")
    with pytest.raises(ConfigurationError, match="has two sentences"):
        bert_data(tmp_path).setup("fit")
    bert_data(tmp_path, sentence_order=False).setup("fit")


def test_a_tokenizer_of_the_wordpiece_kind_is_taken(tmp_path: Path) -> None:
    write_sentences(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "the", "cat", "sat", "a", "o", "##n", "mat", "and"]
    engine = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    engine.normalizer = tokenizers.normalizers.BertNormalizer()
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    engine.add_special_tokens(words[:5])
    engine.save(str(tmp_path / "tokenizer.json"))
    [batch] = read(tmp_path, 1, tokenizer=str(tmp_path / "tokenizer.json"))
    assert (batch["tokens"][:, 0] == 2).all() and (batch["tokens"] == 3).sum() == 8
    hidden = batch["labels"] != -100
    # "on" is one word of two tokens: both are hidden, or none.
    goes_on = original(batch)
    for row, mask in zip(goes_on, hidden.tolist(), strict=True):
        assert all(mask[i] == mask[i - 1] for i, token in enumerate(row) if token == words.index("##n"))


def test_prompts_without_a_gap_or_too_long_are_faults(tmp_path: Path) -> None:
    text = bert_data(tmp_path, prompts=["the cat", "the [MASK] " + "sat on " * 40, "a [MASK]"])
    with pytest.raises(ConfigurationError) as raised:
        text.setup("predict")
    assert "prompt ('the cat') has no [MASK]" in str(raised.value)
    assert "sequence_length (24) is the most" in str(raised.value) and "'a [MASK]'" not in str(raised.value)


def test_documents_of_one_sentence_are_reported_with_the_option_that_takes_them(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(30):
        (tmp_path / "corpus" / f"{i}.txt").write_text("The cat sat on a mat and ran home")
    with pytest.raises(
        ConfigurationError, match=r"has two sentences.* or ask nothing about the order by sentence_order="
    ):
        bert_data(tmp_path).setup("fit")
    bert_data(tmp_path, sentence_order=False).setup("fit")
