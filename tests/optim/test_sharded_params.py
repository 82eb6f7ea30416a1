"""Code of users that reads and writes sharded weights: it sees one device's, or is told that it cannot."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.sharded_params import absent_names
from tests.any_module import networks
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, Layout, make_trainer

NUM_ROWS = 24


def loader(batch_size: int) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    size = (NUM_ROWS, networks.TOKENS)
    return DataLoader(torch.randint(networks.VOCABULARY, size, generator=generator), batch_size)  # type: ignore[arg-type]


class Fits(networks.TrainsOverTensor):
    """Predicts tokens, and notes what it sees of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.net(batch)[0][:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def note(self) -> None:
        self.notes.append(float(torch.stack([one.detach().abs().sum() for one in self.parameters()]).sum()))


class AssignsData(Fits):
    def on_train_batch_end(self, *_: Any) -> None:
        for one in self.parameters():
            one.data = one.data.clamp(-0.05, 0.05)


class WritesInStep(Fits):
    """Normalises rows of its embedding, which belong to no layer."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.table.copy_(F.normalize(self.table, dim=1))
        return self.loss(batch)

    def configure_model(self) -> None:
        super().configure_model()
        self.table = self.net.tokens.weight


class WritesInLayer(Fits):
    """Has layers that keep their weights on a sphere, by hooks."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            block.register_forward_pre_hook(_scale)


@torch.no_grad()
def _scale(block: Any, _: Any) -> None:
    weight = block.up.weight
    weight.data.div_(weight.norm())


class WritesAfterStep(Fits):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(self._shrink)
        return optimizer

    @torch.no_grad()
    def _shrink(self, *_: Any) -> None:
        for one in self.parameters():
            one.mul_(0.9)


class ReadsInStep(Fits):
    """Has a penalty that NaN would not show in."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        signs = [torch.sign(one.detach()).mean() for one in self.parameters()]
        return self.loss(batch) * (1 + 0.1 * torch.stack(signs).sum())


class ReadsInEvaluation(Fits):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.notes.append(sum(int((one > 0).sum()) for one in self.parameters()))


class ReadsBeforeBackward(Fits):
    def on_before_backward(self, loss: Tensor) -> None:
        self.note()

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.notes.append(float(self.net.blocks[1].up.weight.detach().sign().sum()))
        return batch


class ZeroesOfAnAccumulatedBatch(Fits):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note()
        with torch.no_grad():
            self.net.blocks[1].up.weight.zero_()


class ReadsOfASkippedStep(Fits):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) * (float("inf") if batch_idx == 1 else 1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.note()


class WritesInPlaceToOutputs(Fits):
    """Changes in place what its layers return, which is a view of what their linears computed."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net.tokens(batch) + self.net.places
        for block in self.net.blocks:
            block.forward = block.down.forward
            x = x + F.relu_(block(F.pad(x, (0, 3 * networks.WIDTH))))
        return F.cross_entropy(self.net.head(self.net.norm(x))[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class ReadsByItsOwnName(Fits):
    """Reads matrices of its layers, which have names that it gave them, where NaN would not show."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            block.mixes = nn.ParameterList([torch.linspace(-1, 1, 256).view(16, 16).double()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch) + sum(F.relu(block.mixes[0]).sum() for block in self.net.blocks)


class Untied(Fits):
    """Has a head that is not the embedding."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.head.weight = nn.Parameter(self.net.head.weight.detach().clone())


class UsesItsHeadEarlier(Untied):
    """Has losses of its first block, too, from the second batch on: the gradient of its head is complete later."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 0:
            return loss
        x = self.net.blocks[0](self.net.tokens(batch) + self.net.places)
        logits = self.net.head(x)[:, :-1].flatten(0, 1)
        return loss + F.cross_entropy(logits, batch[:, 1:].flatten())


class UnfreezesKinds(Untied):
    """Trains an embedding of kinds, which shares a bucket with its head, from the second batch on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.kinds = nn.Embedding(2, networks.WIDTH, dtype=torch.float64)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.net.kinds.requires_grad_(batch_idx > 0)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net.run_blocks(self.net.tokens(batch) + self.net.places + self.net.kinds(batch % 2))
        return F.cross_entropy(self.net.head(self.net.norm(x))[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


CASES: list[type[Fits]] = [
    UsesItsHeadEarlier,
    UnfreezesKinds,
    WritesInPlaceToOutputs,
    ReadsByItsOwnName,
    AssignsData,
    WritesInStep,
    WritesInLayer,
    WritesAfterStep,
    ReadsInStep,
    ReadsInEvaluation,
    ReadsBeforeBackward,
    ZeroesOfAnAccumulatedBatch,
]


def fitted(case: type[Fits], layout: Layout, **optimizer: Any) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after one epoch, and what the module noted."""
    warnings.filterwarnings("ignore", ".* may read weights")
    module = case()
    if optimizer:
        layout = Layout(world=layout.world, optimizer=OptimizerConfig(**optimizer))
    is_accumulated = case is ZeroesOfAnAccumulatedBatch
    options: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 3, "limit_val_batches": 1}
    options |= {"use_distributed_sampler": True, "accumulate_grad_batches": 2 if is_accumulated else 1}
    validation = loader(8 // layout.world) if case is ReadsInEvaluation else None
    make_trainer(layout, **options).fit(module, loader(8 // layout.world), validation)
    return {name: one.detach().clone() for name, one in module.state_dict().items()}, module.notes


ALL_EACH: dict[str, Any] = {"kind": "distributed_parameters"}


def fitted_all(names: list[type[Fits]]) -> list[tuple[dict[str, Tensor], list[float]]]:
    """What ranks find of several modules, one after another."""
    return [fitted(case, Layout(world=2), **ALL_EACH) for case in names]


def test_code_of_users_sees_and_changes_the_weights_of_one_device() -> None:
    wanted = [fitted(case, PLAIN) for case in CASES]
    for found in run_on_ranks(2, fitted_all, CASES, init=False):
        for case, (weights, notes), (expected, noted) in zip(CASES, found, wanted, strict=True):
            assert notes == pytest.approx(noted), case
            for name, one in expected.items():
                torch.testing.assert_close(weights[name], one, rtol=1e-9, atol=1e-9, msg=f"{case} {name}")


def notes_of_skipped() -> list[list[float]]:
    kinds = ("distributed_parameters", "distributed_gradients")
    return [fitted(ReadsOfASkippedStep, Layout(world=2), kind=kind, on_nonfinite="skip")[1] for kind in kinds]


def test_hooks_after_a_skipped_step_see_weights() -> None:
    for found, wanted in run_on_ranks(2, notes_of_skipped, init=False):
        assert found == pytest.approx(wanted)
        assert found[0] == found[1] != found[2]


class Zeroes(Fits):
    """Writes to a layer's weight where no code can be seen to read it."""

    def configure_model(self) -> None:
        super().configure_model()
        self.own = [self.net.blocks[2].up.weight]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.own[0].zero_()
        return self.loss(batch)


class DropsLayers(Fits):
    """Leaves out another layer on each rank."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net.tokens(batch) + self.net.places
        for number, block in enumerate(self.net.blocks):
            x = x if number == 1 + self.global_rank else block(x)
        return F.cross_entropy(self.net.head(self.net.norm(x))[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


class DropsInEvaluation(Fits):
    """Runs layers in another order on each rank, in validation alone."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = self.net.tokens(batch) + self.net.places
        for number in (0, 2, 0, 3) if self.global_rank else (0, 2, 1, 3):
            x = self.net.blocks[number](x)


class CallsUnevenly(Fits):
    """Generates, on one rank longer than on the other."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        with strategy.whole_weights():
            for _ in range(1 + 2 * self.global_rank):
                assert self.net(batch)[0].isfinite().all()


class ScalesRows(Fits):
    """Has an embedding that writes to the rows it looks up."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.tokens.max_norm = 0.5


class WritesToGroups(Fits):
    """Decays the weights that it finds in its optimizer."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.data.mul_(0.9)


class WritesToGroupsLate(WritesToGroups):
    """Decays after the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Nothing."""

    def on_train_batch_end(self, *_: Any) -> None:
        super().on_before_optimizer_step(self.trainer.optimizers[0])


class PenalisesGroups(Fits):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        weights = [one for group in self.trainer.optimizers[0].param_groups for one in group["params"]]
        return self.loss(batch) + sum(one.square().sum() for one in weights)


class Unfreezes(Fits):
    """Gives its optimizer later what was frozen."""

    def configure_optimizers(self) -> Any:
        self.net.blocks.requires_grad_(False)
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)

    def on_train_batch_start(self, *_: Any) -> None:
        self.net.blocks.requires_grad_(True)
        self.trainer.optimizers[0].add_param_group({"params": list(self.net.blocks.parameters())})


class Held:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class ReturnsObjects(Fits):
    """Has layers whose output is an object of a class of its own."""

    def loss(self, batch: Tensor) -> Tensor:
        x = self.net.tokens(batch) + self.net.places
        for block in self.net.blocks:
            block.forward = lambda x, down=block.down: Held(down(F.pad(x, (0, 3 * networks.WIDTH))))
            x = block(x).hidden
        return self.net.head(x).square().mean()


class Fails(Fits):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        raise ValueError("its own")


def errors(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing was said"


def refused() -> list[str]:
    """What is said of modules that cannot be trained so, and of a second fit after a failed one."""
    layout = Layout(world=2, optimizer=OptimizerConfig(kind="distributed_parameters"))
    said = []
    for case in (Zeroes, DropsLayers, DropsInEvaluation, CallsUnevenly, ScalesRows):
        trainer = make_trainer(layout, max_epochs=1, limit_val_batches=1)
        validation = loader(4) if case in (DropsInEvaluation, CallsUnevenly) else None
        said.append(errors(lambda: trainer.fit(case(), loader(4), validation)))  # noqa: B023
    module = Fails()
    said += [errors(lambda: make_trainer(layout).fit(module, loader(4))) for _ in range(2)]
    return said


REFUSED: dict[type[Fits], str] = {
    WritesToGroups: "param_groups of an optimizer were changed between its steps, that of net.",
    WritesToGroupsLate: "param_groups of an optimizer were changed between its steps, that of net.",
    PenalisesGroups: "in the param_groups of an optimizer: those are master weights, or the part of a rank",
    Unfreezes: "param group 1 of AdamW got a parameter after training began",
    ReturnsObjects: "net.blocks.0 returned no tensor, or a value in which none is found",
}


def fit_refused(case: type[Fits], kind: Any, precision: str) -> str:
    layout = Layout(world=2, optimizer=OptimizerConfig(kind=kind))
    return errors(lambda: fit_tiny(make_trainer(layout, max_epochs=1, precision=precision), case()))


def fit_tiny(trainer: Any, module: Fits) -> None:
    warnings.filterwarnings("ignore", ".* may read weights")
    trainer.fit(module, loader(4))


@pytest.mark.parametrize("case", REFUSED)
def test_weights_of_an_optimizer_and_outputs_without_tensors_are_refused(case: type[Fits]) -> None:
    for said in run_on_ranks(2, fit_refused, case, "distributed_parameters", "64-true", init=False):
        assert REFUSED[case] in said


@pytest.mark.parametrize("case", [WritesToGroups, PenalisesGroups])
def test_master_weights_that_somebody_writes_or_penalises_are_refused(case: type[Fits]) -> None:
    for said in run_on_ranks(2, fit_refused, case, "replicated", "bf16-mixed", init=False):
        assert REFUSED[case].partition(",")[0] in said


def test_writes_to_absent_weights_and_ranks_that_part_ways_are_refused() -> None:
    for zeroed, dropped, evaluated, generated, scaled, failed, again in run_on_ranks(2, refused, init=False):
        assert "net.blocks.2.up.weight was written to" in zeroed and '"distributed_gradients"' in zeroed
        for said in (dropped, evaluated):
            assert "ran different parts of the model" in said and "rank 1: net.blocks." in said
        assert generated == "nothing was said"
        assert "net.tokens (Embedding with max_norm) scales the rows of its weight" in scaled
        assert failed == "its own" and "failed, and each rank kept its shards alone" in again


def used_after_a_failure() -> tuple[list[str], str]:
    layout = Layout(world=2, optimizer=OptimizerConfig(kind="distributed_parameters"))
    module = Fails()
    with pytest.raises(ValueError, match="its own"):
        make_trainer(layout, max_epochs=1).fit(module, loader(4))
    # As `cpu()` does beside a GPU, it gives each weight memory of its own.
    module.float()
    module.double()
    with pytest.raises(RuntimeError) as error:
        make_trainer(layout).fit(module, loader(4))
    return absent_names(module.named_parameters()), str(error.value)


def test_absent_weights_that_were_moved_are_found_by_the_next_run() -> None:
    for names, said in run_on_ranks(2, used_after_a_failure, init=False):
        assert names and all(name in said for name in names) and "have no values" in said
    # One number of many does not make a weight absent.
    weights = {"one": torch.tensor([[float("nan"), 1.0]]), "all": torch.full((2, 2), float("nan"))}
    assert absent_names(weights.items()) == ["all"]
