"""Spans are masked differently in every epoch, as a function of seed and number; prompts are read with their gaps."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.data import (
    EpochSampler,
    T5Pieces,
    load_documents,
    load_tokenizer,
    prepare_corpus,
    sentinels,
)
from lightning_megatron.lightning_modules import BlendSource, T5DataConfig, T5DataModule, T5Module
from lightning_megatron.lightning_modules.data_module import Samples
from lightning_megatron.lightning_modules.loaders import evaluation_loader, training_loader
from lightning_megatron.models import T5Config
from lightning_megatron.trainer.setup.replica import Replica
from tests.lightning_modules.corpus import data as gpt_data
from tests.lightning_modules.corpus import held_out, write_corpus
from tests.lightning_modules.sentences import bert_data
from tests.lightning_modules.test_sources import write_tokens
from tests.trainer.layouts import PLAIN, make_trainer

VOCABULARY = 420
LENGTH, DECODER_LENGTH = 24, 16


def t5_data(folder: Path, **options: Any) -> T5DataModule:
    """A data module over the corpus in `folder`, which is written unless it is there."""
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(folder)
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "sequence_length": LENGTH,
        "decoder_sequence_length": DECODER_LENGTH,
        "global_batch_size": 4,
        "path": str(corpus),
        **held_out(options, 0.2),
        "cache_directory": str(folder / "cache"),
    }
    return T5DataModule(T5DataConfig(**(defaults | options)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("t5")
    t5_data(path).setup("fit")
    return path


def whole_text(data: T5DataModule, sample: dict[str, Tensor]) -> str:
    """The text of a sample, its spans put back."""
    assert data.tokenizer is not None
    names, end = set(sentinels(data.tokenizer)), data.tokenizer.end_of_text
    spans: dict[int, list[int]] = {}
    for token in sample["labels"].tolist():
        if token in names:
            spans[last := token] = []
        elif token not in (end, -100):
            spans[last].append(token)
    read = sample["encoder_tokens"][sample["encoder_segments"] == 0].tolist()
    assert read[-1] == end and end not in read[:-1]
    return data.tokenizer.decode([t for i in read[:-1] for t in (spans[i] if i in names else [i])])


def test_the_pieces_of_an_epoch_are_the_documents_without_those_held_out(folder: Path) -> None:
    data = t5_data(folder)
    data.setup("fit")
    found = []
    for samples in (data._training, data._held_out):
        assert samples is not None and isinstance(samples.dataset, T5Pieces)
        found.append("".join(whole_text(data, samples.dataset[i]) for i in range(samples.count)))
    documents = [path.read_text() for path in sorted((folder / "corpus").iterdir())]
    held_out = [text for text in documents if text in found[1]]
    assert (len(documents), len(held_out)) == (12, 2)
    assert found[1] == "".join(sorted(held_out, key=found[1].index))
    kept = [text for text in documents if text not in held_out]
    assert found[0] == "".join(sorted(kept, key=found[0].index))


def test_the_decoder_starts_with_padding_and_reads_its_own_output(folder: Path) -> None:
    data = t5_data(folder)
    data.setup("fit")
    assert data._training is not None and data.tokenizer is not None
    start = data.tokenizer.token_id("<pad>")
    for i in range(data._training.count):
        sample = data._training.dataset[i]
        shown = sample["labels"][sample["labels"] != -100].tolist()
        assert sample["decoder_tokens"][: len(shown)].tolist() == [start, *shown[:-1]]
        assert shown[-1] == data.tokenizer.end_of_text != start


class Reader(L.LightningModule):
    """Notes the tokens of every batch it is trained on, the labels of validation too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[dict[str, Tensor]] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append({name: value.clone() for name, value in batch.items()})
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(batch["labels"].clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def read(folder: Path, saved: Path, max_epochs: int, ckpt_path: str | None = None, **options: Any) -> Reader:
    saver = ModelCheckpoint(saved, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(PLAIN, max_epochs=max_epochs, enable_checkpointing=True, callbacks=[saver])
    module = Reader()
    trainer.fit(module, datamodule=t5_data(folder, **options), ckpt_path=ckpt_path)
    return module


def texts_of(folder: Path, batches: list[dict[str, Tensor]]) -> list[list[str]]:
    data = t5_data(folder)
    data.setup("fit")
    return [
        [whole_text(data, {name: value[row] for name, value in batch.items()}) for row in range(4)] for batch in batches
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_epoch_has_every_piece_in_another_order_with_other_spans_and_goes_on(
    folder: Path, tmp_path: Path, num_workers: int
) -> None:
    options = {"num_workers": num_workers, "global_batch_size": 4, "sequence_length": 60, "decoder_sequence_length": 24}
    full = read(folder, tmp_path, 3, **options)
    data = t5_data(folder, **options)
    data.setup("fit")
    assert data._training is not None
    steps = data._training.count // 4
    assert len(full.seen) == 3 * steps
    texts = [text for batch in texts_of(folder, full.seen) for text in batch]
    epochs = [texts[e * 4 * steps : (e + 1) * 4 * steps] for e in range(3)]
    assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # Of a text that comes in each epoch other spans are taken out.
    everywhere = set(epochs[0]) & set(epochs[1]) & set(epochs[2])
    assert len(everywhere) > len(epochs[0]) / 2
    labels: dict[str, set[tuple[int, ...]]] = {text: set() for text in everywhere}
    for batch, own in zip(full.seen, texts_of(folder, full.seen), strict=True):
        for row, text in enumerate(own):
            if text in everywhere:
                labels[text].add(tuple(batch["labels"][row].tolist()))
    assert sum(len(found) for found in labels.values()) > 2.9 * len(everywhere)
    # Validation is the same in every epoch.
    third = len(full.validated) // 3
    assert all(torch.equal(full.validated[i], full.validated[i + third]) for i in range(third))
    for step in (1, steps, 2 * steps - 1):
        resumed = read(folder, tmp_path, 3, str(tmp_path / f"step={step}.ckpt"), **options)
        assert len(resumed.seen) == 3 * steps - step
        for one, other in zip(resumed.seen, full.seen[step:], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


class Numbered(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sample n holds n."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"tokens": torch.tensor([number])}


def numbers_of(epoch: int, replica: Replica, samples: Samples) -> list[int]:
    loader = training_loader(
        samples.dataset,
        samples.count,
        global_batch_size=4,
        replica=replica,
        seed=1,
        num_workers=0,
        is_new_each_epoch=samples.is_new_each_epoch,
    )
    assert isinstance(loader.sampler, EpochSampler)
    loader.sampler.set_epoch(epoch)
    return [int(number) for batch in loader for number in batch["tokens"].flatten()]


def test_numbers_go_on_over_epochs_and_say_which_sample_is_meant() -> None:
    samples = Samples(dataset=Numbered(), count=10, is_new_each_epoch=True)
    for epoch in range(3):
        found = numbers_of(epoch, Replica(0, 1), samples)
        assert len(set(found)) == 8 and all(number // 10 == epoch for number in found)
        parts = [numbers_of(epoch, Replica(rank, 2), samples) for rank in range(2)]
        joined = [one[k : k + 2] for k in range(0, 4, 2) for one in parts]
        assert [number for pair in joined for number in pair] == found


def test_a_part_of_what_is_new_in_each_epoch_has_the_numbers_of_the_whole() -> None:
    samples = Samples(dataset=Numbered(), count=10, is_new_each_epoch=True)
    kept, held_out = samples.split(0.2)
    assert held_out is not None and (kept.count, held_out.count) == (8, 2)
    assert sorted(numbers_of(3, Replica(0, 1), kept)) == list(range(30, 38))
    assert [int(held_out.dataset[i]["tokens"]) for i in range(2)] == [8, 9]


def test_a_validation_that_ends_early_sees_the_same_the_next_time() -> None:
    samples = [{"tokens": torch.tensor([i]), "loss_mask": torch.ones(1)} for i in range(10)]
    loader = evaluation_loader(samples, 10, global_batch_size=2, replica=Replica(0, 1), num_workers=0)  # type: ignore[arg-type]
    rounds = [
        [batch["tokens"].flatten().tolist() for _, batch in zip(range(3), loader, strict=False)] for _ in range(3)
    ]
    assert rounds == [[[0, 1], [2, 3], [4, 5]]] * 3


def test_of_one_document_the_last_pieces_are_held_out(tmp_path: Path) -> None:
    path = write_corpus(tmp_path, num_documents=1, num_words=800)
    data = t5_data(tmp_path, path=str(path))
    data.setup("fit")
    assert data._training is not None and data._held_out is not None
    num = data._training.count
    [text] = [file.read_text() for file in path.iterdir()]
    # In the second epoch as well.
    for first in (0, num):
        kept = "".join(whole_text(data, data._training.dataset[first + i]) for i in range(num))
        held_out = "".join(whole_text(data, data._held_out.dataset[i]) for i in range(data._held_out.count))
        assert kept + held_out == text


def test_a_prompt_is_read_with_its_gaps_and_its_end(folder: Path) -> None:
    data = t5_data(folder, prompts=["the cat<extra_id_0> a mat", ""])
    warned = r"1 of 2 prompts, the first of them '', have no gap, .* write <extra_id_0>"
    with pytest.warns(UserWarning, match=warned):
        data.setup("predict")
    # Once, however often the prompts are read.
    [batch] = data.predict_dataloader()
    assert data.tokenizer is not None
    first, gap, end = sentinels(data.tokenizer)[0], "the cat<extra_id_0> a mat", data.tokenizer.end_of_text
    assert (batch["tokens"] == first).sum() == 1
    ids = batch["tokens"][0, : batch["lengths"][0]].tolist()
    assert data.tokenizer.decode(ids[:-1]) == gap and ids[-1] == end
    assert batch["tokens"][1, : batch["lengths"][1]].tolist() == [end]
    start = data.tokenizer.token_id("<pad>")
    assert batch["decoder_tokens"].tolist() == [[start], [start]] and batch["samples"].tolist() == [0, 1]


# --- faults -----------------------------------------------------------------------------------------------------------


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    data = t5_data(tmp_path, vocab_size=300, mask_prob=1.0, span_stop_prob=0.0, max_span_length=0, sequence_length=2)
    faults = "\n".join(data.faults())
    for shown in (
        "vocab_size (300) must be at least 358",
        "101 special tokens",
        "mask_prob (1.0)",
        "span_stop_prob (0.0)",
    ):
        assert shown in faults
    assert "max_span_length (0)" in faults and "\nsequence_length (2)" in faults
    [fault] = t5_data(tmp_path, decoder_sequence_length=3).faults()
    assert fault.startswith("decoder_sequence_length (3) must be at least 5")
    with pytest.raises(ConfigurationError, match="5 faults"):
        data.setup("fit")


def test_a_tokenizer_without_padding_and_sentinels_is_a_fault_that_names_both(folder: Path, tmp_path: Path) -> None:
    plain = gpt_data(tmp_path)
    plain.setup("fit")
    [path] = (tmp_path / "cache").glob("tokenizer-*.json")
    faults = t5_data(tmp_path, tokenizer=str(path)).faults()
    assert len(faults) == 2 and "padding ([PAD] or <pad>)" in faults[0] and "no sentinels" in faults[1]
    [own] = (folder / "cache").glob("tokenizer-*.json")
    assert t5_data(folder, tokenizer=str(own)).faults() == []
    assert len(sentinels(load_tokenizer(own))) == 100


def test_a_blend_takes_out_other_spans_in_each_pass_and_reads_token_files(folder: Path) -> None:
    alone = t5_data(folder)
    alone.setup("fit")
    assert alone.tokenizer is not None and alone._training is not None
    [tokenizer] = (folder / "cache").glob("tokenizer-*.json")
    prefix = prepare_corpus(load_documents(path=folder / "corpus"), alone.tokenizer, folder / "cache", has_ends=False)
    sources = [BlendSource(weight=1.0, path=str(folder / "corpus")), BlendSource(weight=1.0, path=str(prefix))]
    data = t5_data(folder, path=None, blend=sources, tokenizer=str(tokenizer), validation_fraction=0.0)
    data.setup("fit")
    samples = data._training
    assert samples is not None and samples.is_infinite
    # Both sources are the same text: of each pass every piece comes twice, and spans are drawn by number of a source.
    count = 2 * len(t5_pieces(data, 0))
    passes = [[samples.dataset[number] for number in range(first, first + count)] for first in (0, count)]
    texts = [sorted(whole_text(data, sample) for sample in one) for one in passes]
    assert texts[0] == texts[1] and texts[0][0::2] == texts[0][1::2]
    read = [sorted(sample["encoder_tokens"].tolist() for sample in one) for one in passes]
    assert read[0] != read[1]
    with pytest.raises(ConfigurationError, match="give the tokenizer"):
        t5_data(folder, path=str(prefix), tokenizer=None).setup("fit")


def t5_pieces(data: T5DataModule, source: int) -> T5Pieces:
    """Those of one source of a blend."""
    assert data._training is not None
    found = data._training.dataset.sources[source].samples  # type: ignore[attr-defined]
    assert isinstance(found, T5Pieces)
    return found


def test_token_files_without_a_tokenizer_are_a_fault_like_others(folder: Path, tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    for made, needed in ((t5_data, "padding and sentinels"), (bert_data, r"[CLS], [SEP], [MASK] and [PAD]")):
        faults = made(folder, path=prefix, sequence_length=0).faults()  # type: ignore[operator]
        assert any("token files do not say" in fault and needed in fault for fault in faults)
        assert any("sequence_length (0)" in fault for fault in faults)


def test_a_prompt_may_be_longer_than_samples_are_where_no_learned_position_ends(folder: Path) -> None:
    text = "the cat sat " * 20
    data = t5_data(folder, prompts=["the cat<extra_id_0>", f"<extra_id_0>{text}"])
    data.setup("predict")
    assert data.tokenizer is not None
    [batch] = data.predict_dataloader()
    gap, ids = sentinels(data.tokenizer)[0], data.tokenizer.encode([text])[0]
    wanted = [gap, *ids, data.tokenizer.end_of_text]
    assert batch["tokens"][1, : batch["lengths"][1]].tolist() == wanted and len(wanted) > LENGTH
    learned = T5Config(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position="learned",
    )
    with pytest.raises(
        ConfigurationError, match=r"prompt \('<extra_id_0>the .*max_sequence_length \(24\) of the model"
    ):
        make_trainer(PLAIN).predict(T5Module(learned), datamodule=data)
