"""A module for models of transformers as they are: its labels are the data's, and what does not fit is refused."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BartConfig, BloomConfig, MambaConfig, OPTConfig

from lightning_megatron.data.collate import collate_padded
from lightning_megatron.data.packed_rows import join_samples
from lightning_megatron.hf.unchanged import deviation_by_other_documents, document_positions
from lightning_megatron.lightning_modules import AdamWConfig, CausalModule
from lightning_megatron.models.sampling import GenerationConfig
from lightning_megatron.testing.islands import LiftedIslands
from lightning_megatron.trainer import ConfigurationError
from tests.any_module.model_families import config_of
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.pretrained import write_model
from tests.lightning_modules.test_finetune_unchanged import lifted
from tests.trainer.layouts import QUIET, Layout, make_trainer


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CausalModule:
    folder = write_model(tmp_path_factory.mktemp("causal") / "tiny")
    found = CausalModule(str(folder))
    found.configure_model()
    return found


SMALL: dict[str, Any] = {
    "bart": BartConfig(
        vocab_size=304,
        d_model=16,
        max_position_embeddings=32,
        decoder_layers=1,
        decoder_ffn_dim=16,
        decoder_attention_heads=2,
        dropout=0.0,
    ),
    "bloom": BloomConfig(vocab_size=304, hidden_size=16, n_layer=1, n_head=2),
    "mamba": MambaConfig(vocab_size=304, hidden_size=16, state_size=4, num_hidden_layers=1),
}


# Bart's does not shift its labels. Before transformers 5.17 Bloom's and Mamba's shift those that are shifted already.
@pytest.mark.parametrize("kind", ["llama", *SMALL])
def test_the_loss_is_of_all_labels_that_count_up_to_a_row_s_last(
    module: CausalModule, kind: str, tmp_path: Path
) -> None:
    if kind in SMALL:
        SMALL[kind].save_pretrained(tmp_path)
        module = CausalModule(str(tmp_path), from_scratch=True)
        module.configure_model()
    tokens, labels = torch.randint(0, 300, (2, 3, 8), generator=torch.Generator().manual_seed(0)).unbind()
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 2:5] = False
    loss, num_valid = module._loss({"tokens": tokens, "labels": labels, "loss_mask": mask})
    wanted = functional.cross_entropy(module.model(input_ids=tokens).logits[mask], labels[mask])
    assert int(num_valid) == 21 and torch.allclose(loss, wanted, rtol=1e-5)


def sample(num_tokens: int, seed: int, *, has_labels: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, 300, (num_tokens + 1,), generator=torch.Generator().manual_seed(seed))
    return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": torch.full((num_tokens,), int(has_labels))}


LONG, SHORT, UNLABELLED = sample(16, 1), sample(8, 2), sample(8, 3, has_labels=False)


def logged(layout: Layout, path: str) -> tuple[float, float]:
    """The loss of a step on a long and a short row, of which each rank pads its own to a multiple of 8 tokens; and that
    of a validation by batches of a row, of which one has no label."""
    collate = functools.partial(collate_padded, padding={"tokens": 0, "labels": -100, "loss_mask": 0}, multiple=8)
    rows: list[Any] = [LONG, SHORT], [LONG, UNLABELLED]
    sizes = 2 // layout.world, 1
    loaders = [DataLoader(one, batch_size=size, collate_fn=collate) for one, size in zip(rows, sizes, strict=True)]
    trainer = make_trainer(layout, max_epochs=1, use_distributed_sampler=True)
    module = CausalModule(path, optimizer=AdamWConfig(lr=0.0))
    for name in ("training_step", "validation_step"):
        setattr(module, name, lifted(getattr(module, name)))
    trainer.fit(module, *loaders)
    return float(trainer.callback_metrics["train_loss"]), float(trainer.callback_metrics["val_loss"])


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(
    "layout", [Layout(is_plain=True), Layout(world=2), Layout(microbatches=2)], ids=["one", "dp2", "two microbatches"]
)
def test_every_label_counts_once_whatever_its_rank_pads_and_a_batch_of_none_counts_nothing(
    module: CausalModule, layout: Layout
) -> None:
    model = copy.deepcopy(module.model).double()
    with LiftedIslands(), torch.no_grad():
        long, short = (
            functional.cross_entropy(model(input_ids=row["tokens"][None]).logits[0], row["labels"], reduction="sum")
            for row in (LONG, SHORT)
        )
    # Of 16 and 8 labels the mean is over 24, and not over 23 or 22.
    wanted = pytest.approx((float(long + short) / 24, float(long) / 16), abs=1e-9)
    for found in run_on_ranks(layout.world, logged, layout, module.path, init=False):
        assert found == wanted


def test_rows_behind_the_last_position_of_a_table_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    OPTConfig(vocab_size=304, word_embed_proj_dim=16, max_position_embeddings=16, **sizes).save_pretrained(tmp_path)
    opt = CausalModule(str(tmp_path), from_scratch=True)
    opt.configure_model()

    def batch(num_tokens: int) -> dict[str, Tensor]:
        return {name: one[None] for name, one in sample(num_tokens, 1).items()}

    assert opt._loss(batch(16))[0].isfinite()
    with pytest.raises(ConfigurationError, match=r"rows of a batch \(17 tokens\) are longer than the 16 positions"):
        opt._loss(batch(17))
    numbers = torch.arange(1)
    [text] = opt._generate(batch(12), GenerationConfig(max_new_tokens=5), numbers)
    assert len(text) == 17
    with pytest.raises(ConfigurationError, match=r"\(17 tokens\) .* give shorter prompts or fewer max_new_tokens"):
        opt._generate(batch(12), GenerationConfig(max_new_tokens=6), numbers)


def test_weights_are_the_folder_s_or_new(module: CausalModule) -> None:
    assert not module.from_scratch
    new = CausalModule(module.path, from_scratch=True)
    torch.manual_seed(1)
    new.configure_model()
    name = "model.layers.0.mlp.up_proj.weight"
    kept = CausalModule(module.path)
    kept.configure_model()
    assert torch.equal(kept.model.get_parameter(name), module.model.get_parameter(name))
    assert not torch.equal(new.model.get_parameter(name), module.model.get_parameter(name))


def test_documents_of_a_row_compute_what_they_compute_alone(module: CausalModule) -> None:
    documents = [sample(5, 1), sample(1, 2), sample(8, 3)]
    row = join_samples(documents, 16, end_of_text=0)
    assert row["segments"].tolist() == [0] * 5 + [1] + [2] * 8 + [-1] * 2
    assert document_positions(row["segments"][None]).tolist() == [[0, 1, 2, 3, 4, 0, *range(8), 0, 1]]
    packed = CausalModule(module.path)
    packed.model = copy.deepcopy(module.model).double()
    batch = {name: one[None] for name, one in row.items()}
    with LiftedIslands():
        with pytest.raises(RuntimeError, match="nobody has looked at whether the model keeps documents of a row apart"):
            packed._loss(batch)
        assert not deviation_by_other_documents(packed.model)
        packed._keeps_documents_apart = True
        loss, num_valid = packed._loss(batch)
        alone = [packed._loss({name: one[None] for name, one in document.items()}) for document in documents]
        without = packed._loss({name: one for name, one in batch.items() if name != "segments"})[0]
    wanted = sum(loss * valid for loss, valid in alone) / 14
    assert int(num_valid) == 14 and torch.allclose(loss, torch.as_tensor(wanted), rtol=1e-12)
    assert not torch.allclose(loss, without, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_mix_documents_a_little_are_told_from_those_that_do_not(dtype: torch.dtype) -> None:
    for model_type in ("jamba", "biogpt", "deepseek_v4", "lfm2_moe", "gemma2", "qwen3_moe"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(model_type)).to(dtype).eval()
        assert bool(deviation_by_other_documents(model)) == (model_type not in ("gemma2", "qwen3_moe")), model_type


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no configuration that this version of transformers reads"):
        CausalModule(str(tmp_path))
    write_model(tmp_path / "bare")
    for file in (tmp_path / "bare").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match="neither model"):
        CausalModule(str(tmp_path / "bare")).configure_model()
