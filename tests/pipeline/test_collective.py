"""A model call as a collective of all stages: real outputs on every stage, and right gradients for the caller."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.pipeline.collective import CollectiveCall
from lightning_megatron.pipeline.module import PipelineModule
from tests.harness.ranks import run_on_ranks
from tests.pipeline.meshes import make_mailbox, make_mesh

CPU = torch.device("cpu")


class Rich(PipelineModule):
    """Takes a dict and a scale, reads both on every stage, returns a dict; knows what its loss is a mean over."""

    def prepare(self, batch: dict[str, Tensor], scale: Tensor) -> tuple[Tensor, Any]:
        return batch["x"], (batch, scale)

    def run_part(self, name: str, hidden: Tensor, context: Any) -> Tensor:
        batch, scale = context
        output: Tensor = self.get_submodule(name)(hidden) * scale + batch["x"]
        return output

    def run_stage(self, stage: int, hidden: Any, context: Any) -> Any:
        hidden = super().run_stage(stage, hidden, context)
        if stage < self.mesh.sizes.num_stages - 1:
            return hidden
        batch, _ = context
        self.loss_weight = batch["mask"].sum()
        loss = (hidden.square().sum(-1) * batch["mask"]).sum() / self.loss_weight.clamp(min=1)
        return {"loss": loss, "hidden": hidden, "chosen": hidden.argmax(-1), "name": "rich"}


def run(mesh: Mesh, num_microbatches: int, *, train: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    made = {f"l{i}": nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for i in range(4)}
    from_parts = PipelineModule.from_modules(made, mesh=mesh)
    model = Rich.__new__(Rich)
    model.__dict__.update(from_parts.__dict__)
    model.train(train)
    if mesh.pp.size > 1:
        model.driver = CollectiveCall(mesh.pp, make_mailbox(mesh), CPU, lambda rows: min(rows, num_microbatches))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    found: dict[str, Any] = {}
    with torch.set_grad_enabled(train):
        first = model({"x": x, "mask": mask}, scale)
        # Dependent on the first, and branching on its value.
        second = model({"x": x + first["hidden"], "mask": mask if first["loss"] > 0 else 1 - mask}, scale)
        total = first["loss"] + second["hidden"].square().mean() + second["loss"] * 2
    if train:
        total.backward()
        found["grads"] = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad, "scale": scale.grad}
    assert not first["chosen"].requires_grad and first["hidden"].requires_grad == train
    assert model.loss_weight is not None
    found["values"] = [first["loss"], second["hidden"], total, model.loss_weight]
    found["values"] = [value.detach() for value in found["values"]]
    found["plain"] = (first["chosen"].tolist(), first["name"])
    return found


def on_stages(sizes: Sizes, num_microbatches: int) -> list[dict[str, Any]]:
    mesh = make_mesh(sizes)
    return [run(mesh, num_microbatches, train=train) for train in (True, False)]


@pytest.mark.parametrize(
    ("sizes", "num_microbatches"),
    [
        (Sizes(world=2, pp=2), 1),
        (Sizes(world=2, pp=2), 3),
        (Sizes(world=4, pp=4), 2),
        (Sizes(world=2, pp=2, vp=2), 3),
        (Sizes(world=2, pp=2, vp=2, placement="v"), 3),
    ],
    ids=lambda value: f"pp{value.pp}-v{value.vp}-{value.placement}" if isinstance(value, Sizes) else str(value),
)
def test_a_call_returns_on_every_stage_what_the_unsplit_model_returns(sizes: Sizes, num_microbatches: int) -> None:
    wanted = [run(Mesh.single(), 1, train=train) for train in (True, False)]
    covered: set[str] = set()
    for rank in run_on_ranks(sizes.pp, on_stages, sizes, num_microbatches):
        for found, expected in zip(rank, wanted, strict=True):
            assert found["plain"] == expected["plain"]
            torch.testing.assert_close(found["values"], expected["values"], rtol=1e-12, atol=1e-12)
        for name, grad in rank[0]["grads"].items():
            torch.testing.assert_close(grad, wanted[0]["grads"][name], rtol=1e-11, atol=1e-12)
        covered |= rank[0]["grads"].keys()
    assert covered == wanted[0]["grads"].keys()
    assert wanted[0]["grads"]["scale"].abs() > 0.1


def told_weights() -> list[Tensor | None]:
    """The loss weights after a call of a model that says one, and of one that does not."""
    mesh = make_mesh(Sizes(world=2, pp=2))
    found: list[Tensor | None] = []
    for kind in (Rich, PipelineModule):
        model = kind.__new__(kind)
        made = {f"l{i}": nn.Linear(4, 4) for i in range(2)}
        model.__dict__.update(PipelineModule.from_modules(made, mesh=mesh).__dict__)
        model.driver = CollectiveCall(mesh.pp, make_mailbox(mesh), CPU, lambda rows: 3)
        x = torch.ones(5, 4)
        model({"x": x, "mask": torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])}, x) if kind is Rich else model(x)
        found.append(model.loss_weight)
    return found


def test_a_call_leaves_a_loss_weight_only_where_the_model_set_one() -> None:
    for rich, silent in run_on_ranks(2, told_weights):
        assert rich is not None and rich.item() == 3
        # Rows are not what somebody's loss is a mean over, as soon as the model is called on others than the batch's.
        assert silent is None
