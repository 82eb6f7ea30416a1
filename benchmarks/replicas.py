"""One data-parallel training run of the same small model on this rank, by each of the optimizers that are compared.

All start from the same weights, see the same rows, and do the same arithmetic: mean loss of the global batch, gradients
clipped to norm 1, fused AdamW, float32. They differ in who holds, sums and updates what.
"""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.clock import StepClock
from benchmarks.joined import joined_by_gloo
from benchmarks.peak import PeakMemory
from benchmarks.plain_gpt import PlainGPT

LEARNING_RATE = 1e-3
# Torch DDP's own default.
BUCKET_MB = 25
ONE_BUCKET_MB = 10_000

Loader = torch.utils.data.DataLoader[list[Tensor]]


class NotHere(Exception):
    """Raised where a row's requirements are not installed, or not in the package yet."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model and the steps of a run."""

    model: Literal["gpt", "llama"] = "gpt"
    """The GPT of `plain_gpt`, and for this package its own with those weights; or for all the Llama of transformers."""
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    rows: int
    """Rows of a rank in a step."""
    warmup_steps: int
    timed_steps: int

    @property
    def steps(self) -> int:
        return self.warmup_steps + self.timed_steps


@dataclass(kw_only=True)
class Record:
    """Record of a run on this rank: its clock, its peak memory in the timed steps, and its own loss of each step."""

    clock: StepClock
    peak: PeakMemory = field(default_factory=PeakMemory)
    losses: list[Tensor] = field(default_factory=list)

    def add(self, loss: Tensor) -> None:
        """Notes the end of a step."""
        self.losses.append(loss.detach())
        self.clock.tick()
        if self.clock.steps == self.clock.warmup_steps:
            self.peak.begin()
        elif self.clock.steps == self.clock.warmup_steps + self.clock.timed_steps:
            self.peak.end()


def make_model(size: Size) -> nn.Module:
    """The model, with the same weights on every rank and in every row."""
    torch.manual_seed(0)
    if size.model == "gpt":
        return PlainGPT(size.layers, size.hidden, size.heads, size.sequence, size.vocabulary)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        # Eight thirds, as of Llama's own, and a multiple of 16.
        intermediate_size=round(size.hidden / 6) * 16,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _layers_of(model: nn.Module) -> nn.ModuleList:
    layers = model.blocks if isinstance(model, PlainGPT) else model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def _loss(model: Callable[..., Any], tokens: Tensor, labels: Tensor) -> Tensor:
    output = model(tokens, labels=labels)
    # Models of transformers return more than the loss.
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss


def make_loader(size: Size) -> Loader:
    """This rank's samples, a step's in each batch; unevenly distributed tokens give it something to learn."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generator = torch.Generator().manual_seed(1)
    shape = (size.steps, world, size.rows, size.sequence + 1)
    tokens = (torch.rand(shape, generator=generator) ** 4 * size.vocabulary).long()[:, rank].flatten(0, 1)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    # Models of transformers shift labels themselves.
    data = torch.utils.data.TensorDataset(inputs, labels if size.model == "gpt" else inputs)
    return torch.utils.data.DataLoader(data, batch_size=size.rows)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


@joined_by_gloo
def train_ddp(size: Size, microbatches: int, record: Record, *, overlap: bool) -> None:
    """torch DDP, gradients summed once a step; without overlap they are one bucket, complete when backward ends."""
    model = nn.parallel.DistributedDataParallel(make_model(size), bucket_cap_mb=None if overlap else ONE_BUCKET_MB)

    def before_microbatch(is_last: bool) -> None:
        model.require_backward_grad_sync = is_last

    _train(model, size, microbatches, record, before_microbatch)


@joined_by_gloo
def train_fsdp2(size: Size, microbatches: int, record: Record, *, stage: int, keeps: bool) -> None:
    """torch FSDP2, each layer a unit. With stage 1 gradients are summed once a step, with stage 3 for each microbatch.
    Parameters that it keeps are gathered once a step and stay until its last backward."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(size)
    for layer in _layers_of(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
    sharded = fully_shard(model, mesh=mesh, reshard_after_forward=not keeps)

    def before_microbatch(is_last: bool) -> None:
        if keeps:
            sharded.set_reshard_after_backward(is_last)
        if stage == 1:
            sharded.set_requires_gradient_sync(is_last)
            sharded.set_is_last_backward(is_last)

    _train(model, size, microbatches, record, before_microbatch)


def _train(
    model: nn.Module, size: Size, microbatches: int, record: Record, before_microbatch: Callable[[bool], None]
) -> None:
    """Trains by a hand-written loop; `before_microbatch` gets whether it is the step's last."""
    optimizer = make_optimizer(model.parameters())
    for tokens, labels in make_loader(size):
        optimizer.zero_grad()
        losses = []
        for i, rows in enumerate(zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True)):
            before_microbatch(i == microbatches - 1)
            loss = _loss(model, *rows) / microbatches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        record.add(torch.stack(losses).sum())


def train_deepspeed(size: Size, microbatches: int, record: Record, *, zero: dict[str, Any]) -> None:
    """DeepSpeed around the same AdamW, with these settings of its `zero_optimization`."""
    if importlib.util.find_spec("deepspeed") is None:
        raise NotHere("DeepSpeed is not installed here; --deepspeed-python names an interpreter that has it")
    _train_deepspeed(size, microbatches, record, zero)


@joined_by_gloo
def _train_deepspeed(size: Size, microbatches: int, record: Record, zero: dict[str, Any]) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = make_model(size)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": size.rows // microbatches,
            "gradient_accumulation_steps": microbatches,
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": size.steps + 1,
        },
    )
    for tokens, labels in make_loader(size):
        losses = []
        for rows in zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True):
            loss = _loss(engine, *rows)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach() / microbatches)
        record.add(torch.stack(losses).sum())


def train_ours(size: Size, microbatches: int, record: Record, *, optimizer: dict[str, Any]) -> None:
    """A model under the Trainer, with the arguments of OptimizerConfig; without any, the strategy as it comes."""
    from benchmarks.fit import fit

    strategy: dict[str, Any] = {"num_microbatches": microbatches}
    if optimizer:
        strategy["optimizer"] = _optimizer_config(optimizer)
    fit(
        lambda: build_ours(size),
        lambda dp: make_loader(size),
        strategy,
        make_optimizer,
        record.add,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
    )


def _optimizer_config(settings: dict[str, Any]) -> Any:
    from lightning_megatron import OptimizerConfig

    return OptimizerConfig(**settings)


def build_ours(size: Size) -> nn.Module:
    """Our GPT with the weights of the plain one; a model of transformers as it is."""
    if size.model != "gpt":
        return make_model(size)
    from lightning_megatron.models import GPTConfig, GPTModel

    config = GPTConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=size.heads,
        max_sequence_length=size.sequence,
        vocab_size=size.vocabulary,
        activation="gelu_tanh",
    )
    model = GPTModel(config)
    weights = _our_weights(make_model(size).state_dict(), size)
    model.load_state_dict(weights)
    return model


# Modules of a layer of ours by those of a block of the plain model.
_MODULES = {
    "attention_norm": "attention_norm",
    "mlp_norm": "mlp_norm",
    "qkv": "attention.qkv",
    "projection": "attention.projection",
    "up": "mlp.up",
    "down": "mlp.down",
}


def _our_weights(plain: dict[str, Tensor], size: Size) -> dict[str, Tensor]:
    """The plain model's weights under our names; queries, keys and values are fused head by head there."""
    weights = {
        "embedding.tokens.weight": plain["tokens.weight"],
        "embedding.positions.weight": plain["positions.weight"],
        "final_norm.weight": plain["norm.weight"],
        "final_norm.bias": plain["norm.bias"],
    }
    for name, weight in plain.items():
        if not name.startswith("blocks."):
            continue
        _, number, module, kind = name.split(".")
        if module == "qkv":
            weight = weight.unflatten(0, (3, size.heads, -1)).transpose(0, 1).flatten(0, 2)
        weights[f"layers.{number}.{_MODULES[module]}.{kind}"] = weight
    return weights
