"""Training runs of one small Mixtral on CPU ranks, ours and the peers', with their times and memory.

All start from the weights of `plain_llama`, see the same rows, and do the same arithmetic: mean loss of the global
batch, no auxiliary loss, gradients clipped to norm 1, fused AdamW, float32.
"""

import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.hugging_face import build_hugging_face
from benchmarks.joined import joined_by_gloo
from benchmarks.plain_llama import build_plain, our_weights
from lightning_megatron.models import GPTConfig, GPTModel
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.moe.experts import Experts

LEARNING_RATE = 1e-4


class NotHere(Exception):
    """Raised where a row's requirements are not installed."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model and the steps of a run."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    sequence: int
    vocabulary: int
    experts: int
    top_k: int
    """Experts of a token."""
    rows: int
    """Rows of all ranks in a step."""
    microbatch_rows: int
    steps: int

    def config(self) -> GPTConfig:
        return GPTConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            ffn_hidden_size=self.ffn,
            vocab_size=self.vocabulary,
            max_sequence_length=self.sequence,
            activation="swiglu",
            normalization="rmsnorm",
            position="rotary",
            add_bias_linear=False,
            tie_embeddings=False,
            moe=MoEConfig(router=RouterConfig(num_experts=self.experts, top_k=self.top_k)),
        )

    def microbatches(self, dp: int) -> int:
        return self.rows // dp // self.microbatch_rows


@dataclass(kw_only=True)
class Record:
    """Record of a run on this rank, step by step."""

    losses: list[Tensor] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)
    wall_ends: list[float] = field(default_factory=list)
    expert_rows: list[int] = field(default_factory=list)
    """Rows of each call of our experts."""

    def add(self, loss: Tensor) -> None:
        """Notes the end of a step."""
        self.losses.append(loss.detach().clone())
        self.cpu_ends.append(time.process_time())
        self.wall_ends.append(time.perf_counter())


def make_loader(size: Size, dp: int) -> Any:
    """This rank's samples, a step's in each batch; unevenly distributed tokens give it something to learn."""
    rank = int(os.environ["RANK"]) if dp > 1 else 0
    generator = torch.Generator().manual_seed(1)
    shape = (size.steps, dp, size.rows // dp, size.sequence + 1)
    tokens = (torch.rand(shape, generator=generator) ** 4 * size.vocabulary).long()[:, rank].flatten(0, 1)
    data = torch.utils.data.TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return torch.utils.data.DataLoader(data, batch_size=size.rows // dp)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def train_ours(size: Size, record: Record, *, strategy: dict[str, Any], moe: dict[str, Any]) -> None:
    """Our GPT under the Trainer, with arguments of the strategy and of MoEConfig."""
    from benchmarks.fit import fit

    config = size.config()
    assert config.moe is not None
    config = replace(config, moe=replace(config.moe, **moe))
    world = int(os.environ["WORLD_SIZE"])

    def build() -> GPTModel:
        model = GPTModel(config)
        weights = our_weights(build_plain(config, torch.device("cpu")), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(_own_experts(weights[name], len(parameter)))
        for module in model.modules():
            if isinstance(module, Experts):
                module.register_forward_pre_hook(lambda _, given: record.expert_rows.append(given[0].groups.num_rows))
        return model

    fit(
        build,
        lambda dp: make_loader(size, dp),
        {"num_microbatches": size.microbatches(world), **strategy},
        make_optimizer,
        record.add,
        accelerator="cpu",
        devices=world,
    )


def _own_experts(weight: Tensor, num: int) -> Tensor:
    """The `num` experts of this rank out of the weight of all experts; other weights as they are."""
    return weight if len(weight) == num else weight.chunk(len(weight) // num)[int(os.environ["RANK"])]


def train_plain(size: Size, record: Record) -> None:
    """The plain model."""
    model = build_plain(size.config(), torch.device("cpu"))
    _train(size, record, model, model)


def train_hugging_face(size: Size, record: Record, *, experts: str) -> None:
    """Hugging Face's Mixtral with torch's attention, its experts one after another or grouped; torch's DDP over
    several ranks."""
    if importlib.util.find_spec("transformers") is None:
        raise NotHere("left out: transformers is not installed")
    model = build_hugging_face(size.config(), experts=experts)
    model.load_state_dict(build_plain(size.config(), torch.device("cpu")).state_dict())
    model.train()
    if int(os.environ["WORLD_SIZE"]) > 1:
        _train_ddp(size, record, model)
    else:
        _train(size, record, model, lambda tokens, labels: _loss_of(model, tokens, labels))


@joined_by_gloo
def _train_ddp(size: Size, record: Record, model: nn.Module) -> None:
    # Without a token an expert has no gradient.
    ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    _train(size, record, ddp, lambda tokens, labels: _loss_of(ddp, tokens, labels))


def _loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    # Its own loss would shift the labels, which are shifted already.
    return F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())


def _train(size: Size, record: Record, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A hand-written loop of the same steps that the Trainer makes."""
    world = int(os.environ["WORLD_SIZE"])
    optimizer, count = make_optimizer(model.parameters()), size.microbatches(world)
    for tokens, labels in make_loader(size, world):
        optimizer.zero_grad()
        losses = []
        for i, rows in enumerate(zip(tokens.chunk(count), labels.chunk(count), strict=True)):
            if world > 1:
                model.require_backward_grad_sync = i == count - 1  # type: ignore[assignment]
            loss = loss_of(*rows) / count
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        record.add(torch.stack(losses).sum())
