"""Networks that a run has cut are what they were, with whole weights, once the run has ended."""

import copy
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, checkpoint, hf
from lightning_megatron.any_module.uncut import Uncut, note_uncut, take_uncut
from lightning_megatron.mesh import Mesh
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.sharding import sharded_parameters
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches, config_of
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import PLAIN, QUIET, Layout, make_trainer

pytestmark = pytest.mark.filterwarnings(QUIET)

OVER_ALL = Layout(world=4, tp=2, pp=2, sp=True, microbatches=2)
LAYOUTS = {
    # A tied embedding, on both stages, whose linears of torch put off their weight gradients.
    "gpt2": Layout(world=2, pp=2, vp=2, microbatches=2, schedule="zb_v"),
    # Experts, and a count of them.
    "qwen3_moe": Layout(world=4, ep=2, pp=2, microbatches=2),
    # An attention that is looked up by a name, and heads that are counted.
    "llama": Layout(world=4, cp=2, tp=2, optimizer=OptimizerConfig(kind="distributed_parameters")),
    # Soft caps, rows of an embedding, tokens of a rank.
    "gemma2": OVER_ALL,
}


def rows() -> list[dict[str, Tensor]]:
    return [{key: one[row] for key, one in batch.items()} for batch in batches() for row in range(8)]


def loader(layout: Layout) -> Any:
    return DataLoader(rows(), batch_size=8 // layout.dp)


def fitted(module: L.LightningModule, layout: Layout) -> L.Trainer:
    """A Trainer that has trained the module for two steps."""
    trainer = make_trainer(layout, max_steps=2, max_epochs=-1, use_distributed_sampler=True)
    trainer.fit(module, loader(layout) if isinstance(module, Causal) else networks.loader(networks.ROWS // layout.dp))
    return trainer


def structure(module: nn.Module) -> list[Any]:
    """All that makes a module, by its name: class, attributes, kinds and order of weights, number of hooks."""
    found = []
    for name, child in module.named_modules():
        held = vars(child)
        of_lightning = isinstance(child, L.LightningModule)
        # `hf.save_pretrained` goes on knowing the ranks that write one folder together.
        left_out = ("_config", "_losses", "_lightning_megatron_ranks")
        keys = [] if of_lightning else sorted(key for key in held if not key.endswith(left_out))
        weights = [(key, type(one), one.requires_grad) for key, one in child._parameters.items() if one is not None]
        hooks = [len(one) for key, one in held.items() if key.endswith(("_hooks", "_kwargs", "_called"))]
        numbers = {key: value for key, value in held.items() if isinstance(value, (int, float, str))}
        # A parametrized module has a class of its own, made from the one before.
        kind = type(child).__mro__[int(hasattr(child, "parametrizations"))]
        found.append(
            (name, kind, child.training, keys, weights, list(child._buffers), hooks, {} if of_lightning else numbers)
        )
    return found


def weights_and_loss(module: Any) -> tuple[dict[str, Tensor], Tensor]:
    """All weights and buffers, and the loss of a batch outside of a run."""
    with torch.no_grad():
        loss = module.training_step(batches()[0], 0)
    return {name: one.detach().clone() for name, one in [*module.named_parameters(), *module.named_buffers()]}, loss


def on_one_device(model_type: str) -> tuple[list[Any], dict[str, Tensor], Tensor]:
    module = Causal(model_type)
    with torch.device("cpu"):
        fitted(module, PLAIN)
    return structure(module), *weights_and_loss(module)


def restored(model_type: str, layout: Layout) -> tuple[list[Any], dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """The same of a module after a run on a layout, and its weights after two more steps on another layout."""
    module = Causal(model_type)
    strategy: Any = fitted(module, layout).strategy
    of_restored = structure(module), *weights_and_loss(module)
    # What is whole stays as it is.
    strategy.restore_networks()
    assert structure(module) == of_restored[0]
    fitted(module, Layout(world=layout.world))
    return *of_restored, weights_and_loss(module)[0]


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_a_model_of_transformers_is_what_it_was(model_type: str) -> None:
    layout = LAYOUTS[model_type]
    [(shape, weights, loss)] = run_on_ranks(1, on_one_device, model_type, init=False)
    for found_shape, found_weights, found_loss, later in run_on_ranks(
        layout.world, restored, model_type, layout, init=False
    ):
        assert found_shape == shape
        # Norms of transformers compute in float32; two steps move a weight by 2e-3.
        torch.testing.assert_close(found_weights, weights, rtol=0, atol=1e-6)
        torch.testing.assert_close(found_loss, loss, rtol=1e-6, atol=0)
        # Another layout has trained it since, on the same batches once more.
        assert all(torch.isfinite(one).all() for one in later.values())
        moved = max(float((later[name] - one).abs().max()) for name, one in weights.items())
        assert moved > 1e-4


class TrainsChain(L.LightningModule):
    """A chain of layers, of which an `nn.Sequential` is one network, with two names, beside a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(*[nn.Linear(networks.WIDTH, networks.WIDTH) for _ in range(4)])
        self.also = self.net
        self.head = nn.Linear(networks.WIDTH, networks.WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.linspace(-1, 1, networks.WIDTH, dtype=self.head.weight.dtype).expand(2, -1)
        return self.head(self.net(x)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TrainsPlanned(networks.TrainsOverTensor):
    """Sets what is its own during a run, and has a hook of its own."""

    def configure_optimizers(self) -> Any:
        # Of gradients that are zero but for rounding, as those of keys' biases, AdamW would make steps.
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self.net.blocks[0].seen = 1
        self.net.blocks[1].up.register_forward_hook(lambda *_: None)
        self.net.blocks[2].requires_grad_(False)
        nn.utils.parametrizations.weight_norm(self.net.head)
        self.net.norm = nn.Sequential(self.net.norm)
        self.net.head.register_forward_hook(lambda module, args, output: 2 * output)


def own_network(kind: type[L.LightningModule], layout: Layout) -> tuple[list[Any], Any, Any]:
    module = kind()
    fitted(module, layout)
    module.eval()
    weights = {name: one.detach().clone() for name, one in module.named_parameters()}
    # What a copy knows of a cut is nothing.
    assert not isinstance(module, TrainsPlanned) or module.net.blocks[0].seen == 1
    shape = structure(module)
    return shape, weights, module.training_step(next(iter(networks.loader(networks.ROWS))), 0).detach()


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (TrainsChain, Layout(world=2, pp=2, microbatches=2)),
        (TrainsPlanned, Layout(world=4, tp=2, pp=2, microbatches=2)),
    ],
)
def test_a_network_of_ones_own_is_what_it_was(kind: type[L.LightningModule], layout: Layout) -> None:
    [(shape, weights, loss)] = run_on_ranks(1, own_network, kind, PLAIN, init=False)
    for found in run_on_ranks(layout.world, own_network, kind, layout, init=False):
        assert found[0] == shape
        # The gradient of a key's bias is zero but for rounding, which Adam scales up to a part of a step of 1e-3.
        torch.testing.assert_close(found[1:], (weights, loss), rtol=1e-10, atol=1e-10)


SAVED = {
    "tp2": Layout(world=2, tp=2),
    "pp2": Layout(world=2, pp=2, microbatches=2),
    "dp2tp2-zero1": Layout(world=4, tp=2, optimizer=OptimizerConfig(kind="distributed")),
    "dp2tp2-zero3": Layout(world=4, tp=2, optimizer=OptimizerConfig(kind="distributed_parameters")),
}


def saved_after(folder: str, layout: Layout, precision: Any) -> None:
    module = networks.TrainsOverTensor()
    trainer = make_trainer(
        layout,
        max_steps=2,
        max_epochs=-1,
        use_distributed_sampler=True,
        precision=precision,
        callbacks=ModelCheckpoint(folder, "within", every_n_train_steps=2),
        enable_checkpointing=True,
    )
    trainer.fit(module, networks.loader(networks.ROWS // layout.dp))
    assert isinstance(trainer.strategy, MegatronStrategy)
    whole = dict(networks.TrainsOverTensor.network().named_parameters())
    assert {name: one.shape for name, one in module.net.named_parameters()} == {
        n: one.shape for n, one in whole.items()
    }
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.wait_for_checkpoint()


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_saved_after_the_run_is_that_of_its_end(name: str, precision: Any, tmp_path: Any) -> None:
    run_on_ranks(SAVED[name].world, saved_after, str(tmp_path), SAVED[name], precision, init=False)
    within, after = (checkpoint.read_entries(str(tmp_path / f"{one}.ckpt")) for one in ("within", "after"))
    assert within.keys() == after.keys() and any(one.startswith("optimizer.0.") for one in within)
    loaded = [{name: torch.zeros(one.shape, dtype=one.dtype) for name, one in within.items()} for _ in range(2)]
    for one, tensors in zip(("within", "after"), loaded, strict=True):
        checkpoint.load(str(tmp_path / f"{one}.ckpt"), tensors, world=Mesh.single().world)
    for name, one in loaded[0].items():
        assert torch.equal(one, loaded[1][name]), name
        assert one.any(), name


def averaged(folder: str, layout: Layout) -> dict[str, Tensor]:
    module = networks.TrainsOverTensor()
    # Lightning's callback copies the module before `configure_model`.
    module.configure_model()
    average = WeightAveraging(avg_fn=lambda average, current, _: (average + current) / 2)
    trainer = make_trainer(layout, max_steps=3, max_epochs=-1, use_distributed_sampler=True, callbacks=average)
    trainer.fit(module, networks.loader(networks.ROWS // layout.dp))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    strategy: Any = trainer.strategy
    strategy.wait_for_checkpoint()
    return {name: one.detach() for name, one in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2tp2-zero1"])
def test_an_average_of_parts_is_saved_whole_after_the_run(name: str, tmp_path: Any) -> None:
    weights = run_on_ranks(SAVED[name].world, averaged, str(tmp_path), SAVED[name], init=False)[0]
    for key in ("", "current_model_state."):
        loaded = {f"{key}{one}": torch.zeros_like(weight) for one, weight in weights.items()}
        checkpoint.load(str(tmp_path / "after.ckpt"), loaded, world=Mesh.single().world, among=lambda _: False)
        # At the end of a fit the module has the average.
        torch.testing.assert_close(loaded, {f"{key}{one}": weight for one, weight in weights.items()}, rtol=0, atol=0)


class TrainsSome(networks.TrainsOverTensor):
    """Trains a part of its weights, and may be tested."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.blocks[0].requires_grad_(False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((one for one in self.parameters() if one.requires_grad), lr=1e-3)


def held_after(folder: str, layout: Layout) -> None:
    module, loader = TrainsSome(), networks.loader()
    trainer = make_trainer(layout, max_steps=2, max_epochs=-1)
    trainer.fit(module, loader)
    strategy: Any = trainer.strategy
    trainer.save_checkpoint(f"{folder}/before.ckpt")
    for path in (None, f"{folder}/before.ckpt"):
        trainer.test(module, loader, ckpt_path=path, verbose=False)
    slots, [optimizer] = strategy._last_fit.master_slots, trainer.optimizers
    # Runs leave nothing but what the optimizer of the fit steps.
    stepped = [one for group in optimizer.param_groups for one in group["params"]]
    assert slots.slots.keys() == set(stepped) and all(one.grad is None for one in stepped)
    assert all(one.is_meta for one in (*slots.parts.values(), *(slot.parameter for slot in slots.slots.values())))
    strategy.load_checkpoint(f"{folder}/before.ckpt")
    assert not any(True for _ in sharded_parameters(module))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    strategy.wait_for_checkpoint()


def test_later_runs_leave_the_state_of_the_fit_alone(tmp_path: Any) -> None:
    run_on_ranks(2, held_after, str(tmp_path), Layout(world=2, tp=2), init=False)
    entries = [checkpoint.read_entries(str(tmp_path / f"{one}.ckpt")) for one in ("before", "after")]
    loaded = [{name: torch.zeros(one.shape, dtype=one.dtype) for name, one in found.items()} for found in entries]
    for one, tensors in zip(("before", "after"), loaded, strict=True):
        checkpoint.load(str(tmp_path / f"{one}.ckpt"), tensors, world=Mesh.single().world)
    torch.testing.assert_close(loaded[1], loaded[0], rtol=0, atol=0)


class Later(Causal):
    """Reads, or makes, of its model what a rank keeps alone."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = hf.new_unchanged(config_of(self.model_type), seed=1)


def restored_by_request(model_type: str, layout: Layout) -> tuple[dict[str, Tensor], bool]:
    module = Later(model_type)
    strategy: Any = fitted(module, layout).strategy
    is_cut = any(True for _ in sharded_parameters(module))
    strategy.restore_networks()
    return {name: one.detach() for name, one in module.named_parameters()}, is_cut


def test_a_model_that_no_rank_held_is_whole_by_request() -> None:
    layout = Layout(world=2, tp=2)
    [(weights, _)] = run_on_ranks(1, restored_by_request, "llama", Layout(), init=False)
    for found, is_cut in run_on_ranks(2, restored_by_request, "llama", layout, init=False):
        assert is_cut
        # Norms of transformers compute in float32.
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)


class Restores(networks.TrainsOverTensor):
    """Restores its network too early."""

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        with pytest.raises(RuntimeError, match="called within a run"):
            strategy.restore_networks()


class FailsSharded(networks.TrainsOverTensor):
    """Fails in its second step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx:
            raise ValueError("its own")
        return super().training_step(batch, batch_idx)


def restored_too_late() -> None:
    layout = Layout(world=4, tp=2, optimizer=OptimizerConfig(kind="distributed_parameters"))
    module, trainer = FailsSharded(), make_trainer(layout)
    with pytest.raises(ValueError, match="its own"):
        trainer.fit(module, networks.loader(4))
    strategy: Any = trainer.strategy
    with pytest.raises(RuntimeError, match="have no values: a fit that sharded them failed"):
        strategy.restore_networks()


class Copies(networks.TrainsOverTensor):
    """Copies itself as the part of a rank."""

    copied: Any = None

    def on_train_end(self) -> None:
        trainer, self.trainer = self.trainer, None  # type: ignore[assignment]
        Copies.copied = copy.deepcopy(self)
        self.trainer = trainer


def restored_copy() -> None:
    fitted(Copies(), Layout(world=2, pp=2, microbatches=2))
    trainer: Any = fitted(Copies.copied, Layout(world=2, pp=2, microbatches=2))
    with pytest.raises(RuntimeError, match="or copied as one, is read whole from a checkpoint"):
        trainer.strategy.restore_networks()


def test_weights_that_nobody_has_and_copies_are_not_restored() -> None:
    run_on_ranks(4, restored_too_late, init=False)
    run_on_ranks(2, restored_copy, init=False)


def test_within_a_run_nothing_is_restored() -> None:
    run_on_ranks(2, fitted, Restores(), Layout(world=2, tp=2), init=False)


def test_a_copy_has_nothing_to_restore() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    note_uncut(module, Uncut(module))
    [found] = take_uncut(copy.deepcopy(module))
    assert not found.names() and take_uncut(module)[0].names() == {"0.weight", "0.bias"}
