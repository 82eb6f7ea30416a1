"""A model of transformers, fine-tuned in full or by LoRA adapters on every layout, and given back."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ConfigurationError, Fp8Config, MegatronStrategy, hf, load_from_checkpoint
from lightning_megatron.lightning_modules import AdamWConfig, GPTModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import FinetuneModule
from lightning_megatron.models import LlavaModel
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.transformer.lora import LoraConfig
from tests.data.chats import HEADERS, write_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.losses import Losses
from tests.lightning_modules.pretrained import write_chats, write_model
from tests.lightning_modules.test_chat_data import data
from tests.models.small_llava import LLAVA
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

LORA = LoraConfig(rank=4, dropout=0.1)
PATHS = {"whole": None, "lora": LORA}
LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2, optimizer=OptimizerConfig(kind="distributed")),
}


# Half of the dense features, 48.
UPCYCLE = MoEConfig(router=RouterConfig(num_experts=4, aux_losses=(AuxLoss(),)), ffn_hidden_size=24)
EXPERT_LAYOUT = Layout(world=2, ep=2, optimizer=OptimizerConfig(kind="distributed"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("finetune")
    write_model(path / "tokenizer")
    write_chats(path / "chats.jsonl", copies=8)
    data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


def tune(
    layout: Layout,
    folder: Path,
    lora: LoraConfig | None,
    export: str | None,
    ckpt_path: str | None = None,
    upcycle: MoEConfig | None = None,
) -> list[float]:
    """The losses of four steps; a checkpoint after the second, and the model exported at the end."""
    torch.manual_seed(7)
    losses = Losses()
    saved = folder / f"saved-{export}" if ckpt_path is None else Path(ckpt_path).parent
    saver = ModelCheckpoint(saved, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        layout,
        callbacks=[losses, saver, ExportPretrained(None if export is None else str(folder / export))],
        max_steps=4,
        max_epochs=-1,
        limit_val_batches=0,
        enable_checkpointing=True,
    )
    module = FinetuneModule(str(folder / "tokenizer"), lora, AdamWConfig(lr=1e-2, total_steps=4), upcycle=upcycle)
    # Packed, batches say what is padding, which routers must leave out.
    chats = data(folder, packing="none" if upcycle is None else "documents")
    trainer.fit(module, datamodule=chats, ckpt_path=ckpt_path)
    assert module.model is not None
    assert any(".lora." in name for name, _ in module.named_parameters()) == (lora is not None)
    return losses.losses


def exported(folder: Path, name: str) -> dict[str, Tensor]:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / name), dtype=torch.float64)
    return {key: value.detach() for key, value in model.named_parameters()}


@functools.cache
def on_one_device(folder: Path, kind: str) -> list[float]:
    """The losses of a run that exports `<kind> one`."""
    [losses] = run_on_ranks(1, tune, PLAIN, folder, PATHS[kind], f"{kind} one", init=False)
    return list(losses)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_what_comes_out_is_that_of_one_device(folder: Path, name: str, kind: str) -> None:
    lora, layout, wanted = PATHS[kind], LAYOUTS[name], on_one_device(folder, kind)
    assert wanted[-1] < wanted[0] - 0.05
    first, one = exported(folder, "tokenizer"), exported(folder, f"{kind} one")
    moved = {name for name in one if not torch.equal(one[name], first[name])}
    frozen = {name for name in one if "_proj" not in name} if lora else set()
    assert moved == one.keys() - frozen
    assert (folder / f"{kind} one" / "tokenizer.json").is_file()
    for losses in run_on_ranks(layout.world, tune, layout, folder, lora, f"{kind} {name}", init=False):
        assert losses == pytest.approx(wanted, abs=1e-9)
    found = exported(folder, f"{kind} {name}")
    assert max(float((found[key] - one[key]).abs().max()) for key in one) < 1e-9


def test_experts_made_of_a_dense_model_are_trained_and_exported_as_on_one_device(folder: Path) -> None:
    [wanted] = run_on_ranks(1, tune, Layout(), folder, None, "experts one", None, UPCYCLE, init=False)
    assert wanted[-1] < wanted[0] - 0.05
    one = exported(folder, "experts one")
    up = one["model.layers.0.mlp.experts.gate_up_proj"]
    assert up.shape == (4, 48, 32) and not torch.equal(up[0], up[2])
    for losses in run_on_ranks(2, tune, EXPERT_LAYOUT, folder, None, "experts two", None, UPCYCLE, init=False):
        assert losses == pytest.approx(wanted, abs=1e-9)
    found = exported(folder, "experts two")
    assert max(float((found[key] - one[key]).abs().max()) for key in one) < 1e-9
    # What was kept of it says what it is.
    module = load_from_checkpoint(FinetuneModule, folder / "saved-experts one" / "step=4.ckpt")
    assert module.upcycle == UPCYCLE and module.config.moe == UPCYCLE


def test_what_upcycling_cannot_go_with_is_reported_before_training(folder: Path) -> None:
    path = str(folder / "tokenizer")
    with pytest.raises(ValueError, match="lora and upcycle do not go together"):
        FinetuneModule(path, LORA, upcycle=UPCYCLE)
    moe = MoEConfig(router=RouterConfig(num_experts=4, score_function="sigmoid"), layers=(1,))
    trainer = make_trainer(Layout(), callbacks=[ExportPretrained(str(folder / "nowhere"))])
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(FinetuneModule(path, upcycle=moe), datamodule=data(folder))
    shown = "mixtral: moe score_function ('sigmoid') must be 'softmax'; layers 0 must have experts, as all others"
    assert shown in str(raised.value)


def test_paths_are_resumed_on_another_layout(folder: Path) -> None:
    [wanted] = run_on_ranks(1, tune, Layout(), folder, LORA, "begun", init=False)
    saved = str(folder / "saved-begun" / "step=2.ckpt")
    for layout in LAYOUTS.values():
        for losses in run_on_ranks(layout.world, tune, layout, folder, LORA, None, saved, init=False):
            assert losses == pytest.approx(wanted[2:], abs=1e-9)


def test_a_tokenizer_that_outgrows_the_model_is_a_fault(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "larger", HEADERS, vocab_size=300, bos_token="<s>")
    engine = tmp_path / "larger" / "tokenizer.json"
    engine.write_text(engine.read_text().replace('"id": 3,', '"id": 999,').replace('"<s>": 3,', '"<s>": 999,'))
    module = FinetuneModule(str(folder / "tokenizer"))
    with pytest.raises(ConfigurationError, match=r"ids up to 999, and the model .* has a vocabulary of 304"):
        make_trainer(PLAIN).fit(module, datamodule=data(folder, tokenizer=str(tmp_path / "larger")))


def test_transformer_engine_with_paths_is_a_fault(folder: Path) -> None:
    module = FinetuneModule(str(folder / "tokenizer"), LORA)
    strategy = MegatronStrategy(fp8=Fp8Config(engine="transformer_engine"))
    module.trainer = make_trainer(Layout(), strategy=strategy, precision="bf16-mixed")
    with pytest.raises(ConfigurationError, match="lora and Transformer Engine do not go together"):
        module.setup("fit")


def test_what_cannot_be_exported_is_reported_before_training(folder: Path) -> None:
    taken = str(folder / "tokenizer")
    trainer = make_trainer(PLAIN, callbacks=[ExportPretrained(taken)])
    module = GPTModule(FinetuneModule(taken).config)
    with pytest.raises(ConfigurationError) as raised:
        trainer.fit(module, datamodule=data(folder))
    assert "writes a CausalModule, a FinetuneModule or a T5FinetuneModule, and this is a GPTModule" in str(raised.value)
    assert f"export path ({taken}) exists" in str(raised.value)
    with pytest.raises(ConfigurationError, match="export path: memory://out is an address"):
        make_trainer(PLAIN, callbacks=[ExportPretrained("memory://out")]).fit(module, datamodule=data(folder))
    assert module.model is None


def test_an_export_path_that_exists_is_reported_with_other_faults_before_a_process_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("subprocess.Popen", starts)
    taken = str(folder / "tokenizer")
    trainer = make_trainer(Layout(world=2), callbacks=[ExportPretrained(taken)])
    with pytest.raises(ConfigurationError, match=r"has 2 faults") as raised:
        trainer.fit(FinetuneModule(taken), datamodule=data(folder, sequence_length=0))
    assert f"export path ({taken}) exists" in str(raised.value)
    # Another kind of run writes nothing.
    with pytest.raises(ConfigurationError, match="sequence_length") as raised:
        trainer.validate(FinetuneModule(taken), datamodule=data(folder, sequence_length=0))
    assert "export" not in str(raised.value)


def test_padding_that_routers_would_count_is_refused_and_that_of_dense_models_is_not(folder: Path) -> None:
    def shown(upcycle: MoEConfig | None, packing: str) -> str:
        trainer = make_trainer(Layout(), max_steps=1, max_epochs=-1, limit_val_batches=0)
        module = FinetuneModule(str(folder / "tokenizer"), None, AdamWConfig(total_steps=1), upcycle=upcycle)
        try:
            trainer.fit(module, datamodule=data(folder, packing=packing))
        except ConfigurationError as error:
            return str(error)
        return ""

    assert "routers of experts would count the padding" in shown(UPCYCLE, "none")
    assert not shown(None, "none") and not shown(UPCYCLE, "documents")


def test_a_model_that_sees_is_neither_fine_tuned_on_text_nor_upcycled(tmp_path: Path) -> None:
    hf.save_pretrained(LlavaModel(LLAVA, seed=1), tmp_path / "a")
    with pytest.raises(ValueError, match=r"text alone, .* has a LlavaConfig; a LLaVA trains on by LlavaModule"):
        FinetuneModule(str(tmp_path / "a"))
    with pytest.raises(ValueError, match="this one has a LlavaConfig"):
        hf.config_from_pretrained(tmp_path / "a", upcycle=MoEConfig(router=RouterConfig(num_experts=2)))
