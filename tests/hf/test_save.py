"""Any mesh reads one folder, computes what transformers computes, and writes the files that one process writes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_megatron import hf
from lightning_megatron.hf import save as saving
from lightning_megatron.hf.shards import ShardPlan
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.transformer.lora import LoraConfig, add_lora, merge_lora
from tests.harness.ranks import run_on_ranks
from tests.hf.tiny import CASES, family_of, files_of, logits, ours, saved, tokens
from tests.trainer.layouts import Layout, make_trainer

LAYOUTS = {
    "tp2": Layout(world=2, tp=2),
    "tp2+sp": Layout(world=2, tp=2, sp=True),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "tp2 pp2": Layout(world=4, tp=2, pp=2),
    "tp4+sp": Layout(world=4, tp=4, sp=True),
    "dp2 pp2": Layout(world=4, pp=2),
}
EXPERT_LAYOUTS = {
    "ep2": Layout(world=2, ep=2),
    "etp2": Layout(world=2, tp=2, etp=2),
    "ep2 etp2": Layout(world=4, ep=2, etp=2),
    "tp2+sp ep2": Layout(world=2, tp=2, sp=True, ep=2),
    "pp2 ep2": Layout(world=4, pp=2, ep=2),
}
# One with every kind of row, and tied weights: the sample has them on two stages, as pp2 is third and so is qwen2.
DENSE = (
    *("gpt2", "llama 3", "qwen2 tied, two layers with a window", "qwen3, a window in turns", "mistral"),
    *("gemma2", "gemma3", "glm4", "olmo2", "phi3"),
)
WITH_EXPERTS = ("mixtral", "qwen3_moe, some layers dense, with a window", "deepseek_v3", "gpt_oss", "qwen2_moe")
# Of which a tiny model's weights fill several.
SHARD_BYTES = 20_000


class Imported(L.LightningModule):
    """Reads a folder, predicts logits and writes another folder."""

    def __init__(self, source: Path, target: Path, family: str) -> None:
        super().__init__()
        self.source, self.target, self.family = source, target, family
        self.model: GPTModel | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = hf.from_pretrained(self.source)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        output: Tensor = self.model(batch)
        return output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch, labels=batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        # Weights of an optimizer that overlaps are still on their way, and those of mixed precision are narrow.
        assert self.model is not None
        if batch_idx == 1:
            hf.save_pretrained(self.model, self.target, family=self.family, max_shard_bytes=SHARD_BYTES)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_predict_end(self) -> None:
        assert self.model is not None
        hf.save_pretrained(self.model, self.target, family=self.family, max_shard_bytes=SHARD_BYTES)


def predict_and_save(layout: Layout, cases: tuple[str, ...], folder: Path) -> dict[str, Tensor]:
    found = {}
    for number, case in enumerate(cases):
        module = Imported(folder / f"{number}", folder / f"{number}-again", family_of(case))
        trainer = make_trainer(layout, precision="32-true")
        [output] = trainer.predict(module, DataLoader(tokens(), batch_size=2)) or []
        assert isinstance(output, Tensor)
        found[case] = output
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("case", DENSE)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_predicts_and_writes_as_one_process(name: str, case: str, tmp_path: Path) -> None:
    require_as_alone(LAYOUTS[name], (case,), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("case", WITH_EXPERTS)
@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_a_layout_predicts_and_writes_experts_as_one_process(name: str, case: str, tmp_path: Path) -> None:
    require_as_alone(EXPERT_LAYOUTS[name], (case,), tmp_path)


def require_as_alone(layout: Layout, cases: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks of a layout predict what transformers predicts, and write the files that one process writes."""
    wanted = {case: logits(saved(case, tmp_path / f"{number}")) for number, case in enumerate(cases)}
    ranks = run_on_ranks(layout.world, predict_and_save, layout, cases, tmp_path, init=False, timeout=120)
    for found in ranks:
        for case in cases:
            assert (found[case] - wanted[case]).abs().max() < 1e-5 * wanted[case].abs().max()
    for number, case in enumerate(cases):
        alone = tmp_path / f"{number}-alone"
        hf.save_pretrained(ours(tmp_path / f"{number}"), alone, family=family_of(case), max_shard_bytes=SHARD_BYTES)
        assert files_of(tmp_path / f"{number}-again") == files_of(alone)
        assert len(files_of(alone)) > 4
    # No draft is left.
    assert len(list(tmp_path.iterdir())) == 3 * len(cases)


FITS = {
    "one": (Layout(), "32-true"),
    "tp2 pp2": (Layout(world=4, tp=2, pp=2, microbatches=2), "32-true"),
    "overlap": (
        Layout(
            world=2,
            optimizer=OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
        ),
        "32-true",
    ),
    "mixed": (Layout(world=2, pp=2, microbatches=2), "bf16-mixed"),
}


def fit_and_save(layout: Layout, precision: str, source: Path, target: Path) -> None:
    module = Imported(source, target, "qwen3")
    trainer = make_trainer(layout, precision=precision, max_epochs=1, max_steps=2)
    batch = 2 // layout.dp
    first = trainer.strategy.global_rank * batch % 2 if layout.dp > 1 else 0
    rows = [tokens()[first : first + batch] for _ in range(2)]
    trainer.fit(module, DataLoader(torch.cat(rows), batch_size=batch))


def test_what_was_read_is_trained_and_written_as_on_one_device(tmp_path: Path) -> None:
    saved("qwen3, a window in turns", tmp_path / "theirs")
    written = {}
    for name, (layout, precision) in FITS.items():
        run_on_ranks(
            layout.world, fit_and_save, layout, precision, tmp_path / "theirs", tmp_path / name, init=False, timeout=120
        )
        written[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").state_dict()
    for name, weights in written.items():
        for key, wanted in written["one"].items():
            # Products of mixed precision have 8 bits.
            limit = 1e-5 if name != "mixed" else 0.05
            assert (weights[key] - wanted).abs().max() < limit, (name, key)
            assert weights[key].dtype == torch.float32
    assert max(float((before[key] - value).abs().max()) for key, value in written["one"].items()) > 0.05


def test_files_are_as_large_as_asked_and_named_by_the_index(tmp_path: Path) -> None:
    saved("qwen3", tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    hf.save_pretrained(model, tmp_path / "ours", max_shard_bytes=SHARD_BYTES)
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    by_file: dict[str, set[str]] = {}
    for name, file in index["weight_map"].items():
        by_file.setdefault(file, set()).add(name)
    assert sorted(by_file) == [f"model-{i + 1:05d}-of-{len(by_file):05d}.safetensors" for i in range(len(by_file))]
    total = 0
    for file, names in by_file.items():
        with safe_open(tmp_path / "ours" / file, framework="pt") as opened:
            assert set(opened.keys()) == names
            assert opened.metadata() == {"format": "pt"}
            num_bytes = sum(opened.get_tensor(name).nbytes for name in names)
        assert num_bytes <= SHARD_BYTES
        total += num_bytes
    assert index["metadata"]["total_size"] == total == 4 * sum(p.numel() for p in model.parameters())


def test_a_tensor_larger_than_a_file_may_be_has_its_own() -> None:
    shapes = {"a": (4,), "b": (100,), "c": (4,), "d": (4,)}
    plan = ShardPlan.of(shapes, torch.float32, 32)
    assert [plan.locations[name].file[:11] for name in shapes] == [f"model-0000{i}" for i in (1, 2, 3, 3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_asked_for_is_that_of_the_files(dtype: torch.dtype, tmp_path: Path) -> None:
    model = saved("llama", tmp_path / "theirs")
    hf.save_pretrained(ours(tmp_path / "theirs"), tmp_path / "ours", family="llama", dtype=dtype)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert again.dtype == dtype
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype))


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    files = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "generation_config.json")
    for name in (*files, "chat_template.jinja", "notes.txt"):
        (tmp_path / "theirs" / name).write_text(f"{{}} {name}")
    ids = {"bos_token_id": 7, "eos_token_id": [8, 9]}
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    (tmp_path / "theirs/config.json").write_text(json.dumps({**config, **ids}))
    model = ours(tmp_path / "theirs")
    hf.save_pretrained(model, tmp_path / "with", family="llama", tokenizer_from=tmp_path / "theirs")
    hf.save_pretrained(model, tmp_path / "without", family="llama")
    of_weights = {"config.json", "model.safetensors"}
    assert set(files_of(tmp_path / "with")) == of_weights | set(files) | {"chat_template.jinja"}
    assert (tmp_path / "with/vocab.json").read_text() == "{} vocab.json"
    assert set(files_of(tmp_path / "without")) == of_weights
    written = json.loads((tmp_path / "with/config.json").read_text())
    assert {name: written[name] for name in ids} == ids and written["pad_token_id"] is None


def small(**changes: Any) -> GPTModel:
    fields: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 5}
    return GPTModel(GPTConfig(**{**fields, **changes}))


def test_a_path_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty"):
        hf.save_pretrained(small(), tmp_path)
    with pytest.raises(ValueError, match="exists and is not empty"):
        hf.save_pretrained(small(), tmp_path / "note")
    (tmp_path / "empty").mkdir()
    hf.save_pretrained(small(), tmp_path / "empty")
    assert set(files_of(tmp_path / "empty")) == {"config.json", "model.safetensors"}
    assert (tmp_path / "note").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": torch.int8}, r"dtype \(torch.int8\) must be one of torch.float64, torch.float32"),
        ({"max_shard_bytes": 0}, r"max_shard_bytes \(0\) must be at least 1"),
        ({"tokenizer_from": "nowhere"}, r"tokenizer_from \(nowhere\) is no folder"),
        ({"tokenizer_from": "bare"}, r"tokenizer_from \(bare\) has none of the files of a tokenizer \(tokenizer.json"),
        ({"family": "llama"}, r"llama: position \('learned'\) must be 'rotary'"),
    ],
)
def test_what_cannot_be_written_is_reported(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "tokenizer_from" in options:
        # Things that go along with a tokenizer, and none.
        (tmp_path / "bare").mkdir()
        (tmp_path / "bare" / "generation_config.json").write_text("{}")
    with pytest.raises(ValueError, match=words):
        hf.save_pretrained(small(), tmp_path / "model", **options)
    assert [path.name for path in tmp_path.iterdir() if path.name != "bare"] == []


def save_with_a_full_disk(target: Path) -> str:
    """On each rank: one rank's disk is full after its first tensor."""
    trainer = make_trainer(Layout(world=2, pp=2), precision="32-true")
    module = Imported(target.parent / "0", target, "gpt2")
    writes = []
    put = ShardPlan.put

    def full(plan: ShardPlan, folder: Path, name: str, tensor: Tensor) -> None:
        writes.append(name)
        if trainer.global_rank == 1 and len(writes) == 2:
            raise OSError("no space left")
        put(plan, folder, name, tensor)

    ShardPlan.put = full  # type: ignore[method-assign]
    try:
        trainer.predict(module, DataLoader(tokens(), batch_size=2))
    except OSError as error:
        return str(error)
    return "written"


def test_a_rank_that_cannot_write_is_heard_by_all_and_nothing_is_left(tmp_path: Path) -> None:
    saved("gpt2", tmp_path / "0")
    shown = run_on_ranks(2, save_with_a_full_disk, tmp_path / "again", init=False)
    assert shown == [f"{tmp_path / 'again'} could not be written: no space left"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_rank_gathers_one_weight_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path / "0")
    model = ours(tmp_path / "0")
    largest = max(parameter.numel() for parameter in model.parameters())
    made: list[int] = []
    empty = saving.empty_source

    def counted(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made.append(torch.Size(shape).numel())
        return empty(shape, dtype)

    monkeypatch.setattr(saving, "empty_source", counted)
    hf.save_pretrained(model, tmp_path / "1", family="llama")
    assert max(made) <= largest
    assert sum(made) == sum(parameter.numel() for parameter in model.parameters())


def test_every_family_is_written_on_layouts() -> None:
    assert {family_of(case) for case in DENSE + WITH_EXPERTS} == {family_of(case) for case in CASES}


def test_weights_that_are_still_on_their_way_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    waited: list[str] = []

    @contextmanager
    def with_weights() -> Iterator[None]:
        waited.append("all")
        yield
        waited.clear()

    model.with_weights = with_weights
    read: list[list[str]] = []
    gathered = saving._gathered

    def noted(parameter: Tensor) -> Tensor:
        read.append(list(waited))
        return gathered(parameter)

    monkeypatch.setattr(saving, "_gathered", noted)
    hf.save_pretrained(model, tmp_path / "ours", family="llama")
    assert read[0] == ["all"] and all(one == read[0] for one in read)


def test_lora_adapters_are_not_left_out_in_silence(tmp_path: Path) -> None:
    saved("llama", tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    add_lora(model, LoraConfig(rank=2))
    with pytest.raises(ValueError, match=r"lora\.a.*merge_lora"):
        hf.save_pretrained(model, tmp_path / "out", family="llama")
    merge_lora(model)
    hf.save_pretrained(model, tmp_path / "out", family="llama")
    assert (tmp_path / "out" / "model.safetensors").is_file()
