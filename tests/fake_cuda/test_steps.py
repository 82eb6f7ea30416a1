"""Tests of whole steps on a GPU that is not there: under the Trainer on one rank, and on ranks of imagined layouts."""

import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.device_work import DeviceWork, Work
from lightning_megatron import Fp8Config, MegatronStrategy
from lightning_megatron.comm import rng
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.models import BertConfig, GPTConfig, GPTModel, T5Config
from lightning_megatron.moe import token_dispatcher
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.optim.gradients import Gradients
from lightning_megatron.optim.master_weights import MasterWeights
from lightning_megatron.planner.dry_run import dry_run
from lightning_megatron.planner.fake_process_group import fake_mesh
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.sharding import deferring
from lightning_megatron.transformer.recompute import RecomputeConfig, RecomputeRunner, to_host
from tests.harness import fake_cuda
from tests.harness.fake_cuda import FakeCuda
from tests.harness.ranks import on_ranks
from tests.harness.sample import every_nth

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128}
LLAMA = GPTConfig(
    num_layers=2,
    **SIZES,
    num_query_groups=2,
    max_sequence_length=64,
    activation="swiglu",
    normalization="rmsnorm",
    position="rotary",
    add_bias_linear=False,
    tie_embeddings=False,
)
DROPPING = GPTConfig(num_layers=1, **SIZES, max_sequence_length=64, hidden_dropout=0.1, attention_dropout=0.1)
MIXTRAL = replace(LLAMA, num_layers=1, moe=MoEConfig(router=RouterConfig(num_experts=4, top_k=2), ffn_hidden_size=64))
BERT = BertConfig(num_layers=1, **SIZES, max_sequence_length=64)
T5 = T5Config(num_layers=1, num_decoder_layers=1, **SIZES, max_sequence_length=64)

TEXT, PACKED = SequenceLengths(sequence=64), SequenceLengths(sequence=64, are_packed=True)
PAIRS = SequenceLengths(sequence=64, decoder_sequence=32)
# The model, the layout, the rank that is looked at, and its sequences.
IMAGINED: dict[str, tuple[Any, Sizes, int, SequenceLengths]] = {
    "Llama, the second of tp 2 with sp": (LLAMA, Sizes(world=2, tp=2, sequence_parallel=True), 1, TEXT),
    "Llama, the first of pp 2": (LLAMA, Sizes(world=2, pp=2), 0, TEXT),
    "Llama, the last of pp 2": (LLAMA, Sizes(world=2, pp=2), 1, TEXT),
    "packed Llama, cp 2": (LLAMA, Sizes(world=2, cp=2), 0, PACKED),
    "GPT with dropout, tp 2": (DROPPING, Sizes(world=2, tp=2), 1, TEXT),
    "Mixtral, ep 2": (MIXTRAL, Sizes(world=2, ep=2), 1, TEXT),
    "BERT, tp 2": (BERT, Sizes(world=2, tp=2), 0, TEXT),
    "T5, the last of pp 2": (T5, Sizes(world=2, pp=2), 1, PAIRS),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(IMAGINED, 3))
def test_a_step_of_an_imagined_rank_runs_on_the_device(name: str) -> None:
    step_of_rank(name)


@on_ranks(1, init=False)
def step_of_rank(name: str) -> None:
    model, sizes, rank, lengths = IMAGINED[name]
    run = Run(model=model, lengths=lengths, sizes=sizes, global_batch_size=sizes.pp * sizes.dp, precision="bf16-mixed")
    assert faults_of(run) == []
    with (
        FakeCuda(),
        DeviceWork() as counted,
        mock.patch.object(rng, "fill_normal_"),
        mock.patch.object(token_dispatcher, "on_host", equal_counts),
    ):
        found = dry_run(run, rank, device=torch.device("cuda"))
    assert found.parameters > 0 and found.flops["products"] > 0
    assert counted.work.flops > found.flops["products"]


def equal_counts(counts: Tensor, shape_TK: torch.Size) -> Tensor:
    """What experts get of the tokens of each rank, of four experts."""
    return torch.full(counts.shape, shape_TK.numel() // 4)


class Text(L.LightningModule):
    """Next-token prediction that logs its loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config

    def configure_model(self) -> None:
        self.model = GPTModel(self.config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class Ends(L.Callback):
    """Number of launches at the end of each step."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.ends: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(len(self.work.launches))


class Devices(L.Callback):
    """Devices of weights, and of what the optimizer steps with, after a step."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        [optimizer] = trainer.optimizers
        stepped = [one for group in optimizer.param_groups for one in group["params"]]
        held = {
            "weights": [*pl_module.parameters()],
            "stepped": stepped,
            "moments": [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")],
        }
        self.found = {name: {one.device.type for one in tensors} for name, tensors in held.items()}
        assert len(stepped) == len(optimizer.state) == len(held["weights"])


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(["32-true", "bf16-mixed"], 2))
def test_offloaded_weights_are_stepped_on_the_host(name: Any) -> None:
    step_on_host(name)


@on_ranks(1, init=False)
def step_on_host(precision: Any) -> None:
    """The weights stay on the device, of which the host reads gradients and writes weights without being waited for."""
    with FakeCuda(), DeviceWork() as counted, mock.patch.object(rng, "fill_normal_"):
        torch.set_float32_matmul_precision("high")
        devices, ends = Devices(), Ends(counted.work)
        trainer = L.Trainer(
            accelerator="gpu",
            devices=1,
            strategy=MegatronStrategy(optimizer=OptimizerConfig(cpu_offload=True)),
            precision=precision,
            max_steps=2,
            gradient_clip_val=1.0,
            callbacks=[devices, ends],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        tokens = torch.ones(24, 64, dtype=torch.int64)
        model = replace(LLAMA, num_layers=1, num_query_groups=4)
        trainer.fit(Text(model), DataLoader(TensorDataset(tokens, tokens), batch_size=6))
        work = Work(counted.work.launches[ends.ends[0] : ends.ends[1]])
    assert devices.found == {"weights": {"cuda"}, "stepped": {"cpu"}, "moments": {"cpu"}}
    directions = {name: {where for where in work.copies if where.startswith(name)} for name in ("device", "host")}
    assert any("optim/bucket.py" in where for where in directions["device"]), work.copies
    assert any("optim/host_weights.py" in where for where in directions["host"]), work.copies
    assert not any(where.startswith("copy_") for where in work.waits), work.waits


@on_ranks(1, init=False)
def test_a_device_gets_shards_of_a_model_and_one_part_of_it_whole() -> None:
    config = OptimizerConfig(kind="distributed_parameters")
    size = replace(LLAMA, num_layers=4, hidden_size=256, vocab_size=2048, num_query_groups=4)
    device, ranks = torch.device("cuda"), 8
    with (
        FakeCuda(),
        # Drawing takes memory that does not grow with the model.
        mock.patch.object(rng, "fill_normal_"),
        fake_mesh(Sizes(world=ranks), 0) as (mesh, new_group),
        MemoryTracker(device) as tracker,
    ):
        with device, deferring():
            model, own = GPTModel(size, mesh=mesh, seed=0), nn.Linear(8, 8)
        # A number for each stands for the weights; a network of a user's own is there from the first.
        assert sum(tracker.take_peak().values()) <= 1024 * len([*model.parameters()]) and own.weight.is_cuda
        part_of = {one: ("model", ".".join(name.split(".")[:2])) for name, one in model.named_parameters()}.get
        optimizer = torch.optim.SGD(model.parameters())
        gradients = Gradients(model.named_parameters(), set(), mesh, new_group, device, config=config, part_of=part_of)
        master_weights = MasterWeights(gradients, [optimizer])
        # Shards of weights and gradients, and a bucket of all values where nobody counts on it.
        shards = 2 * 4 * sum(one.numel() for one in model.parameters()) // ranks
        most = 4 * max(bucket.layout.num_elements for bucket in gradients.buckets)
        assert shards < sum(tracker.take_peak().values()) < 1.03 * (shards + most)
        assert {one.device.type for one in model.parameters()} == {"cuda"}
        # In the end the host gets all of it, bucket by bucket.
        held = sum(tracker.held.values())
        master_weights.release()
        assert sum(tracker.take_peak().values()) < 1.03 * (held + most)
        del gradients, master_weights, optimizer
        assert sum(tracker.held.values()) < shards


@on_ranks(1, init=False)
def test_offloaded_activations_wait_in_pinned_memory_and_nobody_waits_for_their_copies() -> None:
    copies = []

    def noted(x: Tensor) -> Tensor:
        copies.append((x.numel(), held := to_host(x)))
        assert x.is_cuda and held.is_pinned()
        return held

    with FakeCuda(), DeviceWork() as counted, mock.patch.object(rng, "fill_normal_"), torch.device("cuda"):
        model, axis = GPTModel(replace(LLAMA, num_query_groups=4), mesh=Mesh.single(), seed=0), Mesh.single().tp
        model.runner = RecomputeRunner(RecomputeConfig(offload=True), tp=axis, sp=axis)
        model.runner.to_host = noted
        tokens = torch.ones(2, 64, dtype=torch.int64)
        model(tokens, labels=tokens).backward()
    shapes = {parameter.numel() for parameter in model.parameters()}
    assert len(copies) > 10 and max(size for size, _ in copies) not in shapes
    copied = {where: number for where, number in counted.work.copies.items() if "recompute.py" in where}
    # One there of each; some are read by several.
    assert {where.split(" at ")[0] for where in copied} == {"device to host", "host to device"}
    assert not any("recompute.py" in where for where in counted.work.waits), counted.work.waits


class NotZero(FakeCuda):
    """Here what the host reads of several unknown numbers are ones: with amaxes of zero scales would never be known."""

    def read(self, x: Tensor) -> Tensor:
        return super().read(x) if x.dim() == 0 else torch.ones(x.shape, dtype=x.dtype)


# Precisions of the Trainer, and what the strategy does beside them.
PRECISIONS: dict[str, tuple[Any, Fp8Config | None]] = {
    "bf16-mixed": ("bf16-mixed", None),
    "16-mixed": ("16-mixed", None),
    "bf16-true": ("bf16-true", None),
    "fp8": ("bf16-mixed", Fp8Config()),
    "fp8, delayed scales": ("bf16-mixed", Fp8Config(scaling="delayed")),
    "mxfp8": ("bf16-mixed", Fp8Config(scaling="mxfp8")),
    "32-true": ("32-true", None),
}
# A Hopper GPU has no units for blocks.
BLACKWELL = (10, 0)


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(PRECISIONS, 3))
def test_the_host_waits_once_a_step_however_many_microbatches_it_has(name: str) -> None:
    waits_of_steps(name)


@on_ranks(1, init=False)
def waits_of_steps(name: str) -> None:
    precision, fp8 = PRECISIONS[name]
    if fp8 is not None and fp8.scaling == "mxfp8":
        mock.patch.dict(fake_cuda._ANSWERS, get_device_capability=lambda device=None: BLACKWELL).start()
    # Caches of cast weights go by their addresses, which fake tensors give with a warning.
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
    waits, kernels = {}, set()
    for num_microbatches in (1, 3):
        with NotZero(), DeviceWork() as counted, mock.patch.object(rng, "fill_normal_"):
            torch.set_float32_matmul_precision("high")
            ends = Ends(counted.work)
            trainer = L.Trainer(
                accelerator="gpu",
                devices=1,
                strategy=MegatronStrategy(num_microbatches=num_microbatches, fp8=fp8),
                precision=precision,
                max_steps=2,
                gradient_clip_val=1.0,
                callbacks=[ends],
                log_every_n_steps=10,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            tokens = torch.ones(24, 64, dtype=torch.int64)
            # Attention of grouped queries in float32 has a kernel of its own on a GPU, and none here.
            model = replace(LLAMA, num_layers=1, num_query_groups=4)
            trainer.fit(Text(model), DataLoader(TensorDataset(tokens, tokens), batch_size=6))
        # What is made once has been made by the second step.
        step = Work(counted.work.launches[ends.ends[0] : ends.ends[1]])
        waits[num_microbatches] = step.waits
        kernels |= {launch.name for launch in step.launches}
    # Whether a gradient is finite.
    assert {number: found.total() for number, found in waits.items()} == {1: 1, 3: 1}, waits
    # Weights of which an optimizer has 16 bits would be rounded otherwise by the fused kernel.
    assert ("_fused_adamw_" in kernels) == (name != "bf16-true")
