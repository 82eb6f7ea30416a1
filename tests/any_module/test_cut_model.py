"""Networks that know nothing of ranks compute one device's numbers on every layout, or are refused by name."""

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ConfigurationError, MegatronStrategy, RecomputeConfig
from lightning_megatron.any_module.cut_model import cut_of
from lightning_megatron.any_module.pipelined_modules import pipelined_modules, whole_backwards
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.tensor.whole_linear import WholeLinear
from lightning_megatron.testing import certify
from lightning_megatron.trainer.setup.model_checks import tell_whole_backwards
from lightning_megatron.trainer.setup.pipelined_models import _tell_whole, cut_plain_networks
from tests.any_module import networks
from tests.harness.fake_cuda import FakeCuda
from tests.harness.ranks import RankFailed, on_ranks, run_on_ranks
from tests.harness.sample import every_nth
from tests.harness.threads import new_group, run_on_threads
from tests.trainer.layouts import Layout, make_trainer


@pytest.mark.matrix
def test_a_gpt_is_cut_at_its_blocks() -> None:
    layouts = every_nth(("pp2", "pp2vp2", "dp2pp2-zero"), 2)
    certify(networks.Trains, networks.batches, layouts=layouts, steps=2).assert_equal()


@pytest.mark.parametrize("module", [networks.TrainsTranslator, networks.TrainsDiffusion, networks.TrainsAdding])
def test_what_all_layers_read_is_there_on_every_stage(module: Callable[[], Any]) -> None:
    certify(module, networks.batches, layouts=("pp2vp2",), steps=2).assert_equal()


class Doubled(nn.Sequential):
    """Does more than to call its children in turn."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2  # type: ignore[no-any-return]


class OwnChain(L.LightningModule):
    """Trains a chain with a forward of its own."""

    kind: type[nn.Sequential] = Doubled

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = self.kind(*(self.layer() for _ in range(4)))

    def layer(self) -> nn.Module:
        """One of the chain."""
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["noisy"]), batch["noisy"] + 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HookedChain(OwnChain):
    """Has hooks do what that forward does."""

    kind = nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.net.register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
        self.net.register_forward_hook(lambda module, args, output: output * 2)


class UnlikeChain(OwnChain):
    """Its children have no class in common, so that it is no list of layers either."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Doubled(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())


@pytest.mark.parametrize("module", [OwnChain, HookedChain])
def test_what_a_chain_does_beside_calling_its_children_is_done(module: Callable[[], Any]) -> None:
    certify(module, networks.batches, layouts=("pp2", "dp2pp2"), steps=2).assert_equal()


class OwnList(OwnChain):
    """Has a list among its attributes, and calls what is in it itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        del self.net

    def net(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The layers in turn."""
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_list_that_the_step_itself_calls_from_is_refused_with_the_way_out() -> None:
    [result] = certify(OwnList, networks.batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused"
    assert "layers is a list that steps of OwnList call from: put it, with what is around it, into" in result.message


def test_a_chain_that_does_more_and_is_no_list_of_layers_is_refused() -> None:
    [result] = certify(UnlikeChain, networks.batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused" and "(without hooks and a forward of its own)" in result.message


@pytest.mark.parametrize(
    ("module", "shown"),
    [
        (networks.TrainsSkipping, "blocks.3 reads argument 0, which layers of an earlier stage computed"),
        (networks.TrainsLooped, "calls blocks.0 a second time"),
        (networks.TrainsDirect, "calls blocks.2.forward(...), which goes past the layers of other stages"),
        (networks.TrainsSharing, "blocks.0.up.weight and blocks.3.up.weight are one weight"),
        (networks.TrainsCheckpointed, "blocks.0 runs without recording gradients"),
        (networks.TrainsNoted, "blocks.1 returned a set, which cannot be sent to the next stage"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(module: Callable[[], Any], shown: str) -> None:
    [result] = certify(module, networks.batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused" and shown in result.message


def test_a_term_beside_the_networks_own_is_not_weighed_by_that() -> None:
    [result] = certify(networks.TrainsRegularised, networks.batches, layouts=("pp2",), steps=1).results
    assert any("is taken for a mean over the rows of its batch" in warning for warning in result.warnings)


def test_a_step_may_change_its_batch_in_place() -> None:
    certify(networks.TrainsInPlace, networks.batches, layouts=("pp2vp2",), steps=2).assert_equal()


class CountsDeferred(L.Callback):
    """Counts weight gradients that own blocks put off."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        named = {id(weight): name for name, weight in pl_module.named_parameters()}
        for linear in (one for one in pl_module.modules() if isinstance(one, WholeLinear)):
            defer = linear.weight_gradients.defer

            def noted(weight: Tensor, task: Callable[[], None], defer: Any = defer) -> None:
                self.names.add(named[id(weight)])
                defer(weight, task)

            linear.weight_gradients.defer = noted  # type: ignore[method-assign]
            # All linears share it.
            break


def deferred(schedule: str) -> tuple[set[str], bool]:
    counts, module = CountsDeferred(), networks.Trains()
    layout = Layout(world=2, pp=2, schedule=schedule, microbatches=4)
    make_trainer(layout, max_epochs=1, limit_train_batches=1, callbacks=[counts]).fit(module, networks.loader())
    return counts.names, any(isinstance(one, WholeLinear) for one in module.modules())


def test_linears_put_their_weight_gradients_off_where_a_schedule_splits_the_backward() -> None:
    certify(networks.Trains, networks.batches, layouts=("pp2-zb_h1",), steps=2).assert_equal()
    for rank, (names, is_left) in enumerate(run_on_ranks(2, deferred, "zb_h1", init=False)):
        assert not is_left
        # The last stage is on global rank 0.
        own = (2, 3) if rank == 0 else (0, 1)
        linears = ("up", "down", *(f"attention.{name}" for name in ("query", "key", "value", "out")))
        assert names == {f"net.blocks.{block}.{name}.weight" for block in own for name in linears}
    assert all(not names for names, _ in run_on_ranks(2, deferred, "1f1b", init=False))


class Drops(networks.Trains):
    """Keeps the last mask that each block has drawn."""

    def configure_model(self) -> None:
        super().configure_model()
        self.masks: dict[int, list[bool]] = {}
        for index, block in enumerate(self.net.blocks):
            block.norm_1.register_forward_hook(partial(self.draw, index))

    def draw(self, index: int, *_: Any) -> None:
        self.masks[index] = torch.nn.functional.dropout(torch.ones(32), 0.5).bool().tolist()


def masks_of(layout: Layout) -> dict[int, list[bool]]:
    module = Drops()
    make_trainer(layout, max_epochs=1).fit(module, networks.loader())
    return module.masks


def test_layers_of_different_stages_draw_different_masks() -> None:
    drawn: dict[int, list[bool]] = {}
    for masks in run_on_ranks(2, masks_of, Layout(world=2, pp=2, microbatches=2), init=False):
        drawn |= masks
    assert len(drawn) == len({str(mask) for mask in drawn.values()}) == 4


class Unseeded(networks.BuiltOverTensor):
    """Begins with other values in each process."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(os.getpid())
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.1, generator)
        self.began: dict[str, list[float]] = {}

    def on_train_start(self) -> None:
        self.began = {name: p.detach().flatten().tolist() for name, p in self.named_parameters()}


def began_with(layout: Layout) -> dict[str, list[float]]:
    module = Unseeded()
    make_trainer(layout, max_epochs=1, limit_train_batches=1).fit(module, networks.loader())
    return module.began


def test_copies_of_a_weight_begin_as_one_whatever_the_seeds() -> None:
    stages = run_on_ranks(2, began_with, Layout(world=2, pp=2), init=False)
    both = stages[0].keys() & stages[1].keys()
    assert "net.tokens.weight" in both and all(stages[0][name] == stages[1][name] for name in both)
    first, second, third, fourth = run_on_ranks(4, began_with, Layout(world=4, tp=2), init=False)
    assert first == third and second == fourth and first != second
    first, second, *_ = run_on_ranks(2, began_with, Layout(world=2, tp=2, sp=True), init=False)
    assert all(first[name] == second[name] for name in first if "norm" in name)


class Configured(networks.GPT):
    """Has a configuration that asks for the hidden states of all layers."""

    config = SimpleNamespace(output_hidden_states=True)


class TrainsConfigured(networks.Trains):
    network = Configured


def test_what_is_collected_of_all_layers_is_refused() -> None:
    [result] = certify(TrainsConfigured, networks.batches, layouts=("pp2",), steps=1).results
    assert result.verdict == "refused" and "was called with output_hidden_states" in result.message


def fitted_twice(layout: Layout) -> list[float]:
    """Two fits of one module, whose network is there before the first, and a validation."""
    module = networks.BuiltOverTensor()
    for _ in range(2):
        trainer = make_trainer(layout, max_epochs=1)
        trainer.fit(module, networks.loader())
    return [float(p.detach().double().norm()) for name, p in module.named_parameters() if name == "net.norm.weight"]


def test_a_module_that_was_cut_is_fitted_again() -> None:
    [wanted] = run_on_ranks(1, fitted_twice, Layout(is_plain=True), init=False)
    for found in run_on_ranks(4, fitted_twice, Layout(world=4, tp=2, pp=2, microbatches=2), init=False):
        assert found == pytest.approx(wanted, rel=1e-10)


class Stops(networks.BuiltOverTensor):
    """Its first batch ends in an exception."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("its own")


def fitted_on_other_ranks() -> str:
    """What is said where a module that an exception left cut over two ranks of tp is fitted on replicas."""
    module = Stops()
    with pytest.raises(ValueError, match="its own"):
        make_trainer(Layout(world=2, tp=2), max_epochs=1).fit(module, networks.loader())
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(Layout(world=2), max_epochs=1).fit(module, networks.loader())
    return str(caught.value)


def test_a_module_that_was_cut_is_refused_on_other_ranks() -> None:
    for said in run_on_ranks(2, fitted_on_other_ranks, init=False):
        assert re.search(r"net\S+ \(and \d+ more\) is cut over 2 ranks of tp, and the strategy has 1; make", said)


class Counted(networks.Trains):
    """Counts how often its blocks run."""

    calls = 0

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.net.blocks:
            block.norm_1.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1


def trained(recompute: RecomputeConfig) -> tuple[int, dict[str, Tensor]]:
    layout = Layout(world=2, pp=2, microbatches=2)
    strategy, module = layout.strategy(), Counted()
    assert isinstance(strategy, MegatronStrategy)
    strategy.recompute = recompute
    try:
        make_trainer(layout, strategy=strategy, max_epochs=1).fit(module, networks.loader())
    except ConfigurationError as error:
        raise RuntimeError(str(error)) from None
    return module.calls, {name: p.detach().clone() for name, p in module.named_parameters()}


def test_layers_are_recomputed_in_the_backward() -> None:
    plain = run_on_ranks(2, trained, RecomputeConfig(), init=False)
    again = run_on_ranks(2, trained, RecomputeConfig(granularity="full"), init=False)
    for (num_plain, wanted), (num_again, found) in zip(plain, again, strict=True):
        assert num_again == 2 * num_plain > 0
        assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_what_layers_save_is_offloaded() -> None:
    plain = run_on_ranks(2, trained, RecomputeConfig(), init=False)
    again = run_on_ranks(2, trained, RecomputeConfig(offload=True), init=False)
    for (num_plain, wanted), (num_again, found) in zip(plain, again, strict=True):
        assert num_again == num_plain > 0
        assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_groups_of_layers_are_not_recomputed() -> None:
    with pytest.raises(RankFailed, match=r"recompute method \('uniform'\) with num_layers \(2\) groups layers"):
        run_on_ranks(2, trained, RecomputeConfig(granularity="full", num_layers=2), init=False)


class Before(nn.Module):
    """A layer whose linears nobody cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(networks.WIDTH, 160), nn.Linear(160, networks.WIDTH)


class TrainsLonger(networks.TrainsOverTensor):
    """Its blocks have more parameters than another list, until their linears are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = networks.GPT()
        self.net.before = nn.ModuleList([Before(), Before()])


def layers_of_rank(world: Any) -> tuple[str, ...]:
    mesh, module = Mesh.build(Sizes(world=4, tp=2, pp=2), world.rank(), new_group), TrainsLonger()
    cut_plain_networks(module, mesh)
    cut = cut_of(module.net)
    assert cut is not None
    return tuple(cut.part_names)


def test_the_layers_are_those_that_the_network_has_before_its_linears_are_cut() -> None:
    assert run_on_threads(4, layers_of_rank) == [tuple(f"blocks.{index}" for index in range(4))] * 4


class Derived(torch.nn.Linear):
    """A linear whose weight other code may read."""


def test_modules_whose_backward_stays_whole_are_told(caplog: pytest.LogCaptureFixture) -> None:
    module, mesh = networks.Trains(), Mesh.imagine(1, Sizes(world=2, pp=2))
    module.configure_model()
    for block in module.net.blocks:
        block.up = Derived(32, 64)
    cut_plain_networks(module, mesh)
    names = whole_backwards(pipelined_modules(module))
    assert names == ["blocks.0.up (Derived)", "blocks.1.up (Derived)"]
    with caplog.at_level("INFO"):
        tell_whole_backwards(names, "zb_h1")
        tell_whole_backwards([], "zb_v")
    [told] = [record.getMessage() for record in caplog.records if "puts off" in record.getMessage()]
    assert "2 other modules compute theirs at once: blocks.0.up (Derived), blocks.1.up" in told


@on_ranks(1, init=False)
def test_a_network_that_is_whole_on_a_gpu_is_told() -> None:
    logger, told = logging.getLogger("lightning.pytorch.utilities.rank_zero"), list[str]()
    logger.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    with FakeCuda():
        for device in ("cuda", "meta", "cpu"):
            module = L.LightningModule()
            module.net = torch.nn.Linear(1000, 1000, device=device)
            _tell_whole(module, Mesh.imagine(0, Sizes(world=2, tp=2)))
            _tell_whole(module, Mesh.single())
    assert len(told) == 1 and "LightningModule are whole on cuda:0 until they are cut: 0.0 GB" in told[0]
