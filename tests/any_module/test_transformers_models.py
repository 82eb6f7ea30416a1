"""Models of transformers, unchanged, compute one device's numbers on layouts: a sample of docs/models_table.md."""

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoModelForCausalLM, BartForConditionalGeneration, Qwen2Config

from lightning_megatron import MegatronStrategy, ModelPlan, RecomputeConfig
from lightning_megatron.any_module.tensor_styles import cut_by, reason_of_whole
from lightning_megatron.testing import certify
from tests.any_module.model_families import Causal, Images, ImageText, Masked, Translation, batches, config_of
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

SAMPLE = [
    # Norms of queries and keys; a tied head.
    ("qwen3", ("tp2", "dp2pp2-zero")),
    # Soft caps, windows, an attention of its own file.
    ("gemma2", ("cp2pp2", "tp2-sp")),
    # Experts, and attention sinks.
    ("qwen3_moe", ("ep2", "tp2-sp", "pp2tp2")),
    ("gpt_oss", ("cp2",)),
    # Its plan leaves out the attention.
    ("granitemoe", ("tp2",)),
    # No plan of its own: linears go by their names, and its number of heads is that of a rank.
    ("opt", ("tp2",)),
    # Its activation has weights, which see the features of a rank.
    ("apertus", ("tp2-sp",)),
    # All tokens choose experts of one rank.
    ("afmoe", ("ep2",)),
]
OTHERS = [
    (Masked, "roberta", ("cp2tp2-sp",)),
    (Translation, "t5", ("pp2tp2",)),
    (Images, "vit", ("pp2",)),
    # Images as patches of a grid, and positions of three dims.
    (ImageText, "qwen2_vl", ("pp2tp2",)),
]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model_type", "layouts"),
    [(model_type, every_nth(layouts, 2)) for model_type, layouts in SAMPLE],
    ids=[model_type for model_type, _ in SAMPLE],
)
def test_a_model_as_it_is_trains_as_on_one_device(model_type: str, layouts: list[str]) -> None:
    certify(functools.partial(Causal, model_type), batches, layouts=layouts, steps=2).assert_equal()


@pytest.mark.parametrize(("family", "model_type", "layouts"), OTHERS, ids=[model_type for _, model_type, _ in OTHERS])
def test_a_model_of_another_family_does(family: type[Causal], model_type: str, layouts: tuple[str, ...]) -> None:
    make_batches = functools.partial(family.batches, model_type)
    certify(functools.partial(family, model_type), make_batches, layouts=layouts, steps=2).assert_equal()


class FewKeys(Causal):
    """Has fewer heads of keys than four ranks of tp."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model = AutoModelForCausalLM.from_config(
            Qwen2Config(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=8,
                num_key_value_heads=2,
                intermediate_size=64,
                vocab_size=64,
                max_position_embeddings=32,
            )
        )


def test_heads_that_ranks_do_not_divide_stay_whole_and_are_told() -> None:
    certify(functools.partial(FewKeys, "qwen2"), batches, layouts=("tp4-sp",), steps=1).assert_equal()
    module = FewKeys("qwen2")
    module.configure_model()
    styles = ModelPlan().styles_in("model", module.model)
    reason = "4 ranks do not divide its 2 heads"
    assert reason_of_whole(module.model, styles, "model.layers.0.self_attn.k_proj", 4) == reason
    assert (
        reason_of_whole(module.model, styles, "model.layers.0.self_attn.q_proj", 4) == f"as k_proj beside it, {reason}"
    )
    cut = {name for name, _, _ in cut_by(module.model, styles, 4)}
    assert "model.layers.0.mlp.up_proj" in cut and "model.layers.0.self_attn.q_proj" not in cut


@pytest.mark.parametrize(
    ("model_type", "layout", "shown"),
    [
        ("mamba", "cp2", "backbone.layers.0 (MambaBlock) computes other hidden states from the tokens of a rank"),
        ("bloom", "cp2", "context_parallel_size (2) cuts nothing of Causal"),
        ("qwen3", "ep2", "expert_model_parallel_size (2)"),
        ("qwen3_moe", "ep2tp2", "expert_tensor_parallel_size (1) must be tensor_model_parallel_size (2)"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(model_type: str, layout: str, shown: str) -> None:
    [result] = certify(functools.partial(Causal, model_type), batches, layouts=(layout,), steps=1).results
    assert result.verdict == "refused" and shown in result.message


def padded() -> list[dict[str, Any]]:
    """The batches with rows of several lengths, padded at their ends, and in the last batch at their beginnings."""
    found = batches()
    for number, batch in enumerate(found):
        mask = torch.ones_like(batch["input_ids"])
        for row, length in enumerate((12, 3, 7, 12, 5, 9, 2, 11)):
            mask[row, length:] = 0
        batch["attention_mask"] = mask.flip(1) if number == 2 else mask
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return found


class Inside(nn.Module):
    """A network around a model of transformers, with a head of its own."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model
        self.score = nn.Linear(model.config.hidden_size, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.score(self.body(tokens).last_hidden_state.mean(1))  # type: ignore[no-any-return]


class Scores(Causal):
    """Trains a network that has a model of transformers inside."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = Inside(AutoModel.from_config(config_of(self.model_type)))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return functional.cross_entropy(self.model(batch["input_ids"]), batch["labels"][:, 0] % 3)


@pytest.mark.matrix
def test_a_model_inside_of_a_network_is_cut_by_its_own_plan() -> None:
    layouts = every_nth(("pp2tp2-sp", "cp2"), 2)
    certify(functools.partial(Scores, "qwen3"), batches, layouts=layouts, steps=2).assert_equal()


def packed() -> list[dict[str, Any]]:
    """The batches with rows of two documents, told apart by positions that begin anew."""
    found = batches()
    for batch in found:
        positions = torch.arange(12).repeat(len(batch["input_ids"]), 1)
        for row in range(len(positions)):
            positions[row, row + 2 :] -= row + 2
        batch["position_ids"] = positions
    return found


@pytest.mark.parametrize(("make_batches", "steps"), [(padded, 3), (packed, 1)])
def test_masks_are_those_of_all_tokens(make_batches: Any, steps: int) -> None:
    make = functools.partial(Causal, "gemma2")
    certify(make, make_batches, layouts=("cp2tp2-sp",), steps=steps).assert_equal()
    # The batches differ from those without a mask.
    assert not torch.equal(losses(make_batches), losses(batches))


def losses(make_batches: Any) -> torch.Tensor:
    module = Causal("gemma2")
    module.configure_model()
    return torch.stack([module.training_step(batch, 0).detach() for batch in make_batches()])


class Translates(Causal):
    """An encoder-decoder whose two lists of layers are cut."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(1)
            self.model = BartForConditionalGeneration(config_of("bart"))

    def model_plan(self) -> ModelPlan:
        return ModelPlan(layers=("model.model.encoder.layers", "model.model.decoder.layers"))


def pairs() -> list[dict[str, Any]]:
    """The batches as targets of eight tokens, of sources of twelve."""
    return [{"input_ids": batch["input_ids"], "labels": batch["labels"][:, :8].contiguous()} for batch in batches()]


def test_a_decoder_gives_all_of_the_gradient_to_its_encoder() -> None:
    make = functools.partial(Translates, "bart")
    certify(make, pairs, layouts=("cp2", "pp2tp2-sp"), steps=1).assert_equal()


def weights_after(recompute: RecomputeConfig) -> dict[str, torch.Tensor]:
    layout, module = Layout(world=2, cp=2), Causal("qwen3")
    strategy = layout.strategy()
    assert isinstance(strategy, MegatronStrategy)
    strategy.recompute = recompute
    module.configure_model()
    module.model.config.use_cache = True
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    make_trainer(layout, strategy=strategy, max_epochs=1).fit(module, loader)
    return {name: one.detach().clone() for name, one in module.named_parameters()}


def test_recomputed_layers_fill_no_cache_a_second_time() -> None:
    wanted = run_on_ranks(2, weights_after, RecomputeConfig(), init=False)
    found = run_on_ranks(2, weights_after, RecomputeConfig(granularity="full"), init=False)
    for own, of_rank in zip(found, wanted, strict=True):
        assert own.keys() == of_rank.keys() and all(torch.equal(own[name], of_rank[name]) for name in of_rank)


# Sums in another order, of numbers of 8 bits, and of 11.
TOLERANCE_IN_16_BITS = {"bf16-true": 0.02, "bf16-mixed": 0.02, "16-mixed": 0.0025}


def losses_in_16_bits(layout: Layout, precision: str) -> tuple[list[float], set[torch.dtype]]:
    """Losses of three epochs, and types of the weights."""
    losses: list[float] = []
    module: Any = Logged("qwen3")
    module.on_train_batch_end = lambda *_: losses.append(float(module.trainer.callback_metrics["loss"]))
    # By name Lightning gives no float16 to a CPU.
    by_plugin = {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu")]}
    options: dict[str, Any] = by_plugin if precision == "16-mixed" else {"precision": precision}
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    make_trainer(layout, max_epochs=3, **options).fit(module, loader)
    return losses, {one.dtype for one in module.parameters()}


@pytest.mark.matrix
@pytest.mark.parametrize("precision", every_nth(TOLERANCE_IN_16_BITS, 3))
def test_a_model_trains_in_16_bits_as_on_one_device(precision: str) -> None:
    tolerance = TOLERANCE_IN_16_BITS[precision]
    [(wanted, dtypes)] = run_on_ranks(1, losses_in_16_bits, Layout(is_plain=True), precision, init=False)
    # It learns by much more than the tolerance.
    assert wanted[0] - wanted[-1] > 4 * tolerance
    over_all = Layout(world=4, tp=2, pp=2, sp=True, microbatches=2)
    for layout in (over_all, Layout(world=2, cp=2)) if precision == "bf16-true" else (over_all,):
        for found, own in run_on_ranks(layout.world, losses_in_16_bits, layout, precision, init=False):
            assert own == dtypes and found == pytest.approx(wanted, abs=tolerance)


@pytest.mark.matrix
@pytest.mark.parametrize("option", every_nth(["output_hidden_states", "output_attentions", "use_cache"], 2))
def test_what_is_collected_of_all_tokens_is_refused(option: str) -> None:
    [result] = certify(functools.partial(Collects, option), batches, layouts=("cp2",), steps=1).results
    assert result.verdict == "refused" and f"was called with {option}, of which a rank has" in result.message
    assert "use context_parallel_size=1" in result.message


class Collects(Causal):
    """Asks for what a call collects."""

    def __init__(self, option: str) -> None:
        super().__init__("qwen3")
        self.option = option

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, **{self.option: True}).loss


class Generates(Causal):
    """Writes five tokens behind each row."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.generation_config.use_cache = True

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.generate(batch["input_ids"][:, :7], max_new_tokens=5, do_sample=False, eos_token_id=None)


def generated(layout: Layout) -> torch.Tensor:
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    parts: Any = make_trainer(layout).predict(Generates("qwen3"), loader)
    return torch.cat(parts)


def test_text_is_generated_over_any_number_of_tokens() -> None:
    [wanted] = run_on_ranks(1, generated, Layout(is_plain=True), init=False)
    for layout in (Layout(world=2, tp=2, sp=True), Layout(world=2, cp=2), Layout(world=2, pp=2)):
        for found in run_on_ranks(2, generated, layout, init=False):
            assert torch.equal(found, wanted)


class Ends(Generates):
    """Ends rows where a token comes, which is at other places on each rank."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        tokens = batch["input_ids"][:, :7]
        return self.model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=self.ending, pad_token_id=0)


def ended(layout: Layout, ending: int) -> list[list[int]]:
    module = Ends("mixtral")
    module.ending = ending
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    parts: Any = make_trainer(layout).predict(module, loader)
    return [[token for token in row.tolist() if token] for part in parts for row in part]


def test_ranks_that_share_experts_generate_until_the_last_has_its_text() -> None:
    rows = run_on_ranks(1, ended, Layout(is_plain=True), -1, init=False)[0]
    # A token that some rows come to late, and others not at all.
    counts = Counter(row[9] for row in rows)
    ending = next(token for token, count in counts.most_common() if count < len(rows))
    [wanted] = run_on_ranks(1, ended, Layout(is_plain=True), ending, init=False)
    assert len({len(row) for row in wanted}) > 1
    found = run_on_ranks(2, ended, Layout(world=2, ep=2), ending, init=False)
    assert sorted(row for of_rank in found for row in of_rank) == sorted(wanted * 2)


class Logged(Causal):
    """Logs its loss."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def unlabelled() -> list[dict[str, Any]]:
    """The batches, with whole microbatches whose rows have no label: the first of one, the last of another."""
    found = batches()
    for batch, rows in zip(found, (slice(0, 4), slice(6, 8)), strict=False):
        batch["labels"][rows] = -100
    return found


def test_rows_without_a_label_are_left_out() -> None:
    make, layouts = functools.partial(Logged, "qwen3"), ("pp2m4", "dp2pp2-zero", "cp2")
    certify(make, unlabelled, layouts=layouts, steps=2).assert_equal()


class Weightless(Causal):
    """Its losses are means over nothing, and it logs another number."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.log("seven", 7.0)
        return {"loss": super().training_step(batch, batch_idx) * 0, "loss_weight": 0}


def test_a_number_logged_beside_a_loss_of_nothing_is_what_it_is() -> None:
    certify(functools.partial(Weightless, "qwen3"), batches, layouts=("dp2",), steps=1).assert_equal()


def validated(layout: Layout) -> float:
    module = Logged("qwen3")
    module.validation_step = lambda batch, batch_idx: module.log("val_loss", module.model(**batch).loss)  # type: ignore[method-assign]
    loader: Any = DataLoader(unlabelled(), batch_size=None)  # type: ignore[arg-type]
    trainer = make_trainer(layout)
    trainer.validate(module, loader, verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_a_validation_leaves_rows_without_a_label_out() -> None:
    [wanted] = run_on_ranks(1, validated, Layout(is_plain=True), init=False)
    assert run_on_ranks(2, validated, Layout(world=2, pp=2, microbatches=4), init=False) == [pytest.approx(wanted)] * 2
