"""Dynamic context parallelism with experts, which groups of different sizes share within every microbatch."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_megatron import DynamicContextConfig, MegatronStrategy
from lightning_megatron.models import GPTModel
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss, MoEConfig, RouterConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.dynamic_context.test_prefetch import MODEL, Record, Watching, fit
from tests.trainer.fits import parts_apart
from tests.trainer.layouts import QUIET

pytestmark = pytest.mark.filterwarnings(QUIET)

ROUTER = RouterConfig(
    num_experts=4,
    aux_losses=(AuxLoss(coefficient=0.3), AuxLoss(scope="global", coefficient=0.2)),
    z_loss=0.1,
    bias_update_rate=0.1,
)
DROPLESS = MoEConfig(router=ROUTER, ffn_hidden_size=8)
DROPPING = MoEConfig(router=ROUTER, ffn_hidden_size=8, layer_freq=2, capacity=ExpertCapacity(factor=1.0))


class Mixed(Watching):
    """The learner with experts."""

    moe = DROPLESS

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPTModel(replace(MODEL, add_bias_linear=False, moe=self.moe), seed=3)


class Dropping(Mixed):
    moe = DROPPING


def fit_experts(world: int, data: str, module: type[Mixed], settings: dict[str, Any]) -> Record:
    return fit(world, data, module=module, options={"max_epochs": 1}, **settings)


@pytest.mark.parametrize(
    ("world", "data", "module", "settings"),
    every_nth(
        [
            (4, "sparse", Dropping, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
            (4, "", Mixed, {"expert_model_parallel_size": 4}),
            (4, "", Mixed, {"pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 2}),
            (2, "empty", Dropping, {"expert_model_parallel_size": 2}),
        ],
        2,
    ),
)
def test_losses_and_weights_are_those_of_one_device(
    world: int, data: str, module: type[Mixed], settings: dict[str, Any]
) -> None:
    alone = {"strategy": MegatronStrategy()}
    [wanted] = run_on_ranks(1, fit_experts, 1, data, module, alone, init=False)
    records = run_on_ranks(world, fit_experts, world, data, module, settings, init=False, timeout=180)
    for record in records:
        assert record.losses.keys() == wanted.losses.keys() and len(wanted.losses) == 3
        assert max(abs(record.losses[step] - loss) for step, loss in wanted.losses.items()) < 1e-12
        assert parts_apart(record.weights, wanted.weights) < 1e-12
    if data == "" and world == 4 and "pipeline_model_parallel_size" not in settings:
        # Groups of several sizes met in the same layers.
        assert {1, 2} <= set().union(*(record.sizes for record in records))


def test_costs_are_measured_where_layers_have_experts() -> None:
    settings = {"expert_model_parallel_size": 2, "dynamic_context": DynamicContextConfig(max_tokens_per_rank=8)}
    first, second = run_on_ranks(2, fit_experts, 2, "", Mixed, settings, init=False, timeout=180)
    assert first.losses == second.losses and len(first.losses) == 3
