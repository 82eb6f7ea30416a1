"""The ready T5: what it steps, logs and answers is the same on every layout, and its checkpoints go anywhere."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lightning_megatron import RecomputeConfig, hf
from lightning_megatron.cli.main import main
from lightning_megatron.lightning_modules import AdamWConfig, GenerationConfig, T5Module
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.models import T5Config, T5Model
from lightning_megatron.models.t5_cost import model_parameters, training_flops
from lightning_megatron.transformer import cost
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.lightning_modules.losses import Losses, resumed_losses
from tests.lightning_modules.test_t5_data import DECODER_LENGTH, LENGTH, VOCABULARY, t5_data
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer, share_of

pytestmark = pytest.mark.filterwarnings(QUIET)

LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=4, stages within either stack": Layout(world=4, pp=4, microbatches=2),
    "pp=2 vp=2": Layout(world=2, pp=2, vp=2, microbatches=2),
    "pp=2 by cost": Layout(world=2, pp=2, microbatches=2, stages=StageLayout(balance="cost")),
    "dp=2": Layout(world=2),
    "cp=2": Layout(world=2, cp=2),
}
STEPS = 3
GAPS = "the cat<extra_id_0> on a mat and<extra_id_1> home"


def t5_config(**options: Any) -> T5Config:
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH,
        "max_decoder_sequence_length": DECODER_LENGTH,
        "relative_buckets": 8,
        "relative_max_distance": 20,
    }
    return T5Config(**(defaults | options))


def t5(**optimizer: Any) -> T5Module:
    return T5Module(
        t5_config(hidden_dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1),
        AdamWConfig(lr=1e-2, warmup_steps=1, **optimizer),
        GenerationConfig(max_new_tokens=DECODER_LENGTH, temperature=0.9, seed=3),
    )


@dataclass
class Run:
    """What a fit, a test and a prediction left."""

    losses: list[float]
    metrics: dict[str, float]
    answers: list[list[int]]


def run(layout: Layout, folder: Path) -> Run:
    """Three steps with validation after the last, then a test and two prompts."""
    torch.manual_seed(7)
    module, losses = t5(), Losses()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": STEPS}
    trainer = make_trainer(layout, callbacks=[losses], check_val_every_n_epoch=None, **options)
    text = t5_data(folder, prompts=[GAPS, "it<extra_id_0>"])
    trainer.fit(module, datamodule=text)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in trainer.test(module, datamodule=text, verbose=False)[0].items()}
    predicted = trainer.predict(module, datamodule=text)
    assert predicted is not None
    return Run(losses.losses, metrics, [row.tolist() for batch in predicted for row in batch])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("t5")
    t5_data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


@functools.cache
def runs(layout: Layout, folder: Path) -> list[Run]:
    return run_on_ranks(layout.world, run, layout, folder, init=False)


@pytest.mark.parametrize("name", every_nth(LAYOUTS, 2))
def test_losses_metrics_and_answers_are_those_of_one_device(name: str, folder: Path) -> None:
    [wanted] = runs(PLAIN, folder)
    assert wanted.losses[-1] < wanted.losses[0] - 0.05, "it learns, so a step that is left out would show"
    assert len(set(map(tuple, wanted.answers))) == 2
    for rank, found in enumerate(runs(LAYOUTS[name], folder)):
        assert found.losses == pytest.approx(wanted.losses, abs=1e-9)
        assert found.metrics.keys() == wanted.metrics.keys() >= {"train_loss", "val_loss", "test_loss"}
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
        assert found.answers == share_of(wanted.answers, LAYOUTS[name], rank) != []


# --- checkpoints ------------------------------------------------------------------------------------------------------


def resumed(folder: Path, layout: Layout, ckpt_path: str | None) -> list[float]:
    return resumed_losses(t5(total_steps=4), t5_data(folder), folder, layout, ckpt_path)


@pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path.")
def test_a_run_goes_on_alike_on_another_layout_and_its_checkpoint_becomes_a_folder_and_back(
    folder: Path, tmp_path: Path
) -> None:
    [first, _] = run_on_ranks(2, resumed, folder, LAYOUTS["tp=2 sp"], None, init=False)
    path = folder / "saved" / "step=2.ckpt"
    for name in ("pp=2 vp=2", "dp=2"):
        for found in run_on_ranks(2, resumed, folder, LAYOUTS[name], str(path), init=False):
            assert found == pytest.approx(first[2:], abs=1e-9)
    assert abs(first[2] - first[0]) > 1e-3

    loaded, again = t5(), t5()
    trainer = make_trainer(Layout())
    trainer.validate(loaded, datamodule=t5_data(folder), ckpt_path=str(path), verbose=False)
    assert main(["convert", str(path), str(tmp_path / "a")]) == 0
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "b.ckpt")]) == 0
    trainer.validate(again, datamodule=t5_data(folder), ckpt_path=str(tmp_path / "b.ckpt"), verbose=False)
    assert loaded.model is not None and again.model is not None
    written = dict(hf.from_pretrained(tmp_path / "a").named_parameters())
    for parameter, value in loaded.model.named_parameters():
        assert torch.equal(written[parameter], value.float())
        assert torch.equal(again.model.get_parameter(parameter), value)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_an_answer_ends_with_the_end_of_text_where_requested_and_is_printed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def predicted(**options: Any) -> list[Tensor]:
        # So hot that every token comes as often as any other.
        generation = GenerationConfig(max_new_tokens=40, temperature=1e6, **options)
        module = T5Module(t5_config(), generation=generation)
        batches = make_trainer(PLAIN, callbacks=[PrintText()]).predict(module, datamodule=text)
        assert batches is not None
        return [row for batch in batches for row in batch]

    text = t5_data(folder, prompts=[GAPS, *(f"{word}<extra_id_0>" for word in ("home", "it", "", "a mat"))])
    whole, ended = predicted(stops_at_end_of_text=False), predicted()
    assert text.tokenizer is not None
    end, cuts = text.tokenizer.end_of_text, []
    for long, short in zip(whole, ended, strict=True):
        cuts += (long == end).nonzero().flatten().tolist()[:1]
        assert len(long) == 40
        assert (
            short.tolist()
            == long[: (long == end).nonzero().flatten().tolist()[0] + 1 if end in long else None].tolist()
        )
    stop = int(whole[0][5])
    assert len(predicted(stops_at_end_of_text=False, stop_tokens=(stop,))[0]) <= 6
    printed = capsys.readouterr().out
    assert text.tokenizer.decode(whole[0].tolist()) in printed


# --- costs ------------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "t5": {},
    "v1.1, uneven stacks": {
        "activation": "geglu_tanh",
        "tie_embeddings": False,
        "scales_head": False,
        "num_decoder_layers": 3,
    },
    "learned, biases, own embeddings, one key head": {
        "position": "learned",
        "normalization": "layernorm",
        "add_bias_linear": True,
        "share_embeddings": False,
        "num_query_groups": 1,
        "head_dim": 6,
    },
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = t5_config(**SHAPES[name])
    assert model_parameters(config) == sum(parameter.numel() for parameter in T5Model(config, seed=1).parameters())


@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_those_that_are_counted(name: str) -> None:
    config = t5_config(**SHAPES[name], max_decoder_sequence_length=20)
    model = T5Model(config, seed=1)
    read, shown = torch.zeros(3, 24, dtype=torch.int64), torch.zeros(3, 18, dtype=torch.int64)
    # Which torch counts under another name.
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attention = {op: lambda queries, keys, values, *_, **__: sdpa_flop_count(queries, keys, values)}
    with FlopCounterMode(display=False, custom_mapping=attention) as counter:
        model(read, shown, labels=shown)
    # What is counted computes causal attention whole; here it counts half.
    half = config.num_decoder_layers * 2 * 3 * 18 * 18 * config.num_attention_heads * config.head_dim
    counted = counter.get_total_flops() - half
    assert training_flops(config, batch=3, sequence=24, decoder_sequence=18) == 3 * counted


def test_a_batch_counts_what_its_pairs_of_documents_would_alone() -> None:
    module = t5()
    read = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]])
    shown = torch.tensor([[0, 1, 1, 1, -1], [0, 0, -1, -1, -1]])
    tokens = {"encoder_tokens": torch.zeros_like(read), "decoder_tokens": torch.zeros_like(shown)}
    packed = {**tokens, "encoder_segments": read, "decoder_segments": shown}
    alone = [
        {name: torch.zeros(1, n, dtype=torch.int64) for name, n in zip(tokens, pair, strict=True)}
        for pair in ((3, 1), (2, 3), (4, 2))
    ]
    assert module.batch_tokens(packed) == 15
    assert module.batch_flops(packed) == sum(module.batch_flops(batch) for batch in alone)
    assert module.batch_flops(packed) < module.batch_flops(tokens)
    full = RecomputeConfig(granularity="full")
    again = [module.batch_recomputed_flops(batch, full, Sizes()) for batch in (packed, *alone)]
    # All but the head, of the tokens of the decoder, a third of forward and backward.
    assert again[0] == sum(again[1:]) == module.batch_flops(packed) / 3 - cost.head_flops(module.config, num_tokens=6)
    masked = {**tokens, "encoder_padding_mask": read >= 0}
    assert module.batch_tokens(masked) == 9 + 10
    assert module.batch_tokens(tokens) == 12 + 10


def test_padding_between_two_tokens_is_reported_by_its_position(folder: Path) -> None:
    rows = [{"encoder_tokens": torch.arange(1, 7), "decoder_tokens": torch.arange(4), "labels": torch.arange(4)}] * 2
    masks = ([0, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 0])
    for mask in masks:
        batch = [{**row, "encoder_padding_mask": torch.tensor(mask), "loss_mask": torch.ones(4)} for row in rows]
        loader = torch.utils.data.DataLoader(batch, batch_size=2)  # type: ignore[arg-type]
        trainer = make_trainer(Layout(), max_steps=1)
        if mask == masks[0]:
            trainer.validate(t5(), loader, verbose=False)
            continue
        with pytest.raises(ValueError, match="encoder_padding_mask of row 0 has padding at 2, between two tokens"):
            trainer.validate(t5(), loader, verbose=False)
