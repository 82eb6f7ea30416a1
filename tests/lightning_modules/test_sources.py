"""What GPTDataModule reads: text, token files and blends of both; which documents are held out; what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.data import FillInTheMiddle, GPTSamples, MegatronCorpus, megatron_writer
from lightning_megatron.lightning_modules import BlendSource, GPTDataModule, StreamingConfig
from lightning_megatron.lightning_modules.text_sources import split_bounds
from tests.data.stretches import cut_in_stretches
from tests.lightning_modules.corpus import data, write_corpus
from tests.trainer.layouts import PLAIN, make_trainer

END = 9


def write_tokens(prefix: Path, num_documents: int = 10, first: int = 10, length: int = 40, dtype: str = "<u2") -> str:
    """Token files of documents of which each holds one token again and again, and the end of text."""
    with megatron_writer(prefix, dtype) as writer:
        for i in range(num_documents):
            writer.add_document([[first + i] * length + [END]])
    return str(prefix)


def of_tokens(tmp_path: Path, **options: Any) -> GPTDataModule:
    options = {"path": str(tmp_path / "tokens"), "sequence_length": 8} | options
    return data(tmp_path, **options)


def documents_in(samples: Any) -> set[int]:
    """The tokens, but the end of text, that samples hold."""
    found = {int(token) for i in range(samples.count) for token in samples.dataset[i]["tokens"]}
    return found - {END}


def test_token_files_train_without_text_or_tokenizer(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    module = of_tokens(tmp_path, validation_fraction=0.2)
    assert module.faults() == []
    module.setup("fit")
    assert module.tokenizer is None and module._training is not None and module._held_out is not None
    assert documents_in(module._training) == set(range(10, 18))
    assert documents_in(module._held_out) == {18, 19}
    alone = GPTSamples(prefix, 8, documents=(0, 8))
    assert module._training.count == len(alone)
    assert all(
        torch.equal(module._training.dataset[i]["labels"], alone[i]["labels"]) for i in range(module._training.count)
    )


def test_token_files_need_a_tokenizer_where_ends_of_text_count_or_text_is_asked_for(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    for options in ({"packing": "documents"}, {"separates_documents": True}, {"masks_end_of_text": True}):
        [fault] = of_tokens(tmp_path, **options).faults()
        assert "give their tokenizer" in fault
    with pytest.raises(ConfigurationError, match="give the tokenizer to predict"):
        of_tokens(tmp_path, prompts=["a"]).setup("predict")


def test_tokens_that_the_model_does_not_know_are_a_fault(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", first=292)
    with pytest.raises(ConfigurationError, match=r"from 9 to 301.*vocab_size \(300\).*set it to 302"):
        of_tokens(tmp_path).setup("fit")
    with pytest.raises(ConfigurationError, match="set it to 302"):
        of_tokens(tmp_path, vocab_size=301).setup("fit")
    of_tokens(tmp_path, vocab_size=302).setup("fit")
    write_tokens(tmp_path / "below", dtype="<i4", first=-5)
    with pytest.raises(ConfigurationError, match="from -5 to"):
        of_tokens(tmp_path, path=str(tmp_path / "below")).setup("fit")
    write_tokens(tmp_path / "broken", dtype="<f4")
    with pytest.raises(ConfigurationError, match="whole numbers"):
        of_tokens(tmp_path, path=str(tmp_path / "broken")).setup("fit")


def test_token_files_that_do_not_match_or_are_missing_are_faults(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    with (tmp_path / "tokens.bin").open("ab") as file:
        file.write(b"12")
    [fault] = of_tokens(tmp_path).faults()
    assert "do not match" in fault
    (tmp_path / "tokens.bin").unlink()
    [fault] = of_tokens(tmp_path).faults()
    assert "tokens.bin" in fault and "do not exist" in fault
    write_tokens(tmp_path / "tokens")
    [fault] = of_tokens(tmp_path, path=str(tmp_path / "tokens.idx")).faults()
    assert "give their prefix" in fault
    write_tokens(tmp_path / "tokens", num_documents=0)
    with pytest.raises(ConfigurationError, match="hold no document"):
        of_tokens(tmp_path).setup("fit")


def test_packed_rows_of_a_part_of_token_files_hold_that_part(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    data(tmp_path).setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    module = of_tokens(
        tmp_path, packing="documents", sequence_length=50, tokenizer=str(tokenizer), document_split="5,3,2"
    )
    module.setup("fit")
    assert module._training is not None and module._held_out is not None and module._tested is not None
    found = []
    for samples in (module._training, module._held_out, module._tested):
        rows = [samples.dataset[i] for i in range(samples.count)]
        found.append({int(token) for row in rows for token in row["tokens"][row["segments"] >= 0]})
        assert all(int(label) in (END, int(row["tokens"][0]), -100) for row in rows for label in row["labels"])
    assert found == [set(range(10, 15)), set(range(15, 18)), {18, 19}]


# --- what is held out -------------------------------------------------------------------------------------------------


def test_a_split_gives_the_documents_that_megatron_gives() -> None:
    # By hand: the shares 969, 30 and 1 of 1000 end at 0.969, 0.999 and 1 of the documents.
    assert split_bounds("969,30,1", 1000) == [969, 999, 1000]
    assert split_bounds("969,30,1", 100) == [97, 100, 100]
    assert split_bounds("98, 1, 1", 333) == [326, 330, 333]
    assert split_bounds("1,0,0", 7) == [7, 7, 7]


def test_a_split_holds_for_tokens_and_text(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    module = of_tokens(tmp_path, document_split="5,3,2")
    module.setup("fit")
    assert [documents_in(samples) for samples in (module._training, module._held_out, module._tested)] == [
        set(range(10, 15)),
        set(range(15, 18)),
        {18, 19},
    ]
    rows = [{"text": f"{'abcdefghij'[i] * 60}"} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    module = data(tmp_path, path=str(tmp_path / "rows.jsonl"), document_split="5,3,2", sequence_length=4)
    module.setup("fit")
    assert module.tokenizer is not None
    texts = []
    for samples in (module._training, module._held_out, module._tested):
        assert samples is not None
        ids = sorted({int(token) for i in range(samples.count) for token in samples.dataset[i]["tokens"]})
        texts.append(sorted(set(module.tokenizer.decode([i for i in ids if i != module.tokenizer.end_of_text]))))
    assert texts == [list("abcde"), list("fgh"), list("ij")]


def test_documents_for_test_are_tested_and_those_for_validation_else(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    for split, wanted in (("5,3,2", {18, 19}), ("5,5,0", {15, 16, 17, 18, 19})):
        module = of_tokens(tmp_path, document_split=split)
        module.trainer = make_trainer(PLAIN)
        module.setup("fit")
        [loader] = module.test_dataloader()
        assert {int(token) for batch in loader for token in batch["tokens"].flatten()} - {END} == wanted


def test_a_validation_path_is_read_besides(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    write_tokens(tmp_path / "others", first=100)
    module = of_tokens(tmp_path, validation_path=str(tmp_path / "others"))
    module.setup("fit")
    assert documents_in(module._training) == set(range(10, 20))
    assert documents_in(module._held_out) == set(range(100, 110))


# --- blends -----------------------------------------------------------------------------------------------------------


def blended(tmp_path: Path, weights: tuple[float, ...] = (3, 1), **options: Any) -> GPTDataModule:
    sources = []
    for number, weight in enumerate(weights):
        prefix = tmp_path / f"tokens{number}"
        if not Path(f"{prefix}.idx").exists():
            write_tokens(prefix, first=100 * (1 + number), num_documents=10 - number)
        sources.append(BlendSource(path=str(prefix), weight=weight))
    return data(tmp_path, **({"path": None, "sequence_length": 8, "blend": sources, "vocab_size": 1000} | options))


def of_source(sample: dict[str, Tensor]) -> int:
    """Of which source a sample is."""
    return int(sample["tokens"].max()) // 100 - 1


def test_a_blend_follows_its_weights_and_holds_out_of_each_source(tmp_path: Path) -> None:
    module = blended(tmp_path, (3, 1, 0), validation_fraction=0.3)
    module.setup("fit")
    training, held_out = module._training, module._held_out
    assert training is not None and held_out is not None and training.is_infinite
    found = [of_source(training.dataset[i]) for i in range(400)]
    for count in range(1, 401):
        assert abs(found[:count].count(0) - 0.75 * count) < 1.7
    assert 2 not in found
    kept = {int(token) for i in range(400) for token in training.dataset[i]["tokens"]} - {END}
    assert kept == set(range(100, 107)) | set(range(200, 206))
    # 7 documents of 41 tokens are 35 samples, of which three quarters of an epoch are.
    assert training.count in (46, 47, 48)
    assert documents_in(held_out) == set(range(107, 110)) | set(range(206, 209))
    assert [of_source(held_out.dataset[i]) for i in range(held_out.count)].count(0) == round(0.75 * held_out.count)


def test_a_blend_is_the_same_however_long_it_is(tmp_path: Path) -> None:
    short, long = blended(tmp_path), blended(tmp_path, epoch_samples=500)
    for module in (short, long):
        module.setup("fit")
    assert short._training is not None and long._training is not None
    assert short._training.count < long._training.count == 500
    for i in range(500):
        assert torch.equal(short._training.dataset[i]["tokens"], long._training.dataset[i]["tokens"])


def test_text_and_tokens_are_blended(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", first=290, num_documents=3)
    data(tmp_path).setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    sources = [
        BlendSource(path=str(tmp_path / "corpus"), weight=1),
        BlendSource(path=str(tmp_path / "tokens"), weight=1),
    ]
    module = data(tmp_path, path=None, blend=sources, tokenizer=str(tokenizer), validation_fraction=0)
    module.setup("fit")
    assert module.tokenizer is not None and module._training is not None and module._held_out is None
    maxima = [int(module._training.dataset[i]["tokens"][1:-1].max()) for i in range(40)]
    assert sum(290 <= token <= 292 for token in maxima) >= 20
    assert module.tokenizer.decode(module._training.dataset[0]["tokens"].tolist()) != ""


def test_several_texts_share_one_tokenizer(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 300)
    sources = [BlendSource(path=str(tmp_path / f"{name}.txt"), weight=1) for name in ("one", "two")]
    module = data(tmp_path, path=None, blend=sources)
    module.setup("fit")
    assert module.tokenizer is not None
    assert len(list((tmp_path / "cache").glob("tokenizer-*.json"))) == 1
    assert max(len(ids) for ids in module.tokenizer.encode([" one", " two"])) == 1, "learnt from both"
    assert module._held_out is not None and module._training is not None


# --- faults -----------------------------------------------------------------------------------------------------------


def test_all_faults_of_sources_are_reported_at_once(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    sources = [
        BlendSource(path=str(tmp_path / "none"), weight=-1),
        BlendSource(weight=1),
        BlendSource(path=str(tmp_path / "tokens"), dataset="name", weight=1),
    ]
    module = data(
        tmp_path,
        blend=sources,
        document_split="969,30",
        validation_path=str(tmp_path / "nothing"),
        epoch_samples=-1,
        fill_in_the_middle=FillInTheMiddle(prefix_token=1, suffix_token=2, middle_token=300),
        packing="documents",
    )
    faults = "\n".join(module.faults())
    for shown in (
        "source 0 of the blend: path",
        "source 1 of the blend: neither path nor dataset",
        "source 2 of the blend: path",
        "number 0 is -1",
        "blend is given with path",
        "epoch_samples (-1)",
        "validation_path: path",
        "document_split ('969,30') must be three numbers",
        "validation_path ('{nothing}') and document_split ('969,30') all say what is held out",
        "fill_in_the_middle must be left out with packing='documents'",
        "(1, 2, 300) must be from 0 to below vocab_size (300)",
    ):
        assert shown.replace("{nothing}", str(tmp_path / "nothing")) in faults, shown


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1), (float("nan"), 1), (float("inf"), 1)])
def test_weights_that_are_no_weights_are_a_fault(tmp_path: Path, weights: tuple[float, float]) -> None:
    [fault] = blended(tmp_path, weights).faults()
    assert "weights of a blend must be finite, at least 0 and not all 0" in fault


@pytest.mark.parametrize("split", ["", "1,2", "1,2,3,4", "a,b,c", "0,1,1", "-1,2,2", "nan,1,1"])
def test_splits_that_say_nothing_are_a_fault(tmp_path: Path, split: str) -> None:
    write_tokens(tmp_path / "tokens")
    assert any("document_split" in fault for fault in of_tokens(tmp_path, document_split=split).faults())


def test_epochs_of_one_source_are_not_a_choice(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    assert any("epoch_samples (5)" in fault for fault in of_tokens(tmp_path, epoch_samples=5).faults())
    assert blended(tmp_path, epoch_samples=5).faults() == []
    assert blended(tmp_path, blend=[]).faults()[0].startswith("blend has no source")


def test_streams_refuse_what_they_cannot_do(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens")
    module = of_tokens(
        tmp_path,
        streaming=StreamingConfig(),
        document_split="1,1,1",
        packing="documents",
        long_documents="refuse",
    )
    faults = "\n".join(module.faults())
    for shown in ("leave streaming out", "could learn from", "document_split counts", "'refuse' must see all"):
        assert shown in faults, shown
    assert "streaming reads one source" in "\n".join(blended(tmp_path, streaming=StreamingConfig()).faults())
    assert "give one of them" in "\n".join(data(tmp_path, path=None, streaming=StreamingConfig()).faults())
    with pytest.raises(ValueError, match=r"window_documents \(0\)"):
        StreamingConfig(window_documents=0)


def test_a_part_of_token_files_must_lie_within_them(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    assert MegatronCorpus(prefix, (3, 5)).document_sizes().tolist() == [41, 41]
    assert MegatronCorpus(prefix, (3, 5)).document_start(0) == 3 * 41
    for documents in ((-1, 3), (3, 2), (0, 11)):
        with pytest.raises(ValueError, match="must lie within its 10"):
            MegatronCorpus(prefix, documents)


def test_parts_of_the_same_files_do_not_share_an_index(tmp_path: Path) -> None:
    documents = [[11] * 9, [12] * 5, [13] * 5, [14] * 9]
    with megatron_writer(tmp_path / "tokens", "<u2") as writer:
        for document in documents:
            writer.add_document([document])
    for first, last in ((0, 2), (2, 4)):
        found = GPTSamples(tmp_path / "tokens", 4, num_samples=9, seed=3, documents=(first, last))
        wanted = cut_in_stretches(documents[first:last], 4, num_samples=9, seed=3)
        assert [sample["labels"].tolist() for sample in found] == [sample["labels"].tolist() for sample in wanted]


def test_token_files_with_text_need_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens")
    blend = [BlendSource(weight=1, path=prefix), BlendSource(weight=1, path=str(write_corpus(tmp_path)))]
    for options in (
        {"path": None, "blend": blend},
        {"validation_path": prefix},
        {"path": prefix, "validation_path": str(tmp_path / "corpus")},
    ):
        [fault] = data(tmp_path, **options).faults()
        assert fault.startswith("token files with text need the tokenizer that they were made with")


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "tokens")
    write_corpus(tmp_path)
    # Whoever runs this may be allowed to write everywhere.
    monkeypatch.setattr(Path, "open", _refuse_writing(Path.open))
    with pytest.raises(ConfigurationError, match=r"is written once, as .*cache.*npy, and cannot be"):
        of_tokens(tmp_path).setup("fit")


def test_a_cache_that_cannot_be_made_is_a_mistake_that_every_rank_tells(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/x.* cannot be read or written: Not a directory; name another"):
        data(tmp_path, cache_directory=str(tmp_path / "file" / "x")).prepare_data()


def _refuse_writing(real: Any) -> Any:
    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if "w" in mode:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, mode, *args, **options)

    return opened


def test_a_stream_in_which_every_document_is_dropped_ends(tmp_path: Path) -> None:
    data(tmp_path).setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    module = data(
        tmp_path,
        streaming=StreamingConfig(window_documents=5),
        packing="documents",
        long_documents="drop",
        sequence_length=4,
        epoch_samples=8,
        validation_fraction=0.0,
        tokenizer=str(tokenizer),
    )
    module.setup("fit")
    with pytest.raises(ValueError, match=r"the last \d+ documents of the stream gave no sample: .* set long_documents"):
        next(iter(module.train_dataloader()))


def test_a_stream_does_not_go_on_from_what_was_none(tmp_path: Path) -> None:
    data(tmp_path).setup("fit")
    [tokenizer] = (tmp_path / "cache").glob("tokenizer-*.json")
    module = data(
        tmp_path,
        streaming=StreamingConfig(window_documents=5),
        epoch_samples=8,
        validation_fraction=0.0,
        tokenizer=str(tokenizer),
    )
    module.setup("fit")
    module.train_dataloader()
    with pytest.raises(ConfigurationError, match="is of a run whose text did not stream"):
        module.load_state_dict({"consumed_samples": 8})
