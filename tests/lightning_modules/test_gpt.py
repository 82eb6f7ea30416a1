"""The ready GPT: what it steps, logs and writes is the same on every layout."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ConfigurationError, ContextConfig, RecomputeConfig
from lightning_megatron.lightning_modules import AdamWConfig, GenerationConfig, GPTModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Sizes
from lightning_megatron.transformer import cost
from tests.harness.ranks import run_on_ranks
from tests.lightning_modules.corpus import SEQUENCE, config, data
from tests.lightning_modules.losses import Losses, resumed_losses
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer, share_of

pytestmark = pytest.mark.filterwarnings(QUIET)

LAYOUTS = {
    "tp=2 sp": Layout(world=2, tp=2, sp=True),
    "pp=2": Layout(world=2, pp=2, microbatches=2),
    "dp=2": Layout(world=2),
    "cp=2": Layout(world=2, cp=2),
    "cp=2 dp=2 all-to-all": Layout(world=4, cp=2, context=ContextConfig(comm_type="all_to_all"), microbatches=2),
}
STEPS = 3


def gpt(**optimizer: Any) -> GPTModule:
    return GPTModule(
        config(),
        AdamWConfig(lr=1e-2, warmup_steps=1, **optimizer),
        GenerationConfig(max_new_tokens=SEQUENCE, temperature=0.9, seed=3),
    )


@dataclass
class Run:
    """What a fit, a test and a prediction left."""

    losses: list[float]
    metrics: dict[str, float]
    texts: list[list[int]]
    """Of this dp rank's share of the prompts."""


def run(layout: Layout, folder: Path, packing: str) -> Run:
    """Three steps with validation after the last, then a test and two prompts."""
    torch.manual_seed(7)
    module, losses = gpt(), Losses()
    options: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1, "val_check_interval": STEPS}
    trainer = make_trainer(layout, callbacks=[losses], check_val_every_n_epoch=None, **options)
    text = data(folder, packing=packing, prompts=["the cat sat", "it ran home to eat some fish on a mat and"])
    trainer.fit(module, datamodule=text)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics |= {name: float(value) for name, value in trainer.test(module, datamodule=text, verbose=False)[0].items()}
    predicted = trainer.predict(module, datamodule=text)
    assert predicted is not None
    return Run(losses.losses, metrics, [row.tolist() for batch in predicted for row in batch])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("gpt")
    data(path).setup("fit")  # the text is prepared once, for all layouts
    return path


@functools.cache
def runs(layout: Layout, folder: Path, packing: str) -> list[Run]:
    return run_on_ranks(layout.world, run, layout, folder, packing, init=False)


@pytest.mark.matrix
@pytest.mark.parametrize("packing", ["stream", "documents"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_losses_metrics_and_texts_are_those_of_one_device(name: str, packing: str, folder: Path) -> None:
    [wanted] = runs(PLAIN, folder, packing)
    assert wanted.losses[-1] < wanted.losses[0] - 0.05, "it learns, so a step that is left out would show"
    evaluated = {f"{stage}_{mean}" for stage in ("val", "test") for mean in ("loss", "perplexity", "accuracy")}
    for rank, found in enumerate(runs(LAYOUTS[name], folder, packing)):
        assert found.losses == pytest.approx(wanted.losses, abs=1e-9)
        assert found.metrics.keys() == wanted.metrics.keys() == {"train_loss"} | evaluated
        assert found.metrics == pytest.approx(wanted.metrics, rel=1e-9)
        assert found.texts == share_of(wanted.texts, LAYOUTS[name], rank) != []


def test_validation_means_are_those_over_the_tokens_that_are_held_out(folder: Path) -> None:
    module, text = gpt(), data(folder, global_batch_size=4)
    make_trainer(PLAIN).validate(module, datamodule=text, verbose=False)
    logged = {name: float(value) for name, value in module.trainer.callback_metrics.items()}
    assert module.model is not None
    text.setup("validate")
    held_out = text._held_out
    assert held_out is not None and held_out.count % 4, "the last batch is not full, or the mean of means would do"
    module.model.eval()
    samples = [held_out.dataset[i] for i in range(held_out.count)]
    with torch.no_grad():
        logits = torch.cat([module.model(sample["tokens"][None])[0] for sample in samples])
    labels = torch.cat([sample["labels"] for sample in samples])
    loss, accuracy = nn.functional.cross_entropy(logits, labels), (logits.argmax(-1) == labels).double().mean()
    wanted = {"val_loss": float(loss), "val_perplexity": float(loss.exp()), "val_accuracy": float(accuracy)}
    assert logged == pytest.approx(wanted, rel=1e-9) and accuracy > 0


def resumed(folder: Path, layout: Layout, ckpt_path: str | None) -> list[float]:
    return resumed_losses(gpt(total_steps=4), data(folder), folder, layout, ckpt_path)


def test_a_run_goes_on_alike_on_another_layout(folder: Path) -> None:
    [first, _] = run_on_ranks(2, resumed, folder, LAYOUTS["tp=2 sp"], None, init=False)
    path = str(folder / "saved" / "step=2.ckpt")
    for found in run_on_ranks(2, resumed, folder, LAYOUTS["dp=2"], path, init=False):
        assert found == pytest.approx(first[2:], abs=1e-9)
    assert abs(first[2] - first[0]) > 1e-3


# --- documents --------------------------------------------------------------------------------------------------------


class Recorder(nn.Module):
    """Notes what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.loss_weight = torch.tensor(1.0)
        self.tallies = {"correct": torch.tensor(1.0), "negative_log_likelihood": torch.tensor(1.0)}
        self.calls: list[dict[str, Tensor]] = []

    def forward(self, tokens: Tensor, **entries: Tensor) -> Tensor:
        self.calls.append({"tokens": tokens, **entries})
        return self.weight.sum()


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_the_model_gets_the_segments_of_batches_that_have_them(folder: Path, packing: str) -> None:
    module = gpt()
    module.model = recorder = Recorder()  # type: ignore[assignment]
    trainer = make_trainer(PLAIN, max_steps=2, max_epochs=-1, limit_val_batches=1, val_check_interval=1)
    text = data(folder, packing=packing)
    trainer.fit(module, datamodule=text)
    trainer.test(module, datamodule=text, verbose=False)
    assert len(recorder.calls) >= 3
    for call in recorder.calls:
        wanted = {"tokens", "labels", "loss_mask"} | ({"segments"} if packing == "documents" else set())
        assert call.keys() == wanted and {tuple(value.shape) for value in call.values()} == {(4, SEQUENCE)}
    if packing == "documents":
        assert any((call["segments"] == 1).any() for call in recorder.calls)


def test_a_packed_batch_counts_what_its_documents_would_alone() -> None:
    module = gpt()
    segments = torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]])
    packed = {"tokens": torch.zeros(2, 6, dtype=torch.int64), "segments": segments}
    alone = [{"tokens": torch.zeros(1, length, dtype=torch.int64)} for length in (3, 2, 6)]
    assert module.batch_tokens(packed) == 11
    assert module.batch_flops(packed) == sum(module.batch_flops(batch) for batch in alone)
    assert module.batch_flops(packed) < module.batch_flops({"tokens": packed["tokens"]})
    full = RecomputeConfig(granularity="full")
    again = [module.batch_recomputed_flops(batch, full, Sizes()) for batch in (packed, *alone)]
    # All but the head, a third of forward and backward.
    assert again[0] == sum(again[1:]) == module.batch_flops(packed) / 3 - cost.head_flops(module.config, num_tokens=11)
    assert module.batch_recomputed_flops(packed, RecomputeConfig(), Sizes()) == 0


# --- optimizer --------------------------------------------------------------------------------------------------------


def optimizer_of(module: GPTModule, max_steps: int = 10, max_epochs: int = -1) -> Any:
    module.configure_model()
    module.trainer = make_trainer(PLAIN, max_steps=max_steps, max_epochs=max_epochs)
    return module.configure_optimizers()


def test_weight_decay_acts_on_matrices_alone() -> None:
    module = GPTModule(config(activation="swiglu"), AdamWConfig(weight_decay=0.3))
    decays = {
        parameter: group["weight_decay"]
        for group in optimizer_of(module)["optimizer"].param_groups
        for parameter in group["params"]
    }
    named = dict(module.named_parameters())
    assert len(decays) == len(named)
    for name, parameter in named.items():
        is_matrix = name.endswith("weight") and "norm" not in name
        assert decays[parameter] == (0.3 if is_matrix else 0.0), name
    assert any(parameter.dim() > 1 and name.endswith("bias") for name, parameter in named.items())


def test_the_rate_rises_over_the_warm_up_and_falls_to_its_minimum_at_the_end() -> None:
    made = optimizer_of(GPTModule(config(), AdamWConfig(lr=1.0, warmup_steps=4, minimum_fraction=0.2)))
    rates = []
    for _ in range(12):
        rates.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert rates[:5] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert rates[4] > rates[7] > rates[9] > 0.2
    assert rates[10:] == pytest.approx([0.2, 0.2])


def test_the_curve_of_megatron_and_a_rising_weight_decay_are_settings() -> None:
    settings = AdamWConfig(
        lr=1.0,
        warmup_steps=2,
        initial_fraction=0.5,
        decay_style="WSD",
        wsd_decay_style="linear",
        wsd_decay_steps=4,
        minimum_fraction=0.2,
        weight_decay=0.0,
        weight_decay_incr_style="linear",
        end_weight_decay=0.1,
    )
    made = optimizer_of(GPTModule(config(), settings), max_steps=10)
    rates, decays = [], []
    for _ in range(11):
        matrices, others = made["optimizer"].param_groups
        rates.append(matrices["lr"])
        decays.append(matrices["weight_decay"])
        assert others["weight_decay"] == 0.0 and others["lr"] == matrices["lr"]
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    assert rates == pytest.approx([0.5, 0.75, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert decays == pytest.approx([0.01 * step for step in range(11)])


def test_a_resumed_curve_is_the_one_now_configured() -> None:
    short = optimizer_of(gpt(), max_steps=5)["lr_scheduler"]["scheduler"]
    longer = optimizer_of(gpt(), max_steps=50)["lr_scheduler"]["scheduler"]
    longer.load_state_dict(short.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr()[0] > 0.9 * 3e-4


def test_a_warm_up_that_outlasts_the_run_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"warmup_steps \(10\)"):
        optimizer_of(GPTModule(config(), AdamWConfig(warmup_steps=10)))


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_steps"):
        optimizer_of(GPTModule(config()), max_steps=-1)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: AdamWConfig(lr=-1.0, betas=(0.9, 1.0)), r"lr \(-1.0\).*\n.*betas \(1.0\)"),
        (lambda: AdamWConfig(epsilon=0.0), "epsilon"),
        (lambda: AdamWConfig(end_weight_decay=0.2), r"end_weight_decay \(0.2\) has no effect"),
        (lambda: AdamWConfig(initial_fraction=0.2), r"initial_fraction \(0.2\) has no effect without warmup_steps"),
        (lambda: AdamWConfig(wsd_decay_style="linear"), "wsd_decay_style .* has no effect without decay_style WSD"),
        (lambda: AdamWConfig(muon_momentum=0.5), "muon_momentum .* has no effect without matrix_optimizer muon"),
        (lambda: AdamWConfig(matrix_optimizer="moun"), r"matrix_optimizer \('moun'\) must be one of adamw, muon"),
        (lambda: AdamWConfig(decay_style="step"), "decay_style .* must be one of constant, linear, cosine"),
        (lambda: AdamWConfig(minimum_fraction=2.0), r"minimum_fraction \(2.0\) must be from 0 to 1"),
        (lambda: AdamWConfig(weight_decay_incr_style="linear"), r"end_weight_decay \(0.0\) must be at least weight_de"),
        (lambda: GenerationConfig(temperature=-1.0), "temperature"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=shown):
        make()


# --- generation -------------------------------------------------------------------------------------------------------


def test_a_prediction_ends_with_the_end_of_text_where_requested(folder: Path) -> None:
    def predicted(**options: Any) -> list[Tensor]:
        module = GPTModule(config(), generation=GenerationConfig(max_new_tokens=SEQUENCE, **options))
        text = data(folder, prompts=["the cat sat", "home", "it"])
        batches = make_trainer(PLAIN).predict(module, datamodule=text)
        assert batches is not None and text.tokenizer is not None
        ends.append(text.tokenizer.end_of_text)
        return [row for batch in batches for row in batch]

    ends: list[int] = []
    # So hot that every token comes as often as any other.
    whole = predicted(temperature=1e6, stops_at_end_of_text=False)
    ended = predicted(temperature=1e6)
    for long, short in zip(whole, ended, strict=True):
        cut = (long == ends[0]).nonzero().flatten().tolist()
        assert short.tolist() == long[: cut[0] + 1 if cut else None].tolist()
    stop = int(whole[0][-3])
    stopped = predicted(temperature=1e6, stops_at_end_of_text=False, stop_tokens=(stop,))
    assert len(stopped[0]) < len(whole[0]) and stopped[0][-1] == stop


def test_predicted_texts_are_printed_with_their_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = gpt()
    trainer = make_trainer(PLAIN, callbacks=[PrintText()])
    trainer.predict(module, datamodule=data(folder, prompts=["the cat sat on", "home"]))
    printed = capsys.readouterr().out
    assert printed.index("the cat sat on") < printed.index("home")


def test_a_prediction_from_no_prompts_is_refused_and_one_from_an_empty_prompt_is_not(folder: Path) -> None:
    text = data(folder, prompts=[])
    with pytest.raises(ConfigurationError, match="there are no prompts to predict from"):
        text.setup("predict")
    text = data(folder, prompts=[""])
    text.setup("predict")
    assert text.tokenizer is not None
    [batch] = text.predict_dataloader()
    assert batch["tokens"].tolist() == [[text.tokenizer.end_of_text]]
    assert (batch["lengths"].tolist(), batch["samples"].tolist()) == ([1], [0])
