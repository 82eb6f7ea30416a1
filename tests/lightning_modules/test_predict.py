"""Prediction through a Trainer: dp ranks share the prompts, and no layout or precision changes what is written."""

import functools
import io
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import Fp8Config, MegatronStrategy
from lightning_megatron.lightning_modules import GenerationConfig, GPTModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import config, data, write_texts
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

# Of different lengths, more than one batch, and not divisible by dp 2.
PROMPTS = ["the cat sat", "it ran home to eat some fish on a mat and", "", "a mat", "then it sat on the fish"]
BATCH = 4
NEW = 8
TOP_2 = MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=32)
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "rotary": {"position": "rotary", "normalization": "rmsnorm", "sliding_window": 5},
    "experts": {"moe": TOP_2},
    "experts with a capacity": {"moe": replace(TOP_2, capacity=ExpertCapacity(factor=0.75))},
}
LAYOUTS = {
    "pp2 vp2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "dp2": Layout(world=2),
    "ep2": Layout(world=2, ep=2),
    "pp2 dp2": Layout(world=4, pp=2, microbatches=2),
}
Predicted = tuple[list[list[list[int]]], str]
"""By batch the rows that a rank got, and what it printed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("predict")
    data(path).setup("fit")
    return path


def predicted(layout: Layout, folder: Path, model: str, precision: str = "64-true") -> Predicted:
    torch.manual_seed(7)
    # The longest prompt goes on beyond the positions that the model knows.
    generation = GenerationConfig(max_new_tokens=NEW, temperature=0.9, seed=3)
    module = GPTModule(config(num_layers=4, **MODELS[model]), generation=generation)
    text = data(folder, prompts=PROMPTS, global_batch_size=BATCH)
    options: dict[str, Any] = {"precision": precision}
    if precision == "fp8":
        strategy = MegatronStrategy(
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vp,
            num_microbatches=layout.microbatches,
            fp8=Fp8Config(),
        )
        options = {"precision": "bf16-mixed", "strategy": strategy}
    trainer = make_trainer(layout, callbacks=[PrintText()], **options)
    with redirect_stdout(io.StringIO()) as printed:
        batches: Any = trainer.predict(module, datamodule=text)
    lines = printed.getvalue()
    return [[row.tolist() for row in batch] for batch in batches], lines[max(0, lines.find("\n--- text")) :]


@functools.cache
def on_one_device(folder: Path, model: str) -> Predicted:
    return predicted(PLAIN, folder, model)


CASES = [
    ("dp2", "dense"),
    ("pp2 dp2", "dense"),
    ("pp2 vp2", "dense"),
    ("pp2 vp2", "rotary"),
    ("pp2 vp2", "experts with a capacity"),
    ("ep2", "experts"),
    ("ep2", "experts with a capacity"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "model"), CASES)
def test_dp_ranks_together_write_in_order_what_one_device_writes(name: str, model: str, folder: Path) -> None:
    layout, (wanted, printed) = LAYOUTS[name], on_one_device(folder, model)
    ranks = run_on_ranks(layout.world, predicted, layout, folder, model, init=False, timeout=120)
    by_dp_rank = [batches for batches, _ in ranks[: layout.dp]]
    assert [[row for rows in batch for row in rows] for batch in zip(*by_dp_rank, strict=True)] == wanted
    for rank, (batches, _) in enumerate(ranks):
        assert batches == by_dp_rank[rank % layout.dp], "stages agree"
    assert [shown for _, shown in ranks] == [printed] + [""] * (layout.world - 1)


def test_each_prompt_is_printed_with_its_number_in_order(folder: Path) -> None:
    batches, printed = on_one_device(folder, "dense")
    assert [len(batch) for batch in batches] == [4, 1]
    places = [printed.index(f"--- text {number} ---\n{prompt}") for number, prompt in enumerate(PROMPTS)]
    assert places == sorted(places)


@pytest.mark.matrix
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "fp8"])
@pytest.mark.parametrize("model", ["rotary", "experts"])
def test_half_precision_writes_on_stages_what_it_writes_on_one_device(model: str, precision: str, folder: Path) -> None:
    [(wanted, _)] = run_on_ranks(1, predicted, Layout(), folder, model, precision, init=False)
    layout = LAYOUTS["pp2 vp2"]
    for found, _ in run_on_ranks(2, predicted, layout, folder, model, precision, init=False):
        assert found == wanted
    assert len({tuple(row) for batch in wanted for row in batch}) == len(PROMPTS)


def told_of_tokenizers(layout: Layout, folder: Path, other: Path, saved: Path) -> list[list[str]]:
    """What predictions from a checkpoint warn of: with the text that it was trained on, and with another one."""
    trainer = make_trainer(layout, max_steps=1, max_epochs=-1, limit_val_batches=0)
    trainer.fit(GPTModule(config(num_layers=1)), datamodule=data(folder))
    trainer.save_checkpoint(saved)
    told = []
    for path in (folder, other):
        text = data(path, prompts=["a mat"])
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            make_trainer(layout).predict(GPTModule(config(num_layers=1)), datamodule=text, ckpt_path=str(saved))
        told.append([str(warning.message) for warning in found if "tokenizer" in str(warning.message)])
    return told


@pytest.mark.parametrize("layout", [PLAIN, Layout(world=2, tp=2)])
def test_a_tokenizer_other_than_the_checkpoint_s_is_told(layout: Layout, folder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path, ["a wholly different text of other words, which have other pairs of letters. " * 9] * 12)
    options = (layout, folder, tmp_path, tmp_path / "one.ckpt")
    own, others = run_on_ranks(layout.world, told_of_tokenizers, *options, init=False)[0]
    assert own == []
    [told] = others
    assert "the tokenizer (one trained on this text) is not that of the run which saved the checkpoint" in told
