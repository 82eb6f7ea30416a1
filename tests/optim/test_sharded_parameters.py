"""Parameters cut over data-parallel ranks: one device's numbers, and a part of the bytes between their uses."""

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning, WeightAveraging
from torch import Tensor

from lightning_megatron import Fp8Config, MegatronStrategy
from lightning_megatron.checkpoint import CheckpointConfig, load, read_entries
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.sharded_params import ShardedParams
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.memory import rank_memory
from lightning_megatron.rules.cross_config import Facts, faults
from lightning_megatron.testing import certify
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.optimizer_checks import require_fitting
from tests.any_module import networks
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.optim.test_sharded_gradients import Halves, Twice, run_of
from tests.trainer.layouts import Layout, make_trainer

READS = pytest.mark.filterwarnings("ignore:.* may read weights:UserWarning")
LAYOUTS = ["dp2m2-zero3", "dp2pp2vp2-zero3", "dp2pp2m4-zero3-zb_h1", "dp2pp2-zero3-collective", "dp2tp2-sp-zero3"]
FAMILIES = [
    ("qwen3_moe", "ep2m2-zero3"),
    ("llama", "cp2-zero3"),
    ("qwen3_moe", "dp2pp2vp2m4-zero3-zb_v"),
    ("qwen3_moe", "dp4ep2m2-zero3"),
]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", every_nth(LAYOUTS, 3))
def test_numbers_are_those_of_one_device(layout: str) -> None:
    certify(networks.TrainsOverTensor, networks.batches, layouts=(layout,), steps=3).assert_equal()


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "layout"), every_nth(FAMILIES, 3))
def test_unchanged_models_of_transformers_train_so(family: str, layout: str) -> None:
    certify(functools.partial(Causal, family), batches, layouts=(layout,), steps=3).assert_equal()


class Frozen(networks.TrainsOverTensor):
    """Trains every second block, and what is around the blocks."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.net is not None
        for block in self.net.blocks[::2]:
            block.requires_grad_(False)


class Looped(networks.Trains):
    """Runs its blocks twice."""

    network = networks.LoopedGPT


MODULES = [
    (Halves, "dp2m2-zero3"),
    (Twice, "dp2-zero3"),
    (Looped, "dp2-zero3"),
    (Frozen, "dp2m2-zero3"),
    (networks.TrainsCheckpointed, "dp2-zero3"),
    (networks.TrainsAdding, "dp2m2-zero3"),
    (networks.TrainsSharing, "dp2-zero3"),
]


@pytest.mark.parametrize(("module", "layout"), every_nth(MODULES, 2))
def test_networks_and_hooks_of_users_see_whole_weights(module: Any, layout: str) -> None:
    certify(module, networks.batches, layouts=(layout,), steps=3).assert_equal()


class Validating(networks.TrainsOverTensor):
    """Looks at what is gathered when hooks run, which read no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.are_gathered: list[bool] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.are_gathered.append(bool(self.net.blocks[1].up.weight.isfinite().any()))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["tokens"], batch["targets"])[1]


def gathers(config: OptimizerConfig) -> tuple[int, list[int], list[bool], bool]:
    """The most blocks of a network that were gathered at a time, the gathers of blocks and others of a step, what hooks
    saw, and whether the module has whole weights in the end."""
    module, gather, free = Validating(), ShardedParams._gather, ShardedParams._free
    now: set[ShardedParams] = set()
    most, counts = [0], [0, 0]

    def is_block(one: ShardedParams) -> bool:
        return ".blocks." in one.flat.members[0].name

    def noted_gather(one: ShardedParams) -> None:
        gather(one)
        now.add(one)
        counts[not is_block(one)] += 1
        most[0] = max(most[0], sum(map(is_block, now)))

    def noted_free(one: ShardedParams) -> None:
        free(one)
        now.discard(one)

    ShardedParams._gather, ShardedParams._free = noted_gather, noted_free  # type: ignore[method-assign]
    try:
        layout = Layout(world=2, microbatches=2, optimizer=config)
        trainer = make_trainer(layout, max_epochs=1, limit_train_batches=1, limit_val_batches=1)
        trainer.fit(module, networks.loader(), networks.loader())
    finally:
        ShardedParams._gather, ShardedParams._free = gather, free  # type: ignore[method-assign]
    is_whole = all(bool(one.isfinite().all()) for one in module.parameters())
    return most[0], counts, module.are_gathered, is_whole


ONE_EACH = OptimizerConfig(kind="distributed_parameters", gather_for_hooks=False)


def test_few_parts_are_gathered_at_a_time_and_no_oftener_than_needed() -> None:
    for most, [blocks, others], seen, is_whole in run_on_ranks(2, gathers, ONE_EACH, init=False):
        # Two microbatches: four forwards each, and three backwards beside the one that follows its forward; and four
        # forwards of validation. What is around the blocks: embedding and head once a step, and once for validation.
        assert (most, blocks, others) == (2, 2 * (4 + 3) + 4, 2 * 2)
        assert seen == [False] and is_whole


@READS
def test_kept_parts_are_gathered_once_a_step() -> None:
    kept = OptimizerConfig(kind="distributed_parameters", reshard_after_forward=False)
    for most, [blocks, _], seen, is_whole in run_on_ranks(2, gathers, kept, init=False):
        # For the hooks once more, before the step and after it; for validation they are there.
        assert (most, blocks) == (4, 3 * 4)
        assert seen == [True] and is_whole


class Untied(networks.TrainsOverTensor):
    """Has a head of its own, in which rank 1 sees no use in the first of its backwards where it `leaves_out`."""

    def __init__(self, *, leaves_out: bool = False) -> None:
        super().__init__()
        self.leaves_out = leaves_out

    def configure_model(self) -> None:
        super().configure_model()
        self.net.head.weight = torch.nn.Parameter(self.net.head.weight.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.leaves_out and self.global_rank and batch_idx == 0:
            return self.net.norm(self.net.run_blocks(self.net.tokens(batch["tokens"]))).square().mean()
        return super().training_step(batch, batch_idx)


def reduced(leaves_out: bool) -> list[list[str]]:
    """The weights of each bucket that is reduced, in order, of each of two steps of two microbatches."""
    module, reduce, found = Untied(leaves_out=leaves_out), Bucket.reduce, list[str]()

    def noted(bucket: Bucket, *, is_checked: bool) -> None:
        names = [param.name.removeprefix("net.") for param in bucket.members if param.parameter.dim() > 1]
        found.append(names[0].rpartition(".")[0] if names else "vectors")
        reduce(bucket, is_checked=is_checked)

    Bucket.reduce = noted  # type: ignore[method-assign]
    try:
        layout = Layout(world=2, optimizer=ONE_EACH)
        make_trainer(layout, max_epochs=1, limit_train_batches=2).fit(module, networks.loader())
    finally:
        Bucket.reduce = reduce  # type: ignore[method-assign]
    half = len(found) // 2
    return [found[:half], found[half:]]


def test_a_head_is_reduced_before_the_layers_where_all_ranks_have_its_gradient_by_then() -> None:
    for steps in run_on_ranks(2, reduced, False, init=False):
        for step in steps:
            blocks = [name.split(".")[1] for name in step if name.startswith("blocks")]
            assert list(dict.fromkeys(blocks)) == ["3", "2", "1", "0"]
            assert step[0] == "head" and step.index("tokens") > max(step.index(n) for n in step if "blocks" in n)
    # One rank has none in the first step: it stays at the end of the backward, on both and for good.
    one, other = run_on_ranks(2, reduced, True, init=False)
    assert one == other
    for step in one:
        assert step.index("head") > max(step.index(name) for name in step if name.startswith("blocks"))


def test_a_dry_run_and_the_closed_form_know_it() -> None:
    run = run_of("distributed_parameters")
    found, [dp] = dry_run(run, 0), [8]
    own, held = found.parameters / dp, found.peak_by_kind
    # AdamW: gradient sums, master weights and two moments in float32, each by the arithmetic.
    states = {"gradients": 4 * own, "master weights": 4 * own, "moments": 8 * own}
    assert {kind: held[kind] for kind in states} == pytest.approx(states, rel=0.02)
    # Two parts at most in 16 bits, and vectors in float32: the embedding is the largest part.
    part = 16384 * 1024 // 2 * 2
    assert held["weights"] < 2 * part < 0.2 * 2 * found.parameters
    whole = dry_run(run_of("distributed_gradients"), 0)
    assert whole.peak_by_kind["weights"] > 7 * held["weights"] and whole.peak_bytes > found.peak_bytes
    closed = rank_memory(run, 0)
    assert closed.master_weights + closed.moments == pytest.approx(12 * own, rel=0.01)
    assert closed.total < rank_memory(run_of("distributed_gradients"), 0).total
    # Of four microbatches, 15 buckets of matrices: twice each, but for the head's, whose backward follows its forward;
    # and both of vectors after the step.
    messages = {kind: m.number for (axis, kind), m in found.messages.items() if axis == "dp+cp"}
    assert messages["all-gather"] == 4 * (15 + 14) + 2
    assert messages["reduce-scatter"] == 4 * (15 + 2)


def test_a_dry_run_sends_half_of_the_bytes_of_layers_that_are_gathered_in_float8() -> None:
    run = replace(run_of("distributed_parameters"), fp8=Fp8Config())
    sent = {}
    for form in ("full", "float8"):
        found = dry_run(replace(run, fp8=Fp8Config(param_gather=form)), 0)
        sent[form] = found.messages["dp+cp", "all-gather"].tensor_bytes
        assert found.peak_bytes > 0
    config = run.model
    # Of four microbatches, for the forward and for the backward: a rank's half of attention's 4 H^2 and of 8 H^2.
    in_layers = 4 * 2 * config.num_layers * 12 * config.hidden_size**2 // 2
    assert sent["full"] - sent["float8"] == pytest.approx(in_layers, rel=0.01)


class Grafted(Frozen):
    """Saves its state after a step, keeps the weights of that moment, and changes one."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.save_checkpoint("saved.ckpt")
        with torch.no_grad(), self.trainer.strategy.steps.dp_comm.whole_weights():
            self.saved = {name: one.detach().clone() for name, one in self.state_dict().items()}
            self.net.blocks[1].up.weight.zero_()


def saved_while_sharded(folder: Path, config: OptimizerConfig, world: int = 2) -> tuple[bool, bool]:
    """Whether a checkpoint has the weights of that moment, frozen ones too, and what a hook wrote counts."""
    module = Grafted()
    trainer = make_trainer(Layout(world=world, optimizer=config), max_epochs=1, limit_train_batches=1)
    with contextlib.chdir(folder):
        trainer.fit(module, networks.loader())
        tensors = {
            name: torch.zeros(entry.shape, dtype=entry.dtype)
            for name, entry in read_entries("saved.ckpt").items()
            if name.startswith("net.")
        }
        load("saved.ckpt", tensors, world=Mesh.single().world, among=lambda name: name in tensors)
    assert len(tensors) == len(module.saved) and module.net is not None
    is_saved = all(torch.equal(tensors[name], one) for name, one in module.saved.items())
    return is_saved, not module.net.blocks[1].up.weight.any()


def test_a_checkpoint_has_shards_of_all_weights_and_what_hooks_wrote_counts(tmp_path: Path) -> None:
    config = OptimizerConfig(kind="distributed_parameters", bucket_size=700, gather_for_hooks=False)
    assert run_on_ranks(2, saved_while_sharded, tmp_path, config, init=False) == [(True, True)] * 2


class Penalised(networks.TrainsDiffusion):
    """Differentiates a gradient by the input."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noisy = batch["noisy"].requires_grad_()
        loss: Tensor = self.net(noisy, batch["time"]).square().mean()
        [slope] = torch.autograd.grad(loss, noisy, create_graph=True)
        return loss + slope.square().mean()


def refused() -> str:
    try:
        make_trainer(Layout(world=2, optimizer=ONE_EACH), max_epochs=1).fit(Penalised(), networks.loader())
    except RuntimeError as error:
        return str(error)
    return "trained"


def test_a_gradient_of_a_gradient_is_refused() -> None:
    for said in run_on_ranks(2, refused, init=False):
        assert "create_graph=True" in said and '"distributed_gradients"' in said


def test_what_cannot_be_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    facts = Facts(
        sizes=Sizes(world=2),
        optimizer=ONE_EACH,
        fp8=Fp8Config(engine="transformer_engine"),
        precision="bf16-mixed",
    )
    [found] = [fault for fault in faults(facts) if "optimizer kind ('distributed_parameters')" in fault]
    assert "Transformer Engine holds them cast to float8" in found
    for callback, said in (
        (WeightAveraging(), "reads all weights of a rank between steps, and gather_for_hooks .False. gathers none"),
        (ModelPruning("l1_unstructured"), "prunes and scores all weights"),
    ):
        with pytest.raises(ConfigurationError, match=f"{type(callback).__name__} {said}"):
            require_fitting([callback], ONE_EACH, has_master_weights=True)
    strategy = MegatronStrategy(
        optimizer=ONE_EACH, checkpoint=CheckpointConfig(local_folder=str(tmp_path), local_every_n_steps=1)
    )
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match=r"local_folder .* keeps what each rank holds of every weight"):
        trainer.fit(networks.TrainsOverTensor(), networks.loader())
