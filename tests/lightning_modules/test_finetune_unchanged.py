"""Models of transformers as they are, fine-tuned on chats in full or by LoRA adapters, asked, and given back."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import ConfigurationError
from lightning_megatron.lightning_modules import AdamWConfig, CausalModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import FinetuneModule, finetune_module
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.testing.islands import LiftedIslands
from lightning_megatron.transformer.lora import LoraConfig
from tests.data.chats import HEADERS, write_tokenizer
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules import corpus
from tests.lightning_modules.losses import Losses
from tests.lightning_modules.pretrained import SIZES, write_chats, write_model
from tests.lightning_modules.test_chat_data import data
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)
transformers = pytest.importorskip("transformers")

CONFIGS = {
    # Tied embeddings, soft caps and windows.
    "vaultgemma": transformers.VaultGemmaConfig(**SIZES, head_dim=8, sliding_window=8),
    "olmoe": transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
}
LORA = LoraConfig(rank=4, scaling="root_of_rank")
ONE = Layout(is_plain=True)
LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2, optimizer=OptimizerConfig(kind="distributed")),
    "dp=2 zero3": Layout(world=2, optimizer=OptimizerConfig(kind="distributed_parameters", gather_for_hooks=False)),
    "ep=2": Layout(world=2, ep=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("unchanged")
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(path / name))
        write_tokenizer(path / name, HEADERS)
    write_tokenizer(path / "tokenizer", HEADERS)
    write_chats(path / "chats.jsonl", copies=8)
    data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


def lifted(step: Callable[..., Any]) -> Callable[..., Any]:
    def in_float64(*args: Any, **kwargs: Any) -> Any:
        with LiftedIslands():
            return step(*args, **kwargs)

    return in_float64


def tune(layout: Layout, folder: Path, name: str, lora: LoraConfig | None, export: str) -> tuple[list[float], Any]:
    """The losses of four steps, and the answers of what was trained, which is exported."""
    torch.manual_seed(7)
    losses = Losses()
    trainer = make_trainer(
        layout,
        callbacks=[losses, ExportPretrained(str(folder / export))],
        max_steps=4,
        max_epochs=-1,
        limit_val_batches=0,
    )
    generation = GenerationConfig(max_new_tokens=5, temperature=0.7)
    module = finetune_module(str(folder / name), lora, AdamWConfig(lr=1e-2, total_steps=4), generation)
    assert isinstance(module, CausalModule)
    chats = data(folder, prompts=["Who is there?", "What?", "Where is the cat?", "Two and two?"])
    for name in ("training_step", "predict_step"):
        setattr(module, name, lifted(getattr(module, name)))
    trainer.fit(module, datamodule=chats)
    texts = [text.tolist() for batch in trainer.predict(module, datamodule=chats) for text in batch]
    return losses.losses, texts


@functools.cache
def on_one_device(folder: Path, name: str, has_lora: bool) -> Any:
    [found] = run_on_ranks(1, tune, ONE, folder, name, LORA if has_lora else None, f"{name} {has_lora} one", init=False)
    return found


def exported(folder: Path, name: str) -> dict[str, Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / name), dtype=torch.float64)
    return {key: value.detach() for key, value in model.named_parameters()}


CASES = [("vaultgemma", True, "tp=2 sp"), ("vaultgemma", True, "pp=2"), ("vaultgemma", False, "dp=2")]
CASES += [("olmoe", True, "tp=2 sp"), ("olmoe", False, "ep=2")]


@pytest.mark.parametrize(("name", "has_lora", "layout"), CASES)
def test_losses_texts_and_what_is_exported_are_those_of_one_device(
    folder: Path, name: str, has_lora: bool, layout: str
) -> None:
    wanted, texts = on_one_device(folder, name, has_lora)
    assert wanted[-1] < wanted[0] - 0.05
    first, one = exported(folder, name), exported(folder, f"{name} {has_lora} one")
    moved = {key for key in one if not torch.equal(one[key], first[key])}
    linears = {key for key in one if "_proj" in key and "experts" not in key}
    assert one.keys() == first.keys() and moved == (linears if has_lora else one.keys())
    given = f"{name} {has_lora} {layout}"
    ran = run_on_ranks(2, tune, LAYOUTS[layout], folder, name, LORA if has_lora else None, given, init=False)
    for losses, _ in ran:
        assert losses == pytest.approx(wanted, abs=1e-9)
    of_ranks = [text for _, found in (ran if "dp" in layout or "ep" in layout else ran[:1]) for text in found]
    assert len({tuple(text) for text in texts}) == 4
    assert sorted(of_ranks) == sorted(texts)
    found = exported(folder, given)
    assert max(float((found[key] - one[key]).abs().max()) for key in one) < 1e-9


def losses_of_packed(layout: Layout, folder: Path, name: str) -> list[float]:
    """The losses of four steps on rows of several conversations."""
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], max_steps=4, max_epochs=-1, limit_val_batches=1)
    module = finetune_module(str(folder / name), optimizer=AdamWConfig(lr=1e-2, total_steps=4))
    for step in ("training_step", "validation_step", "on_train_start", "on_validation_start"):
        setattr(module, step, lifted(getattr(module, step)))
    trainer.fit(module, datamodule=data(folder, packing="documents"))
    return losses.losses


@pytest.mark.parametrize("layout", ["tp=2 sp", "pp=2", "dp=2 zero3"])
def test_packed_conversations_train_as_on_one_device(folder: Path, layout: str) -> None:
    [wanted] = run_on_ranks(1, losses_of_packed, ONE, folder, "vaultgemma", init=False)
    assert wanted[-1] < wanted[0] - 0.05
    for found in run_on_ranks(2, losses_of_packed, LAYOUTS[layout], folder, "vaultgemma", init=False):
        assert found == pytest.approx(wanted, abs=1e-9)


def test_a_model_that_mixes_documents_of_a_row_is_refused(folder: Path) -> None:
    configs = {
        "opt": transformers.OPTConfig(
            vocab_size=304,
            hidden_size=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=16,
        ),
        "bloom": transformers.BloomConfig(vocab_size=304, hidden_size=16, n_layer=1, n_head=2),
    }
    words = {"opt": "does not keep documents of a row apart", "bloom": "BloomForCausalLM takes no position_ids"}
    for name, config in configs.items():
        config.save_pretrained(str(folder / name))
        write_tokenizer(folder / name, HEADERS)
        module = CausalModule(str(folder / name), from_scratch=True)
        trainer = make_trainer(Layout(), max_steps=1, limit_val_batches=0)
        with pytest.raises(ConfigurationError, match=rf"{words[name]}.*for conversations data\.packing='none'"):
            trainer.fit(module, datamodule=data(folder, packing="documents"))


@pytest.mark.parametrize("kind", ["tokenizer", "vaultgemma"])
def test_an_answer_ends_where_the_model_s_folder_says(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "tokenizer":
        write_model(tmp_path / kind)
    else:
        shutil.copytree(folder / kind, tmp_path / kind)
    chats = data(folder, prompts=["Who is there?"])

    def answered(ends: list[int], **options: Any) -> list[int]:
        (tmp_path / kind / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
        generation = GenerationConfig(max_new_tokens=6, temperature=2.0, **options)
        module = finetune_module(str(tmp_path / kind), generation=generation)
        assert isinstance(module, CausalModule) == (kind == "vaultgemma")
        [[text]] = make_trainer(PLAIN).predict(module, datamodule=chats)
        return list(text.tolist())

    whole = answered([])
    assert len(set(whole[-4:])) == 4
    assert answered([299, whole[-4]]) == whole[:-3]
    assert answered([299, whole[-4]], stops_at_end_of_text=False) == whole


def test_a_family_of_this_package_runs_its_layers(folder: Path) -> None:
    write_model(folder / "llama")
    assert isinstance(finetune_module(str(folder / "llama")), FinetuneModule)


def test_what_cannot_be_fine_tuned_is_told(folder: Path) -> None:
    path = str(folder / "vaultgemma")
    with pytest.raises(ValueError, match=r"attention\.qkv.* are names of this package's own layers"):
        finetune_module(path, LoraConfig(targets=("attention.qkv",)))
    with pytest.raises(ValueError, match="vaultgemma"):
        finetune_module(path, upcycle=MoEConfig(router=RouterConfig(num_experts=2)))
    with pytest.raises(ValueError, match="lora freezes the model's weights, and from_scratch draws them anew"):
        CausalModule(path, from_scratch=True, lora=LORA)
    transformers.BartConfig(d_model=16).save_pretrained(str(folder / "bart"))
    with pytest.raises(ValueError, match=r"\(bart\) has an encoder and a decoder"):
        finetune_module(str(folder / "bart"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    for is_decoder in (False, True):
        transformers.RobertaConfig(**sizes, is_decoder=is_decoder).save_pretrained(
            str(folder / f"roberta {is_decoder}")
        )
    with pytest.raises(ValueError, match=r"\(roberta\) lets a token see those behind it, .* set is_decoder to true"):
        finetune_module(str(folder / "roberta False"))
    assert isinstance(finetune_module(str(folder / "roberta True")), CausalModule)
    module = finetune_module(path, LoraConfig(targets=("nothing",)))
    with pytest.raises(ConfigurationError, match="nothing"):
        module.configure_model()


SEEING: dict[str, Any] = {
    "xlm": transformers.XLMConfig(n_words=304, emb_dim=32, n_layers=2, n_heads=4),
    "xlnet": transformers.XLNetConfig(vocab_size=304, d_model=32, n_layer=2, n_head=4, d_inner=48),
    "bert-generation": transformers.BertGenerationConfig(**SIZES),
}
"""Types whose tokens see later ones, which their configurations do not tell."""


def refusal(layout: Layout, folder: Path, name: str) -> str:
    """What a fit says to the model in a folder; it leaves random numbers as they are."""
    module = CausalModule(str(folder / name), from_scratch=name in SEEING)
    before = []

    def look(start: Callable[[], None] = module.on_train_start) -> None:
        before.append((torch.get_rng_state(), [one.clone() for one in module.buffers()]))
        start()
        state, buffers = before[0]
        assert torch.equal(torch.get_rng_state(), state) and all(one.training for one in module.modules())
        assert all(torch.equal(*both) for both in zip(module.buffers(), buffers, strict=True))

    module.on_train_start = look  # type: ignore[method-assign]
    try:
        make_trainer(layout, max_steps=1, limit_val_batches=0).fit(module, datamodule=data(folder))
    except ConfigurationError as error:
        return str(error)
    assert before
    return ""


LOOKS = [(name, "one") for name in SEEING] + [("bert-generation", "tp=2 sp"), ("bert-generation", "pp=2")]
LOOKS += [("vaultgemma", "pp=2"), ("bert-generation", "cp=2"), ("vaultgemma", "tp=2 sp"), ("olmoe", "ep=2")]
LOOKS += [("bert-generation", "dp=2 zero3")]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "layout"), LOOKS)
def test_a_model_whose_tokens_see_later_ones_is_refused_before_the_first_step(
    folder: Path, name: str, layout: str
) -> None:
    if name in SEEING:
        SEEING[name].save_pretrained(str(folder / name))
    found = {"one": ONE, "cp=2": Layout(world=2, cp=2), **LAYOUTS}[layout]
    for said in run_on_ranks(found.world, refusal, found, folder, name, init=False):
        assert bool(said) == (name in SEEING)
        assert not said or f"({name}) lets a token see those behind it" in said


def test_rows_longer_than_a_table_of_positions_are_refused_before_the_first_step(folder: Path) -> None:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 63}
    transformers.GPT2Config(vocab_size=304, **sizes).save_pretrained(str(folder / "gpt2"))

    def fit(text: Any) -> None:
        module = CausalModule(str(folder / "gpt2"), from_scratch=True)
        make_trainer(Layout(), max_epochs=1, limit_train_batches=2, limit_val_batches=1).fit(module, datamodule=text)

    with pytest.raises(
        ConfigurationError, match=r"data\.sequence_length \(64 tokens\) are longer than the 63 positions"
    ):
        fit(corpus.data(folder, sequence_length=64))
    # Of conversations that is the most, and these are shorter.
    fit(data(folder))


def test_padding_that_an_auxiliary_loss_would_count_is_refused(folder: Path) -> None:
    module = finetune_module(str(folder / "olmoe"))
    assert isinstance(module, CausalModule)
    module.config.output_router_logits = True
    with pytest.raises(ConfigurationError, match="auxiliary loss would count the padding"):
        make_trainer(Layout()).fit(module, datamodule=data(folder))
