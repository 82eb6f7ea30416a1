"""The ready LLaVA: what it steps, logs and answers is the same on every layout, and so is what its data makes."""

import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image, ImageOps
from torch import Tensor

from lightning_megatron import ConfigurationError, RecomputeConfig, hf, load_from_checkpoint
from lightning_megatron.cli.main import main
from lightning_megatron.lightning_modules import (
    AdamWConfig,
    GenerationConfig,
    LlavaDataConfig,
    LlavaDataModule,
    LlavaModule,
)
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import GPTConfig, LlavaConfig, VisionConfig
from lightning_megatron.models.llava_cost import training_flops
from tests.data.test_image_samples import SIZE, folder_with_rows
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import held_out
from tests.lightning_modules.losses import Losses
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer, share_of

pytestmark = pytest.mark.filterwarnings(QUIET)

VOCABULARY, LENGTH, STEPS = 300, 64, 3
CONFIG = LlavaConfig.of(
    GPTConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        activation="swiglu",
        normalization="rmsnorm",
        position="rotary",
        add_bias_linear=False,
        tie_embeddings=False,
        init_std=0.1,
    ),
    # The end of text is 0 in a tokenizer that is trained here.
    image_token=1,
    vision=VisionConfig(
        num_layers=2, hidden_size=24, num_attention_heads=4, image_size=SIZE, patch_size=4, init_std=0.1
    ),
)
LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2),
    "cp=2": Layout(world=2, cp=2),
}
QUESTIONS = ["what?", "say more", "<image> or <image>?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = folder_with_rows(tmp_path_factory.mktemp("llava"))
    table = path / "rows.jsonl"
    # Eleven rows: ten to train on, and one held out.
    table.write_text(table.read_text() + "".join(table.read_text().splitlines(keepends=True)[:5]))
    data(path).setup("fit")  # prepared once, for all layouts
    return path


def data(folder: Path, **options: Any) -> LlavaDataModule:
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "image_token": CONFIG.image_token,
        "image_size": SIZE,
        "patch_size": 4,
        "template": "plain",
        "sequence_length": LENGTH,
        "global_batch_size": 4,
        "path": str(folder / "rows.jsonl"),
        **held_out(options, 0.1),
        "cache_directory": str(folder / "cache"),
    }
    return LlavaDataModule(LlavaDataConfig(**(defaults | options)))


def asking(folder: Path, **options: Any) -> LlavaDataModule:
    images = [["0-0.png"], [], ["2-0.png", "2-1.png"]]
    names = [[str(folder / name) for name in own] for own in images]
    return data(folder, prompts=QUESTIONS, prompt_images=names, **options)


def llava(**options: Any) -> LlavaModule:
    generation = GenerationConfig(max_new_tokens=6, temperature=0.9, seed=3)
    return LlavaModule(CONFIG, AdamWConfig(lr=1e-2, warmup_steps=1), generation, **options)


def run(layout: Layout, folder: Path, packing: str, frozen: tuple[str, ...]) -> tuple[list[float], Any, list[Any]]:
    """Three steps with validation after the last, then a test and three prompts."""
    torch.manual_seed(7)
    module, losses = llava(frozen=list(frozen)), Losses()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": 2}
    trainer = make_trainer(layout, callbacks=[losses], check_val_every_n_epoch=None, **options)
    images = asking(folder, packing=packing, template="vicuna", sequence_length=300)
    trainer.fit(module, datamodule=images)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in trainer.test(module, datamodule=images, verbose=False)[0].items()}
    predicted = trainer.predict(module, datamodule=images)
    assert predicted is not None
    return losses.losses, metrics, [row.tolist() for batch in predicted for row in batch]


@functools.cache
def alone(folder: Path, packing: str, frozen: tuple[str, ...]) -> tuple[list[float], Any, list[Any]]:
    return run(PLAIN, folder, packing, frozen)


RUNS: dict[str, tuple[str, tuple[str, ...]]] = {
    # How samples lie in rows, and what is frozen.
    "all of it": ("none", ()),
    "packed, a frozen tower": ("documents", ("vision",)),
    "the projector alone": ("none", ("vision", "language")),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_is_the_same_on_every_layout(layout: str, kind: str, folder: Path) -> None:
    packing, frozen = RUNS[kind]
    losses, metrics, texts = alone(folder, packing, frozen)
    assert len(set(losses)) == STEPS and {"val_loss", "test_loss", "train_loss"} <= metrics.keys()
    ranks = run_on_ranks(LAYOUTS[layout].world, run, LAYOUTS[layout], folder, packing, frozen, init=False)
    for rank, found in enumerate(ranks):
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == pytest.approx(metrics, abs=1e-5)
        assert found[2] == share_of(texts, LAYOUTS[layout], rank) != []


def test_frozen_parts_stay_what_they_were_and_others_do_not(folder: Path) -> None:
    torch.manual_seed(7)
    module = llava(frozen=["vision", "language"])
    module.configure_model()
    assert module.model is not None
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    make_trainer(PLAIN, max_steps=STEPS, max_epochs=-1, limit_val_batches=0).fit(module, datamodule=data(folder))
    moved = {name.split(".")[0] for name, p in module.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"projector"}


def test_a_batch_has_the_images_of_its_rows(folder: Path) -> None:
    module = data(folder, packing="documents")
    module.setup("fit")
    assert module._training is not None
    for made in (data(folder), module):
        made.setup("fit")
        rows = made._training
        assert rows is not None
        samples = [rows.dataset[i] for i in range(rows.count)]
        batch: Any = made._collate(samples[:4])
        assert batch["tokens"].shape[1] % 8 == 0
        assert list(batch["images"].counts) == [len(sample["images"]) for sample in samples[:4]]
        for row, count in zip(batch["tokens"], batch["images"].counts, strict=True):
            assert (row == CONFIG.image_token).sum() == count * CONFIG.features_per_image
        assert torch.equal(batch["images"].values, torch.cat([sample["images"] for sample in samples[:4]]))
    assert batch["segments"].max() > 0


def test_answers_are_printed_with_one_word_for_an_image(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(7)
    trainer = make_trainer(PLAIN, callbacks=[PrintText()])
    trainer.predict(llava(), datamodule=asking(folder, template="vicuna", sequence_length=300))
    out = capsys.readouterr().out
    assert "USER: <image>\nwhat? ASSISTANT:" in out and "USER: say more ASSISTANT:" in out
    assert "USER: <image> or <image>? ASSISTANT:" in out


def test_a_checkpoint_is_resumed_on_another_layout_and_converted_both_ways(folder: Path, tmp_path: Path) -> None:
    run_on_ranks(2, _saved, LAYOUTS["tp=2 sp"], folder, tmp_path, init=False)
    [full] = run_on_ranks(1, _saved, PLAIN, folder, tmp_path / "alone", init=False)
    for layout in ("pp=2", "dp=2"):
        for losses in run_on_ranks(2, _resumed, LAYOUTS[layout], folder, tmp_path, init=False):
            assert losses == pytest.approx(full[2:], abs=1e-5)
    source = tmp_path / "step=4.ckpt"
    module = load_from_checkpoint(LlavaModule, source, mesh=Mesh.single())
    assert module.config == CONFIG and module.frozen == ["vision"]
    # Nothing of the tower is trained again.
    assert module.model is not None and not module.model.get_parameter("vision.embedding.patches").requires_grad
    assert main(["convert", str(source), str(tmp_path / "theirs")]) == 0
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["model_type"] == "llava"
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "again.ckpt")]) == 0
    again = hf.from_pretrained(tmp_path / "theirs", Mesh.single())
    weights = dict(module.model.named_parameters())
    assert all(torch.equal(p, weights[name]) for name, p in again.named_parameters())
    fits = load_from_checkpoint(
        LlavaModule, tmp_path / "again.ckpt", mesh=Mesh.single(), config=asdict(CONFIG), strict=True
    )
    assert fits.model is not None
    assert all(torch.equal(p, weights[name]) for name, p in fits.model.named_parameters())


def _trainer(layout: Layout, losses: L.Callback, target: Path) -> L.Trainer:
    saving = ModelCheckpoint(dirpath=target, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"max_steps": 4, "max_epochs": -1, "limit_val_batches": 0}
    return make_trainer(layout, callbacks=[losses, saving], enable_checkpointing=True, **options)


def _saved(layout: Layout, folder: Path, target: Path) -> list[float]:
    torch.manual_seed(7)
    losses = Losses()
    _trainer(layout, losses, target).fit(llava(frozen=["vision"]), datamodule=data(folder))
    return losses.losses


def _resumed(layout: Layout, folder: Path, source: Path) -> list[float]:
    torch.manual_seed(8)
    losses = Losses()
    path = str(source / "step=2.ckpt")
    _trainer(layout, losses, source).fit(llava(frozen=["vision"]), datamodule=data(folder), ckpt_path=path)
    return losses.losses


def test_a_step_costs_what_its_products_cost_and_less_where_parts_are_frozen(folder: Path) -> None:
    module = data(folder)
    module.setup("fit")
    assert module._training is not None
    batch: Any = module._collate([module._training.dataset[i] for i in range(4)])
    rows, length = batch["tokens"].shape
    num_images = sum(batch["images"].counts)
    found = llava().batch_flops(batch)
    assert found == training_flops(CONFIG, lengths={length: rows}, num_images=num_images)
    assert llava().batch_tokens(batch) == rows * length
    # By hand: linears twice their weights a token, thrice; the tower's last layer is left out, pixels get no gradient.
    vision, wide = CONFIG.vision, CONFIG.hidden_size
    tower = 2 * 5 * (4 * 24 * 24 + 2 * 24 * 96) + 2 * 2 * 25 * 24
    by_hand = 3 * num_images * (tower + 2 * 5 * wide * (24 + wide)) + 2 * num_images * 2 * 4 * (3 * 16) * 24
    language = 2 * (4 * wide * wide + 3 * wide * CONFIG.ffn_hidden_size) + wide * VOCABULARY
    by_hand += 3 * rows * (length * 2 * language + 2 * 2 * length * length * wide)
    assert vision.ffn_hidden_size == 96 and found == by_hand
    frozen = [llava(frozen=names).batch_flops(batch) for names in (["vision"], ["vision", "language"], ["language"])]
    assert frozen[1] < frozen[0] < found and frozen[1] < frozen[2] < found
    mlp = RecomputeConfig(granularity="selective", parts=("mlp",))
    again, again_without_tower = (llava(frozen=f).batch_recomputed_flops(batch, mlp, Sizes()) for f in ([], ["vision"]))
    assert again_without_tower == rows * length * 2 * 2 * 3 * wide * CONFIG.ffn_hidden_size
    assert again - again_without_tower == num_images * 2 * 5 * 2 * 24 * 96
    # The first two layers of the stage are the tower's, which is none's to run again where it is frozen, and one more.
    first = RecomputeConfig(granularity="full", method="block", num_layers=2)
    again, again_without_tower = (
        llava(frozen=f).batch_recomputed_flops(batch, first, Sizes()) for f in ([], ["vision"])
    )
    layer = length * 2 * (4 * wide * wide + 3 * wide * CONFIG.ffn_hidden_size) + 2 * length * length * wide
    assert again_without_tower == rows * layer and again - again_without_tower == num_images * tower
    # Of a frozen language model the weights' gradients are not made, and those of what goes in are.
    assert frozen[0] - frozen[1] == rows * length * 2 * language


def test_faults_are_reported_at_once(folder: Path) -> None:
    wrong = data(
        folder,
        image_folder="nowhere",
        sequence_length=4,
        packing="tight",
        template="tokenizer",
        unreadable_images="ask",
        prompts=["one"],
        prompt_images=[[], []],
    )
    shown = "\n".join(wrong.faults())
    for fault in (
        "image_folder ('nowhere') is no directory",
        "sequence_length (4) must be above the 4 tokens that an image takes",
        "packing ('tight') must be one of 'none', 'documents'",
        "unreadable_images ('ask') must be one of 'skip', 'refuse'",
        "template is 'tokenizer', and no tokenizer is given",
        "prompt_images (2) must have the images of each of the 1 prompts",
    ):
        assert fault in shown
    with pytest.raises(ConfigurationError, match=r"image_token \(7\) must be the id of <image> .*: 1; set"):
        data(folder, image_token=7).setup("fit")
    with pytest.raises(ConfigurationError, match=r"frozen \('tower'\) must be of 'vision', 'projector', 'language'"):
        llava(frozen=["tower"])
    with pytest.raises(ConfigurationError, match="nothing is left to train"):
        llava(frozen=["language", "vision", "projector"])
    with pytest.raises(ConfigurationError, match="names a whole LLaVA"):
        llava(path="a", vision="b")
    asked = data(folder, prompts=["<image> and <image>"], prompt_images=[[str(folder / "0-0.png")]])
    with pytest.raises(ConfigurationError, match="has 2 <image>, and 1 prompt_images"):
        asked.setup("predict")
    absent = data(folder, prompts=["what?"], prompt_images=[["absent.png"]])
    with pytest.raises(ConfigurationError, match=r"image 'absent.png' cannot be read"):
        absent.setup("predict")


def test_rows_with_unreadable_images_are_reported_and_left_out_of_every_rank(folder: Path, tmp_path: Path) -> None:
    own = folder_with_rows(tmp_path)
    (own / "2-1.png").unlink()
    with pytest.raises(ConfigurationError, match=r"images of 1 rows cannot be read: row 2, 2-1.png"):
        data(own, validation_fraction=0.0).setup("fit")
    skipping = data(own, validation_fraction=0.0, unreadable_images="skip")
    skipping.setup("fit")
    assert skipping._training is not None and skipping._training.count == 5
    assert "1 were left out, because an image of theirs cannot be read: row 2, 2-1.png" in skipping._training.summary
    counts = run_on_ranks(2, _counted, LAYOUTS["tp=2 sp"], own, init=False)
    assert counts[0] == counts[1] and counts[0]


def _counted(layout: Layout, folder: Path) -> list[Tensor]:
    losses = Losses()
    rows = data(folder, validation_fraction=0.0, unreadable_images="skip")
    options: dict[str, Any] = {"max_steps": 2, "max_epochs": -1, "limit_val_batches": 0}
    make_trainer(layout, callbacks=[losses], **options).fit(llava(), datamodule=rows)
    return [torch.tensor(loss) for loss in losses.losses]


def test_images_of_another_table_lie_next_to_it(folder: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    (held_out / "rows.jsonl").write_text((folder / "rows.jsonl").read_text())
    for image in folder.glob("*.png"):
        with Image.open(image) as picture:
            ImageOps.invert(picture.convert("RGB")).save(held_out / image.name)
    module = data(folder, validation_path=str(held_out / "rows.jsonl"), cache_directory=str(tmp_path / "cache"))
    module.setup("fit")
    assert module._training is not None and module._held_out is not None
    assert module._training.count == module._held_out.count
    trained, held = (
        next(sample["images"] for i in range(part.count) if len((sample := part.dataset[i])["images"]))
        for part in (module._training, module._held_out)
    )
    assert trained.shape == held.shape and (trained - held).abs().max() > 0.5


def test_images_that_lie_in_a_data_set_need_no_folder(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    held = [{**row, "images": [{"bytes": (folder / n).read_bytes(), "path": n} for n in row["images"]]} for row in rows]
    for name, images in (("held", held), ("named", rows)):
        datasets.Dataset.from_list(images).save_to_disk(str(tmp_path / name))
    options = {"path": None, "validation_fraction": 0.0}
    module = data(folder, dataset=str(tmp_path / "held"), **options)
    wanted = data(folder, validation_fraction=0.0)
    for one in (module, wanted):
        one.setup("fit")
    assert module._training is not None and wanted._training is not None
    for i in range(wanted._training.count):
        assert torch.equal(module._training.dataset[i]["images"], wanted._training.dataset[i]["images"])
    with pytest.raises(ConfigurationError, match="the dataset does not say where they lie; give image_folder"):
        data(folder, dataset=str(tmp_path / "named"), **options).setup("fit")
    faults = data(folder, validation_path="nowhere.jsonl").faults()
    assert [fault for fault in faults if "nowhere.jsonl" in fault and fault.startswith("validation_path: ")] == faults
