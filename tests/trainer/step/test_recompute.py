"""Recomputation under the strategy: losses, gradients and weights are those of keeping all, to the bit.

Each layout recomputes in one way, and each way runs under a layout; all meet under `pytest --whole`.
"""

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import ConfigurationError, MegatronStrategy, PipelineConfig, RecomputeConfig, StageLayout
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.trainer.setup import model_checks
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import WHOLE

GPT2 = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    vocab_size=37,
    max_sequence_length=8,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    init_std=0.2,
)
LLAMA = GPTConfig(
    num_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=37,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    tie_embeddings=False,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    init_std=0.2,
)
WAYS = {
    "all parts": RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "mlp")),
    "small parts": RecomputeConfig(granularity="selective", parts=("core_attention", "norm", "activation")),
    "full": RecomputeConfig(granularity="full", shard_saved_inputs=True),
    "first": RecomputeConfig(granularity="full", method="block"),
    "by 2": RecomputeConfig(granularity="full", num_layers=2),
    "offloaded": RecomputeConfig(offload=True),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"num_microbatches": 3}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2 sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_microbatches": 2}),
    "pp2 m3": (2, {"pipeline_model_parallel_size": 2, "num_microbatches": 3}),
    "pp2 collective": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "num_microbatches": 3,
            "pipeline": PipelineConfig(mode="collective"),
        },
    ),
    "vp2 pp2": (
        2,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "num_microbatches": 3},
    ),
    "ZB-H1 pp2": (
        2,
        {"pipeline_model_parallel_size": 2, "num_microbatches": 3, "pipeline": PipelineConfig(schedule="zb_h1")},
    ),
    "tp2 pp2": (
        4,
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_microbatches": 3},
    ),
}


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(37, (8,), generator=torch.Generator().manual_seed(index))


class Language(L.LightningModule):
    """Trains for two steps; remembers losses and the gradients before each optimizer step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model: GPTModel | None = None
        self.seen: list[tuple[float, dict[str, Tensor]]] = []

    def configure_model(self) -> None:
        self.model = GPTModel(self.config, seed=3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(batch, labels=batch.roll(-1, 1))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((float(outputs["loss"]), self.gradients))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer_of(world: int, strategy: MegatronStrategy, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def fit(world: int, settings: dict[str, Any], config: GPTConfig, way: RecomputeConfig | None, precision: Any) -> Any:
    module = Language(config)
    strategy = MegatronStrategy(**settings, recompute=way, timeout_seconds=60)
    trainer_of(world, strategy, precision=precision).fit(module, DataLoader(Rows(), batch_size=6))
    return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}


def ways_of(layout: str) -> list[str]:
    """How this layout recomputes: in every way, or in a sample in one, the next layout in the next of the list."""
    return list(WAYS) if WHOLE in os.environ else [list(WAYS)[list(LAYOUTS).index(layout) % len(WAYS)]]


def fits(layout: str, config: GPTConfig, precision: Any, ways: list[str]) -> list[Any]:
    world, settings = LAYOUTS[layout]
    return [fit(world, settings, config, way, precision) for way in (None, *(WAYS[name] for name in ways))]


def are_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(are_equal(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(are_equal, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_step_is_that_of_keeping_all(layout: str) -> None:
    config, precision = (LLAMA, "bf16-mixed") if layout in ("tp2 sp", "vp2 pp2") else (GPT2, "32-true")
    ways, world = ways_of(layout), LAYOUTS[layout][0]
    for found in run_on_ranks(world, fits, layout, config, precision, ways, init=False, timeout=120):
        kept, *recomputed = found
        steps, _ = kept
        assert len(steps) == 2 and steps[0][0] != steps[1][0]
        assert all(grad.abs().max() > 0 for grad in steps[0][1].values())
        same = {way: are_equal(ours, kept) for way, ours in zip(ways, recomputed, strict=True)}
        assert same == dict.fromkeys(ways, True)


# Wiring


def test_the_layers_of_a_model_get_the_settings_of_the_strategy_and_the_next_one_resets_them() -> None:
    module = Language(GPT2)
    module.configure_model()
    assert module.model is not None
    calls: list[str] = []
    module.model.get_submodule("layers.1").register_forward_pre_hook(lambda *_: calls.append("layer"))
    module.model.get_submodule("layers.1.mlp").register_forward_pre_hook(lambda *_: calls.append("mlp"))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    for way, expected in (
        (WAYS["full"], {"layer": 2, "mlp": 2}),
        (WAYS["all parts"], {"layer": 1, "mlp": 2}),
        (RecomputeConfig(), {"layer": 1, "mlp": 1}),
    ):
        model_checks.share_recomputation(module, way, Mesh.single())
        calls.clear()
        module.model(tokens, labels=tokens).backward()
        assert {name: calls.count(name) for name in ("layer", "mlp")} == expected


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch.float()).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def refusals(world: int, settings: dict[str, Any]) -> list[str]:
    shown = []
    for module, way in (
        (Language(GPT2), RecomputeConfig(granularity="selective", parts=("moe",))),
        (Plain(), RecomputeConfig(granularity="selective", parts=("mlp", "norm"))),
        *([(Plain(), RecomputeConfig(granularity="full"))] if world == 1 else []),
    ):
        trainer = trainer_of(world, MegatronStrategy(**settings, recompute=way, timeout_seconds=60))
        with pytest.raises(ConfigurationError) as raised:
            trainer.fit(module, DataLoader(Rows(), batch_size=6))
        shown.append(str(raised.value))
    return shown


def test_what_cannot_be_recomputed_is_reported_on_every_rank() -> None:
    for shown in [refusals(1, {}), *run_on_ranks(2, refusals, 2, LAYOUTS["pp2 m3"][1], init=False, timeout=120)]:
        assert "part 'moe' cannot act: the model has no expert layers; parts may be 'activation'" in shown[0]
        assert "this configuration has 2 faults" in shown[1] and "part 'norm' cannot act" in shown[1]
        assert all("needs a model of parts, and Plain has none" in text for text in shown[2:])


def test_a_stage_without_layers_is_no_fault() -> None:
    world, settings = LAYOUTS["pp2 m3"]
    run_on_ranks(world, stage_without_layers, settings, init=False, timeout=120)


def stage_without_layers(settings: dict[str, Any]) -> None:
    layout = PipelineConfig(layout=StageLayout(text="E|t*4L"))
    fit(2, {**settings, "pipeline": layout}, GPT2, WAYS["all parts"], "32-true")
