"""A stage with experts and dense weights on any mesh, trained as `Gradients` and an optimizer do it, and on one device.

    h = x dense^T        out = moe_forward(h) dense^T        loss = sum(out * out_grad) + sum(h cut^T * cut_grad)

`dense` is replicated over tp and used twice; under pp every stage holds it, and the first one alone has experts. `cut`
is cut over tp. Every rank has tokens of its own, as under sequence parallelism.

T tokens of a stage, H hidden, F features of an expert, E experts, K choices, O outputs (OUT) of `cut`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Mesh, NewGroup, Sizes
from lightning_megatron.moe.experts import ExpertAxes, Experts
from lightning_megatron.moe.token_dispatcher import AllToAllTokenDispatcher, moe_forward
from lightning_megatron.optim.bucket import ModelParam
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.data_parallel_comm import DataParallelComm
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.sharding import Initial, Shard, shard_of, shard_parameter
from tests.tensor.plain import fill, part_of

E, H, FFN, K, OUT = 8, 4, 5, 2, 6
# FFN is odd: two ranks of etp have padding.
NUM_TOKENS, NUM_MICROBATCHES, NUM_STEPS = 24, 2, 3
FACTOR, MAX_NORM = 0.125, 0.3
SHAPES = {"dense": (H, H), "cut": (OUT, H), "experts.up": (E, FFN, H), "experts.down": (E, H, FFN)}
Kind = Literal["replicated", "distributed"]


def layout(world: int, tp: int, cp: int, ep: int, etp: int, pp: int = 1) -> Sizes:
    return Sizes(world=world, tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, sequence_parallel=tp > 1)


LAYOUTS = [
    layout(4, 1, 1, 2, 1),
    layout(4, 1, 1, 4, 1),
    layout(4, 2, 1, 2, 2),
    layout(4, 2, 2, 4, 1),
    layout(4, 2, 1, 1, 1),
    layout(4, 1, 2, 1, 2),
    layout(8, 2, 2, 2, 2),
    layout(8, 2, 1, 4, 1),
    layout(8, 2, 1, 2, 1, pp=2),
]


def name_of(sizes: Sizes) -> str:
    return "-".join(f"{name}{sizes.of(name)}" for name in ("pp", "dp", "cp", "tp", "edp", "ep", "etp"))


def drawn(key: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(place * ord(letter) for place, letter in enumerate(key, 1)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def true_values(num_stages: int) -> dict[str, Tensor]:
    """The unsplit model, by name."""
    values = {"model.dense": drawn("dense", *SHAPES["dense"])}
    for stage in range(num_stages):
        for name in ("cut", "experts.up", "experts.down") if stage == 0 else ("cut",):
            values[f"model.{stage}.{name}"] = drawn(f"{stage}.{name}", *SHAPES[name])
    return values


class Microbatch:
    """The tokens of a stage, their experts and gradients."""

    def __init__(self, step: int, microbatch: int, stage: int) -> None:
        key = f"{step}.{microbatch}.{stage}"
        self.x_TH, self.out_grad_TH = drawn(f"x{key}", NUM_TOKENS, H), drawn(f"g{key}", NUM_TOKENS, H)
        self.cut_grad_TO = drawn(f"c{key}", NUM_TOKENS, OUT)
        # In the second step only two experts get tokens: some ranks have none. Some tokens choose one expert only.
        scores_TE = drawn(f"s{key}", NUM_TOKENS, E)
        if step == 1:
            scores_TE[:, 2:] = -9.0
        self.expert_ids_TK = scores_TE.topk(K, dim=1).indices
        self.expert_ids_TK[::3, 1] = -1
        self.probs_TK = drawn(f"w{key}", NUM_TOKENS, K).sigmoid()


def microbatches(step: int, stage: int) -> Iterable[Microbatch]:
    return (Microbatch(step, microbatch, stage) for microbatch in range(NUM_MICROBATCHES))


# --- on one device ----------------------------------------------------------------------------------------------------


def plain_loss(named: dict[str, Tensor], batch: Microbatch, stage: int) -> Tensor:
    dense = named["model.dense"]
    h_TH = batch.x_TH @ dense.t()
    loss = (h_TH @ named[f"model.{stage}.cut"].t() * batch.cut_grad_TO).sum()
    if stage == 0:
        weights_TE = torch.zeros(NUM_TOKENS, E, dtype=torch.float64)
        weights_TE.scatter_add_(1, batch.expert_ids_TK.clamp(min=0), batch.probs_TK * (batch.expert_ids_TK >= 0))
        up, down = named["model.0.experts.up"], named["model.0.experts.down"]
        h_TH = torch.einsum("te,tef,ehf->th", weights_TE, F.gelu(torch.einsum("th,efh->tef", h_TH, up)), down)
    return loss + (h_TH @ dense.t() * batch.out_grad_TH).sum()


def plain_run(num_stages: int) -> tuple[dict[str, nn.Parameter], list[float]]:
    """The weights after all steps, and the norm of each."""
    named = {name: nn.Parameter(value) for name, value in true_values(num_stages).items()}
    optimizer, norms = optimizer_of(named), []
    for step in range(NUM_STEPS):
        for stage in range(num_stages):
            for batch in microbatches(step, stage):
                (FACTOR * plain_loss(dict(named), batch, stage)).backward()
        norms.append(nn.utils.clip_grad_norm_(named.values(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    return named, norms


def optimizer_of(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups; weights decay, so that a step without a gradient is another one than a step with zeros."""
    experts = [parameter for name, parameter in named.items() if "experts" in name]
    rest = [parameter for name, parameter in named.items() if "experts" not in name]
    return torch.optim.AdamW([{"params": experts, "lr": 0.02}, {"params": rest}], lr=0.01, weight_decay=0.1)


# --- on a mesh --------------------------------------------------------------------------------------------------------


class Stage(nn.Module):
    """This rank's part of its stage."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh, self.stage = mesh, mesh.pp.rank
        self.dense = shard_parameter(SHAPES["dense"], initial=Initial(), replicas=(mesh.tp,), partial=mesh.sp)
        self.cut = shard_parameter(SHAPES["cut"], initial=Initial(), dim=0, axis=mesh.tp)
        self.experts: Experts | None = experts_on(mesh) if self.stage == 0 else None
        self.double()

    def named(self) -> dict[str, nn.Parameter]:
        """In the order of the model: the names of the unsplit one."""
        prefix = f"model.{self.stage}."
        return {
            ("model.dense" if name == "dense" else prefix + name): parameter
            for name, parameter in self.named_parameters()
        }

    def loss(self, batch: Microbatch) -> Tensor:
        h_TH = self.own(batch.x_TH) @ self.dense.t()
        whole_TH = differentiable.all_gather(h_TH, self.mesh.tp)
        cut_grad_TO = self.of_data_parallel_rank(batch.cut_grad_TO).chunk(self.mesh.tp.size, dim=1)[self.mesh.tp.rank]
        loss = (whole_TH @ self.cut.t() * cut_grad_TO).sum()
        if self.experts is not None:
            dispatcher = AllToAllTokenDispatcher(E, ep=self.mesh.axis("ep"), etp=self.mesh.axis("etp"))
            expert_ids_TK, probs_TK = self.own(batch.expert_ids_TK), self.own(batch.probs_TK)
            h_TH, _ = moe_forward(h_TH, expert_ids_TK, probs_TK, dispatcher=dispatcher, experts=self.experts)
        return loss + (h_TH @ self.dense.t() * self.own(batch.out_grad_TH)).sum()

    def of_data_parallel_rank(self, full: Tensor) -> Tensor:
        """The tokens of this rank of dp and cp."""
        dp_cp = self.mesh.axis("dp+cp")
        return full.chunk(dp_cp.size)[dp_cp.rank]

    def own(self, full: Tensor) -> Tensor:
        """The tokens of this rank."""
        return self.of_data_parallel_rank(full).chunk(self.mesh.tp.size)[self.mesh.tp.rank]


def experts_on(mesh: Mesh) -> Experts:
    axes = {name: mesh.axis(name) for name in ("ep", "etp", "edp")}
    return Experts(E, H, FFN, activation="gelu", initial=Initial(), output_initial=Initial(), axes=ExpertAxes(**axes))


class Run:
    """One rank's stage in training."""

    def __init__(self, mesh: Mesh, new_group: NewGroup, config: OptimizerConfig, *, no_split: bool = False) -> None:
        self.mesh, self.model = mesh, Stage(mesh)
        self.named = self.model.named()
        for name, value in true_values(mesh.pp.size).items():
            if name in self.named:
                fill(self.named[name], value)
        self.optimizer = optimizer_of(self.named)
        inside = {name for name in self.named if name.startswith("model.")}
        self.gradients = Gradients(
            self.named.items(),
            inside,
            mesh,
            new_group,
            torch.device("cpu"),
            config=config,
            no_split=no_split,
        )
        self.main = MasterWeights(self.gradients, [self.optimizer]) if config.kind == "distributed" else None
        self.dp_comm = DataParallelComm(
            self.gradients, self.main, {("model", name): [parameter] for name, parameter in self.named.items()}
        )
        self.norms: list[float] = []

    def step(self, number: int) -> None:
        dp_comm, stage = self.dp_comm, self.mesh.pp.rank
        # As parts of a model do, each for its own.
        for name in self.named:
            dp_comm.enter_part(("model", name))
        self.gradients.free(dropped=False)
        dp_comm.begin_backwards()
        for microbatch, batch in enumerate(microbatches(number, stage)):
            loss = self.model.loss(batch)
            if microbatch == NUM_MICROBATCHES - 1:
                dp_comm.expect(stage)
            loss.backward()
        dp_comm.complete(stage)
        factor = torch.tensor(FACTOR, dtype=torch.float64)
        self.gradients.reduce(outside_over_stages=True, factor=factor)
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.norms.append(self.gradients.clip(MAX_NORM, stepped).item())
        dp_comm.prepare_step()
        self.optimizer.step()
        dp_comm.update_params()
        self.optimizer.zero_grad()

    def finish(self) -> None:
        for number in range(NUM_STEPS):
            self.step(number)
        self.dp_comm.release()


class Given:
    """Parameters on one rank whose gradients are given, so that they do not depend on the weights.

    Each replica has a share of a gradient, and the shares sum up to 1; `is_exact`: the first one has all of it, so that
    the sum has the same bits on every mesh.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        mesh: Mesh,
        new_group: NewGroup,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        *,
        low: torch.dtype | None = None,
        is_exact: bool = False,
    ) -> None:
        self.optimizer, self.is_exact = optimizer, is_exact
        self.gradients = Gradients(
            named.items(), set(named), mesh, new_group, torch.device("cpu"), config=config, low=low
        )
        has_master_weights = config.kind == "distributed" or low is not None
        self.main = MasterWeights(self.gradients, [optimizer]) if has_master_weights else None
        self.dp_comm = DataParallelComm(self.gradients, self.main)

    def step(self, number: int) -> None:
        self.gradients.free(dropped=False)
        for param in self.gradients.params:
            own = torch.zeros(param.parameter.shape)
            part = part_of(gradient_of(param.name, param.shard.global_shape, number), param.shard)
            param.shard.valid(own).copy_(self._share(param) * part)
            param.parameter.grad = own.to(param.parameter.grad_dtype or param.parameter.dtype)
        self.gradients.reduce(outside_over_stages=True)
        self.dp_comm.prepare_step()
        self.optimizer.step()
        self.dp_comm.update_params()
        self.optimizer.zero_grad()

    def _share(self, param: ModelParam) -> float:
        axes = [axis for axis in (param.replicas, param.shard.partial, param.holders) if axis is not None]
        if self.is_exact:
            return float(all(axis.is_first for axis in axes))
        return math.prod(2 * (axis.rank + 1) / (axis.size * (axis.size + 1)) for axis in axes)


def gradient_of(name: str, shape: Sequence[int], step: int) -> Tensor:
    """That of the unsplit parameter."""
    return drawn(f"{step}{name}", *shape).float()


def furthest(named: dict[str, nn.Parameter], wanted: dict[str, nn.Parameter]) -> float:
    """How far this rank's parts are from those of one device, padding included."""
    apart = 0.0
    for name, parameter in named.items():
        part = part_of(wanted[name].detach(), shard_of(parameter))
        own = shard_of(parameter).valid(parameter.detach())
        apart = max(apart, float((own - part).abs().max()) if own.numel() else 0.0)
        assert parameter.count_nonzero() == own.count_nonzero(), f"padding of {name}"
    return apart


def uncounted(parameter: nn.Parameter, **changes: Any) -> None:
    """Changes what a parameter's shard says, for tests that show that it matters."""
    shard: Shard = shard_of(parameter)
    parameter.shard = dataclasses.replace(shard, **changes)  # type: ignore[attr-defined]
