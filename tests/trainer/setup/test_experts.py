"""What a run asks of experts before its first step: optimizers that may have parts of them, own ranks, like buffers."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from lightning_megatron import ConfigurationError
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.config import AuxLoss, RouterConfig
from lightning_megatron.moe.router import Router
from lightning_megatron.optim.config import DeclaredScope, OptimizerConfig
from lightning_megatron.pipeline.module import PipelineModule
from lightning_megatron.sharding import Initial, shard_of
from lightning_megatron.trainer.setup import optimizer_checks
from lightning_megatron.trainer.setup.initial_sync import sync_module_states
from lightning_megatron.trainer.setup.model_checks import require_own_mesh
from lightning_megatron.trainer.setup.optimizer_checks import require_separable
from tests.harness.threads import new_group, run_on_threads
from tests.optim.expert_model import E, H, Kind, experts_on, layout, name_of

ROUTER = RouterConfig(
    num_experts=E,
    top_k=2,
    score_function="sigmoid",
    bias_update_rate=0.01,
    aux_losses=(AuxLoss(scope="global", coefficient=0.1),),
)


class OfAUser(SGD):
    """None of torch's own."""


def refused(mesh: Mesh, make: Any, kind: Kind = "replicated", update_scope: DeclaredScope = "auto") -> str:
    """What is said of an optimizer of experts and a dense matrix; nothing where it is taken."""
    experts = experts_on(mesh)
    optimizer: Optimizer = make([*experts.parameters(), nn.Parameter(torch.zeros(2, 2))], lr=0.1)
    config = OptimizerConfig(kind=kind, update_scope=update_scope)
    try:
        require_separable([optimizer], config, mesh, has_master_weights=kind == "distributed")
    except ConfigurationError as error:
        return str(error)
    return ""


CUT = [layout(2, 1, 1, 2, 1), layout(2, 1, 1, 1, 2), layout(4, 1, 1, 2, 2)]


@pytest.mark.parametrize("sizes", CUT, ids=name_of)
@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_experts_that_are_cut_are_refused_to_an_optimizer_whose_update_is_unknown(sizes: Sizes, kind: Kind) -> None:
    for rank in range(sizes.world):
        mesh = Mesh.imagine(rank, sizes)
        assert "OfAUser is none of torch's own, and expert parallelism cuts" in refused(mesh, OfAUser, kind)
        assert refused(mesh, OfAUser, kind, "parameter") == refused(mesh, Adafactor, kind) == ""
        assert refused(mesh, OfAUser, kind, "elementwise") == refused(mesh, AdamW, kind) == ""
        assert "LBFGS looks at all parameters" in refused(mesh, torch.optim.LBFGS, kind)


@pytest.mark.filterwarnings("ignore:OfAUser is none of torch's own")
def test_unsharded_experts_are_given_to_any_optimizer_that_takes_tensors_of_three_dims() -> None:
    mesh = Mesh.imagine(1, Sizes(world=2))
    for kind in ("replicated", "distributed"):
        assert refused(mesh, Adafactor, kind) == refused(mesh, OfAUser, kind) == ""  # type: ignore[arg-type]
    # torch's own wants matrices alone, on any number of devices.
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        Muon(experts_on(mesh).parameters())


def warned(world: Any, sizes: Sizes, kind: Kind) -> str:
    return refused(Mesh.build(sizes, world.rank(), new_group), OfAUser, kind)


@pytest.mark.parametrize("kind", ["replicated", "distributed"])
def test_edp_ranks_alone_make_an_optimizer_step_some_weights_of_many(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(optimizer_checks, "rank_zero_warn", lambda text: heard.append(text))
    # One copy of dense weights, and two of each expert.
    sizes = Sizes(world=2, tp=2, sequence_parallel=True)
    assert run_on_threads(2, lambda world: warned(world, sizes, kind)) == ["", ""]
    assert ["its step of a weight is taken to look at no other weight" in text for text in heard] == (
        [True, True] if kind == "distributed" else []
    )


class Buffers(nn.Module):
    """A router and experts, in a pipelined model and, of the router, outside of one."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.model = PipelineModule.from_modules({"router": router(mesh), "experts": experts_on(mesh)}, mesh=mesh)
        self.outside = router(mesh)


def router(mesh: Mesh) -> Router:
    return Router(ROUTER, H, tp=mesh.tp, cut=mesh.tp, name="router", initial=Initial())


def equalised(world: Any, sizes: Sizes) -> dict[str, torch.Tensor]:
    mesh = Mesh.build(sizes, world.rank(), new_group)
    module = Buffers(mesh)
    # More than float64 holds.
    own = 2**53 + 1 + world.rank()
    with torch.no_grad():
        for buffer in module.buffers():
            buffer.fill_(own if buffer.dtype == torch.int64 else 1.0 + world.rank())
        for parameter in module.parameters():
            parameter.fill_(world.rank())
    sync_module_states(module, mesh)
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    "sizes", [layout(4, 2, 1, 2, 1), layout(4, 1, 2, 4, 1), layout(4, 1, 1, 2, 1, pp=2)], ids=name_of
)
def test_buffers_of_a_router_become_those_of_the_first_holder_and_experts_stay_as_they_are(sizes: Sizes) -> None:
    by_rank = run_on_threads(4, lambda world: equalised(world, sizes))
    num_found = 0
    for rank, found in enumerate(by_rank):
        for name, tensor in found.items():
            num_found += name.startswith("model.router.")
            # The last stage has the first ranks.
            first = 0 if sizes.pp == 1 or name.startswith("outside") else rank // 2 * 2
            if name.endswith("expert_bias"):
                assert tensor.dtype == torch.float32 and tensor.unique().tolist() == [1.0 + first]
            elif name.endswith("global_tokens_per_expert"):
                assert tensor.dtype == torch.int64 and tensor.unique().tolist() == [2**53 + 1 + first]
            else:
                # Equal by construction, or other experts.
                assert tensor.unique().tolist() == [rank]
    assert num_found == 3 * 4 // sizes.pp


def test_experts_that_were_built_before_the_ranks_were_known_are_refused_where_ranks_share_them() -> None:
    module = nn.Module()
    module.layer = experts_on(Mesh.single())
    require_own_mesh(module, Mesh.imagine(1, Sizes(world=2)))
    for sizes, shown in (
        (layout(2, 1, 1, 2, 1), "layer.up (experts) was built for 1 ranks of ep, and the strategy has 2"),
        (layout(2, 1, 1, 1, 2), "layer.down (experts) was built for 1 ranks of etp, and the strategy has 2"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            require_own_mesh(module, Mesh.imagine(1, sizes))
        assert shown in str(caught.value) and "build it in configure_model" in str(caught.value)
    mesh = Mesh.imagine(1, CUT[2])
    module.layer = experts_on(mesh)
    require_own_mesh(module, mesh)
    assert all(shard_of(parameter).is_cut for parameter in module.parameters())
