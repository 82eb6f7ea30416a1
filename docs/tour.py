"""A small GPT under tensor and pipeline parallelism, with torch alone: what this package does, in one sitting.

    torchrun --nproc-per-node 4 docs/tour.py --tp 2 --pp 2

The world is pp x tp. Tensor-parallel ranks hold slices of every large weight of their layers, pipeline ranks ("stages")
hold different layers. Read from top to bottom: who talks to whom, layers that are cut, the model in parts, the schedule
as data, what runs it, and a step whose loss, gradients and norm are those of one device.

B batch, S sequence, H hidden, A heads, D head size, F feed-forward, V vocabulary; `F/tp` is a dim that ranks share.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# ----------------------------------------------------------------------------------------------------------------------
# Who talks to whom: lightning_megatron/mesh.py


@dataclass(frozen=True)
class Axis:
    """Some ranks, this one among them, and the process group by which they talk."""

    size: int
    rank: int
    ranks: list[int]
    group: dist.ProcessGroup | None


def make_axes(tp: int, pp: int) -> tuple[Axis, Axis]:
    """The tensor-parallel ranks of this rank's stage, and the stages of its slice. Neighbours share a machine, and
    tensor parallelism sends most: so tp varies fastest."""
    me = dist.get_rank()
    tensor_ranks = [[first + i for i in range(tp)] for first in range(0, tp * pp, tp)]
    # Stages count downwards: the last one, which has the loss, is on rank 0, where a user expects to see it.
    stage_ranks = [[(pp - 1 - stage) * tp + i for stage in range(pp)] for i in range(tp)]
    axes = []
    for lines in (tensor_ranks, stage_ranks):
        for ranks in lines:
            # Every rank makes every group, its own or not: torch waits for all of them.
            group = dist.new_group(ranks)
            if me in ranks:
                axes.append(Axis(len(ranks), ranks.index(me), ranks, group))
    return axes[0], axes[1]


# ----------------------------------------------------------------------------------------------------------------------
# Two functions, each the backward of the other: lightning_megatron/comm/differentiable.py


def all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The sum of `x` over the axis; `x` itself is kept."""
    out = x.clone()
    dist.all_reduce(out, op, axis.group)
    return out


class Copy(torch.autograd.Function):
    """Into a part that each rank computes a share of: the input is copied, and its gradients are summed."""

    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce(grad, ctx.axis), None


class Reduce(torch.autograd.Function):
    """Out of such a part: the shares are summed, and each has the whole gradient."""

    @staticmethod
    def forward(ctx, x, axis):
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# ----------------------------------------------------------------------------------------------------------------------
# Layers that are cut: lightning_megatron/tensor/, lightning_megatron/transformer/


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    vocabulary: int = 256
    sequence: int = 64


# The dim along which tensor-parallel ranks cut a weight, by the end of its name. What is not here is on every rank.
CUT = {
    "tokens.weight": 0,  # [V/tp, H]
    "qkv.weight": 0,  # [A/tp * 3 * D, H]: a head's query, key and value lie together, so that a slice is whole heads
    "qkv.bias": 0,
    "projection.weight": 1,  # [H, A/tp * D]
    "up.weight": 0,  # [F/tp, H]
    "up.bias": 0,
    "down.weight": 1,  # [H, F/tp]
}


def cut_dim(name: str) -> int | None:
    """The dim along which a weight is cut; None where every rank holds all of it."""
    return next((dim for end, dim in CUT.items() if name.endswith(end)), None)


class Layer(nn.Module):
    """Attention and MLP. Each begins with a linear cut by columns and ends with one cut by rows: one sum in each."""

    def __init__(self, weights: dict[str, Tensor], prefix: str, config: Config, tp: Axis) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        self.params = nn.ParameterDict({name.replace(".", "/"): value for name, value in own.items()})

    def weight(self, name: str) -> Tensor:
        """A parameter; the dots of names are slashes in torch's dictionary of parameters."""
        return self.params[name.replace(".", "/")]

    def norm(self, name: str, x: Tensor) -> Tensor:
        """Layer norm, which every rank computes alike."""
        return F.layer_norm(x, (self.config.hidden,), self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def cut_by_columns(self, name: str, x: Tensor) -> Tensor:
        """[B, S, H] to this rank's features. Each rank has a term of the gradient of `x`; the copy sums them."""
        return F.linear(Copy.apply(x, self.tp), self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def cut_by_rows(self, name: str, x: Tensor) -> Tensor:
        """This rank's features to [B, S, H]. Before the sum, tp ranks would add the bias tp times."""
        return Reduce.apply(F.linear(x, self.weight(f"{name}.weight")), self.tp) + self.weight(f"{name}.bias")

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, sequence, hidden = x_BSH.shape
        heads, size = self.config.heads // self.tp.size, hidden // self.config.heads
        fused = self.cut_by_columns("attention.qkv", self.norm("attention_norm", x_BSH))
        # No message within attention: a rank has all there is of its heads.
        q, k, v = fused.view(batch, sequence, heads, 3, size).transpose(1, 2).unbind(3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSH = x_BSH + self.cut_by_rows("attention.projection", mixed.transpose(1, 2).reshape(batch, sequence, -1))
        up = F.gelu(self.cut_by_columns("mlp.up", self.norm("mlp_norm", x_BSH)))
        return x_BSH + self.cut_by_rows("mlp.down", up)


class Embedding(nn.Module):
    """Tokens and positions to hidden states. A rank has rows of some tokens, gives zeros for others, and sums."""

    def __init__(self, weights: dict[str, Tensor], tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        self.tokens, self.positions = weights["embedding.tokens.weight"], weights["embedding.positions.weight"]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        rows = tokens_BS - self.tp.rank * len(self.tokens)
        is_other = (rows < 0) | (rows >= len(self.tokens))
        own = F.embedding(rows.masked_fill(is_other, 0), self.tokens).masked_fill(is_other[..., None], 0.0)
        return Reduce.apply(own, self.tp) + self.positions[: tokens_BS.shape[1]]


class Head(nn.Module):
    """The last norm, logits of this rank's words, and the loss over all words, without gathering the logits."""

    def __init__(self, weights: dict[str, Tensor], config: Config, tp: Axis) -> None:
        super().__init__()
        self.tp, self.config = tp, config
        # Tied to the embedding: on one stage it is the same tensor, on two it is a copy whose gradients are summed.
        self.tokens = weights["embedding.tokens.weight"]
        self.norm_weight, self.norm_bias = weights["final_norm.weight"], weights["final_norm.bias"]

    def forward(self, x_BSH: Tensor, labels_BS: Tensor) -> Tensor:
        """The sum of the losses of all tokens that have a label; -100 is none."""
        x = F.layer_norm(x_BSH, (self.config.hidden,), self.norm_weight, self.norm_bias)
        logits = F.linear(Copy.apply(x, self.tp), self.tokens)
        # log softmax in three small messages: the largest logit, the sum of exponentials, the logit of the label.
        largest = all_reduce(logits.detach().amax(-1), self.tp, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        total = Reduce.apply(logits.exp().sum(-1), self.tp)
        rows = labels_BS - self.tp.rank * len(self.tokens)
        is_own = (rows >= 0) & (rows < len(self.tokens))
        own = logits.gather(-1, rows.masked_fill(~is_own, 0)[..., None])[..., 0].masked_fill(~is_own, 0.0)
        losses = total.log() - Reduce.apply(own, self.tp)
        return losses.masked_fill(labels_BS == -100, 0.0).sum()


# ----------------------------------------------------------------------------------------------------------------------
# The model in parts, of which a stage has some: lightning_megatron/models/, lightning_megatron/pipeline/layout.py


class Stage(nn.Module):
    """The parts of the model that a stage runs, with this rank's slices of their weights."""

    def __init__(self, whole: dict[str, Tensor], config: Config, tp: Axis, pp: Axis) -> None:
        super().__init__()
        self.is_first, self.is_last = pp.rank == 0, pp.rank == pp.size - 1
        each = config.layers // pp.size
        own_layers = range(pp.rank * each, (pp.rank + 1) * each)
        prefixes = [f"layers.{i}." for i in own_layers]
        prefixes += ["embedding."] * self.is_first + ["final_norm.", "embedding.tokens."] * self.is_last
        # A rank keeps its slices. In the package it never sees the others: it draws, or reads, these alone.
        self.named = {
            name: nn.Parameter(value if (dim := cut_dim(name)) is None else value.chunk(tp.size, dim)[tp.rank].clone())
            for name, value in whole.items()
            if any(name.startswith(prefix) for prefix in prefixes)
        }
        self.embedding = Embedding(self.named, tp) if self.is_first else None
        self.layers = nn.ModuleList(Layer(self.named, f"layers.{i}.", config, tp) for i in own_layers)
        self.head = Head(self.named, config, tp) if self.is_last else None

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Tokens or received hidden states, to hidden states or the sum of losses."""
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x, labels) if self.head is not None else x


# ----------------------------------------------------------------------------------------------------------------------
# The schedule as data, and what runs it: lightning_megatron/pipeline/schedules/, lightning_megatron/pipeline/runtime.py


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[tuple[str, int]]:
    """The order of a stage: as many forwards as there are stages behind it, then one forward and one backward in turn,
    then the backwards that are left. No stage holds the activations of more microbatches than there are stages."""
    warm_up = min(num_stages - 1 - stage, num_microbatches)
    order = [("forward", i) for i in range(warm_up)]
    for i in range(num_microbatches - warm_up):
        order += [("forward", warm_up + i), ("backward", i)]
    return order + [("backward", i) for i in range(num_microbatches - warm_up, num_microbatches)]


def run_schedule(stage: Stage, tokens: list[Tensor], labels: list[Tensor], pp: Axis, hidden: int) -> Tensor:
    """Forwards and backwards of all microbatches. Gives the sum of losses over tokens, zero on stages before the last.

    Sends are posted and never waited for before the end: two stages that both waited for a send would wait for ever.
    """
    dtype = next(iter(stage.named.values())).dtype
    posted, inputs, outputs = [], {}, {}
    loss = torch.zeros((), dtype=dtype)

    def send(x: Tensor, to_stage: int) -> None:
        posted.append((x, dist.isend(x, pp.ranks[to_stage])))

    def receive(shape: tuple[int, ...], from_stage: int) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        dist.recv(x, pp.ranks[from_stage])
        return x

    for action, i in one_f_one_b(pp.rank, pp.size, len(tokens)):
        shape = (*tokens[i].shape, hidden)
        if action == "forward":
            x = tokens[i] if stage.is_first else receive(shape, pp.rank - 1).requires_grad_()
            inputs[i], outputs[i] = x, stage(x, labels[i])
            if stage.is_last:
                loss += outputs[i].detach()
            else:
                send(outputs[i].detach(), pp.rank + 1)
        else:
            output, x = outputs.pop(i), inputs.pop(i)
            output.backward(None if stage.is_last else receive(shape, pp.rank + 1))
            if not stage.is_first:
                send(x.grad, pp.rank - 1)
    for _, work in posted:
        work.wait()
    return loss


# ----------------------------------------------------------------------------------------------------------------------
# A step with the numbers of one device: lightning_megatron/optim/


def finish_gradients(stage: Stage, num_valid: int, tp: Axis, pp: Axis, largest_norm: float) -> Tensor:
    """Turns gradients of sums into those of the mean over valid tokens, and clips them. Gives their norm."""
    if pp.size > 1 and (stage.is_first or stage.is_last):
        # The embedding stands on two stages, and each has a term of its gradient.
        grad = stage.named["embedding.tokens.weight"].grad
        other = torch.empty_like(grad)
        work = dist.isend(grad.clone(), pp.ranks[pp.size - 1 if stage.is_first else 0])
        dist.recv(other, pp.ranks[pp.size - 1 if stage.is_first else 0])
        work.wait()
        grad += other
    squares = torch.zeros((), dtype=next(iter(stage.named.values())).dtype)
    for name, parameter in stage.named.items():
        # A mean of the microbatches' means would be another number where they have unequally many valid tokens.
        parameter.grad /= num_valid
        # Each element counts once: slices on every rank, the rest on one of them, tied weights on one stage.
        is_counted = cut_dim(name) is not None or tp.rank == 0
        is_copy = name == "embedding.tokens.weight" and not stage.is_first
        squares += parameter.grad.square().sum() * (is_counted and not is_copy)
    dist.all_reduce(squares)
    norm = squares.sqrt()
    for parameter in stage.named.values():
        parameter.grad *= min(1.0, largest_norm / (float(norm) + 1e-6))
    return norm


def train(
    whole: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    config: Config,
    *,
    tp: int,
    pp: int,
    num_microbatches: int,
    lr: float = 1e-3,
    largest_norm: float = 1.0,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Trains on batches of tokens and labels [B, S], the same on all ranks. Gives loss and gradient norm of each step,
    and this rank's weights."""
    tp_axis, pp_axis = make_axes(tp, pp)
    stage = Stage(whole, config, tp_axis, pp_axis)
    optimizer = torch.optim.AdamW(stage.named.values(), lr=lr)
    steps = []
    for tokens, labels in batches:
        optimizer.zero_grad()
        cut = [part.chunk(num_microbatches) for part in (tokens, labels)]
        num_valid = int((labels != -100).sum())
        loss = run_schedule(stage, list(cut[0]), list(cut[1]), pp_axis, config.hidden)
        norm = finish_gradients(stage, num_valid, tp_axis, pp_axis, largest_norm)
        optimizer.step()
        # Only the last stage has it; rank 0 is one of its ranks.
        dist.broadcast(loss, src=0)
        steps.append((float(loss) / num_valid, float(norm)))
    return steps, {name: parameter.detach() for name, parameter in stage.named.items()}


def initial_weights(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """Every weight of the whole model. They depend on no layout, so that any layout begins alike."""
    hidden, generator = config.hidden, torch.Generator().manual_seed(seed)
    shapes = {"embedding.tokens.weight": (config.vocabulary, hidden), "final_norm.weight": (hidden,)}
    shapes |= {"embedding.positions.weight": (config.sequence, hidden), "final_norm.bias": (hidden,)}
    linears = {"attention.qkv": 3 * hidden, "attention.projection": hidden, "mlp.up": 4 * hidden, "mlp.down": hidden}
    for i in range(config.layers):
        for name, features in linears.items():
            inputs = 4 * hidden if name == "mlp.down" else hidden
            shapes |= {f"layers.{i}.{name}.weight": (features, inputs), f"layers.{i}.{name}.bias": (features,)}
        for name in ("attention_norm", "mlp_norm"):
            shapes |= {f"layers.{i}.{name}.weight": (hidden,), f"layers.{i}.{name}.bias": (hidden,)}
    weights = {}
    for name, shape in shapes.items():
        is_scale = name.endswith("norm.weight")
        drawn = torch.randn(shape, generator=generator) * 0.02
        weights[name] = torch.ones(shape) if is_scale else torch.zeros(shape) if name.endswith("bias") else drawn
    return weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains a small GPT on the bytes of this file.")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pp", type=int, default=1, help="stages")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = text.unfold(0, 65, 64)
    batches = [(rows[i : i + 8, :-1], rows[i : i + 8, 1:]) for i in range(0, len(rows) - 7, 8)] * 5
    steps, _ = train(initial_weights(Config()), batches, Config(), tp=options.tp, pp=options.pp, num_microbatches=4)
    if os.environ["RANK"] == "0":
        print(" ".join(f"{loss:.4f}" for loss, _ in steps[:: max(1, len(steps) // 10)]))
    dist.destroy_process_group()
