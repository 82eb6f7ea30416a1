"""Networks as people write them, who never heard of ranks, and LightningModules that train them."""

from dataclasses import replace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_megatron import ModelPlan

WIDTH, HEADS, TOKENS, VOCABULARY, ROWS = 16, 2, 12, 32, 8


class Attention(nn.Module):
    """Causal attention with one linear each for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values [rows, heads, tokens, features]."""
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        return [one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value)]

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """A layer of a GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A small GPT of one file, whose head has the embedding's weight; it returns logits and, with targets, a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH) / 8)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def run_blocks(self, x: Tensor) -> Tensor:
        """The blocks in turn."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.run_blocks(self.tokens(tokens) + self.places[: tokens.shape[1]])
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class AddingGPT(GPT):
    """Changes what a block returned in place."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += self.places
        return x


class SkippingGPT(GPT):
    """Its last block gets what the first one returned."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](x + first)  # type: ignore[no-any-return]


class DirectGPT(GPT):
    """Goes past the call of its blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class LoopedGPT(GPT):
    """Runs its blocks twice."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(super().run_blocks(x))


class DictBlock(Block):
    """Returns what cannot be sent."""

    def forward(self, x: Any) -> Any:
        return {"hidden": super().forward(x["hidden"] if isinstance(x, dict) else x), "notes": {1, 2}}


class NotedGPT(GPT):
    """Its blocks return a set beside their hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DictBlock() for _ in range(4)])

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x)["hidden"]  # type: ignore[call-overload,no-any-return]


class SmoothedBlock(Block):
    """Adds a part of the token before to each token, outside of its attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * F.pad(x, (0, 0, 1, -1)))


class SmoothedGPT(GPT):
    """Its blocks mix tokens by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SmoothedBlock() for _ in range(4)])


class Conditioned(nn.Module):
    """A block whose norm is set by a condition that all blocks get, as diffusion transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 2 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.scale(condition).unsqueeze(1).chunk(2, -1)
        x = x + self.down(F.silu(self.up(self.norm(x) * (1 + scale) + shift)))
        return x, condition


class Diffusion(nn.Module):
    """A diffusion transformer: what its blocks are conditioned on comes from weights in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.enter, self.leave = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Conditioned() for _ in range(4)])

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        condition, x = self.time(time), self.enter(noisy)
        for block in self.blocks:
            x, _ = block(x, condition)
        left: Tensor = self.leave(x)
        return left


class Translator(nn.Module):
    """An encoder and a decoder of torch, whose layers all read what the encoder returned."""

    def __init__(self) -> None:
        super().__init__()
        settings: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        encoder, decoder = (
            kind(WIDTH, HEADS, 2 * WIDTH, **settings)
            for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        )
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 4)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decoder(self.tokens(target), self.encoder(self.tokens(source))))
        return logits


class Built(L.LightningModule):
    """Trains a GPT, which it builds in `__init__`, on the network's own loss, of ragged targets."""

    network: type[nn.Module] = GPT

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net: Any = self.network()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        _, loss = self.net(batch["tokens"], batch["targets"])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trains(Built):
    """Builds its network in `configure_model`."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(5)
            self.net = self.network()


class Validates(Trains):
    """Logs the network's loss, a mean over valid targets, in validation too."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, loss = self.net(batch["tokens"], batch["targets"])
        self.log("validation", loss)


class TrainsOverTensor(Trains):
    """Says which linears are cut over tp."""

    def model_plan(self) -> ModelPlan:
        """Attention by heads, the feed-forward network by its inner features."""
        return ModelPlan(
            styles={
                "net.blocks.*.attention.query": "colwise",
                "net.blocks.*.attention.key": "colwise",
                "net.blocks.*.attention.value": "colwise",
                "net.blocks.*.attention.out": "rowwise",
                "net.blocks.*.up": "colwise",
                "net.blocks.*.down": "rowwise",
            }
        )


class PackedAttention(Attention):
    """One linear for queries, keys and values, as in nanoGPT."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        return [one.view(shape).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)]


class PackedBlock(Block):
    """Gate and up of its feed-forward network are one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = PackedAttention()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PackedGPT(GPT):
    """A GPT of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PackedBlock() for _ in range(4)])


class TrainsPacked(Trains):
    """Says how many blocks lie side by side in a linear."""

    network = PackedGPT

    def model_plan(self) -> ModelPlan:
        """Every block of a linear is cut."""
        return ModelPlan(
            styles={
                "net.blocks.*.attention.qkv": "packed_colwise:3",
                "net.blocks.*.attention.out": "rowwise",
                "net.blocks.*.up": "packed_colwise",
                "net.blocks.*.down": "rowwise",
            }
        )


class TrainsHooked(TrainsOverTensor):
    """Has hooks on linears that would be cut, and on the gradient of a weight."""

    def configure_model(self) -> None:
        super().configure_model()
        blocks: Any = self.net.blocks
        blocks[0].up.register_forward_hook(lambda module, args, output: output / output.abs().amax())
        blocks[1].down.register_full_backward_hook(lambda module, into, out: (into[0] / (1 + into[0].norm()),))
        blocks[2].attention.query.weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


class TrainsPackedAsOne(TrainsPacked):
    """Takes blocks for features of one kind."""

    def model_plan(self) -> ModelPlan:
        """The plan without a word of blocks."""
        styles = {
            name: style.partition(":")[0].removeprefix("packed_") for name, style in super().model_plan().styles.items()
        }
        return ModelPlan(styles=styles)


class HandedBlock(Block):
    """Hands a weight of its own to its attention, which works on all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.attention = ShiftedAttention()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), self.shift)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ShiftedAttention(Attention):
    """Adds what it is handed to its input."""

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return super().forward(x if shift is None else x * shift)


class HandingGPT(GPT):
    """Its blocks hand weights to their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([HandedBlock() for _ in range(4)])


class TrainsHanding(TrainsOverTensor):
    """A weight of whose gradient every rank has all, and not a term."""

    network = HandingGPT


class ScaledAttention(Attention):
    """Scales what its last linear computed."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class ScaledGPT(GPT):
    """Its attention does something behind the last linear."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = ScaledAttention()


class TrainsScaled(TrainsOverTensor):
    """Attention whose output is no linear's."""

    network = ScaledGPT


class LentAttention(Attention):
    """Returns a weight of its own beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.late


class LendingBlock(Block):
    """Adds what its attention hands out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = LentAttention()

    def forward(self, x: Tensor) -> Tensor:
        mixed, late = self.attention(self.norm_1(x))
        x = x + mixed * late
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class LendingGPT(GPT):
    """A weight of attention is used on own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LendingBlock() for _ in range(4)])


class TrainsLending(TrainsOverTensor):
    """A weight of whose gradient every rank has a term, which nothing says."""

    network = LendingGPT


class TrainsSmoothed(TrainsOverTensor):
    """Blocks that no rank can run on its own tokens."""

    network = SmoothedGPT


class BuiltOverTensor(Built):
    """The same plan, for a network that is there before processes start."""

    model_plan = TrainsOverTensor.model_plan


class LatentAttention(nn.Module):
    """DeepSeek's attention: keys and values from few latent features, and one rotary part of a key for all heads."""

    qk_rope_head_dim = 2

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 6 + self.qk_rope_head_dim)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, HEADS * (6 + 8))
        self.out = nn.Linear(HEADS * 8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        latent, rotary = self.down(x).split((6, self.qk_rope_head_dim), -1)
        query = self.query(x).view(rows, tokens, -1, 8).transpose(1, 2)
        key, value = self.up(self.norm(latent)).view(rows, tokens, -1, 14).transpose(1, 2).split((6, 8), -1)
        key = torch.cat((key, rotary.unsqueeze(1).sin().expand(-1, key.shape[1], -1, -1)), -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class LatentGPT(GPT):
    """A GPT with latent attention."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = LatentAttention()


class TrainsLatent(TrainsOverTensor):
    """Says how latent attention is cut."""

    network = LatentGPT

    def model_plan(self) -> ModelPlan:
        """Heads over tp, and the latent features on every rank."""
        return ModelPlan(
            styles={
                "net.blocks.*.attention.query": "colwise",
                "net.blocks.*.attention.down": "mla_kv_a_proj",
                "net.blocks.*.attention.up": "colwise",
                "net.blocks.*.attention.out": "rowwise",
            }
        )


class NormedAttention(Attention):
    """Attention with a norm of each head's queries, as Qwen3 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH // HEADS)

    def heads(self, x: Tensor) -> list[Tensor]:
        query, key, value = super().heads(x)
        return [self.norm(query), key, value]


class NormedGPT(GPT):
    """A GPT with norms of queries."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = NormedAttention()


class WideNormAttention(Attention):
    """Attention with a norm of the queries of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def heads(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:2], -1, WIDTH // HEADS)
        found = (self.norm(self.query(x)), self.key(x), self.value(x))
        return [one.view(shape).transpose(1, 2) for one in found]


class WideNormGPT(GPT):
    """A GPT whose norms need all features."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = WideNormAttention()


class TrainsWideNorm(TrainsOverTensor):
    """Attention that no rank can run on its own heads."""

    network = WideNormGPT


class TrainsNormedUnsaid(TrainsOverTensor):
    """Does not say that a norm sees the heads of a rank."""

    network = NormedGPT


class TrainsNormed(TrainsOverTensor):
    """Says that a norm sees the heads of a rank."""

    network = NormedGPT

    def model_plan(self) -> ModelPlan:
        """The plan of a GPT, with its norms of queries."""
        norms = {"net.blocks.*.attention.norm": "replicated_with_grad_allreduce"}
        return ModelPlan(styles={**super().model_plan().styles, **norms})


class Regularised(GPT):
    """Returns a mean of squares, and no loss of its targets."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits, _ = super().forward(tokens)
        return logits, F.mse_loss(logits, torch.zeros_like(logits))


class TrainsRegularised(Trains):
    """Adds what the network returns to a loss of its own."""

    network = Regularised

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, squares = self.net(batch["tokens"])
        own = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-1)
        return own + 0.1 * squares


class TrainsWholeHeads(TrainsOverTensor):
    """Attention stays whole but for its last linear, which takes a part of what is whole."""

    def model_plan(self) -> ModelPlan:
        """One linear of attention, and none of the feed-forward network."""
        return ModelPlan(styles={"net.blocks.*.attention.out": "rowwise_split_input"})


class FixedHeads(Attention):
    """Counts its heads by a constant, and takes what is left for their size."""

    def heads(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:2], HEADS, -1)
        return [one(x).view(shape).transpose(1, 2) for one in (self.query, self.key, self.value)]


class FixedHeadsGPT(GPT):
    """Its attention runs with heads of any size."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attention = FixedHeads()


class TrainsFixedHeads(TrainsOverTensor):
    """Runs over tensor-parallel ranks, on heads of half the size."""

    network = FixedHeadsGPT


class SwappingGPT(GPT):
    """Puts another attention in the place of its blocks' own as it runs, as BigBird does for short texts."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if type(block.attention) is Attention:
                swapped = FixedHeads()
                swapped.__dict__["_modules"] = block.attention._modules
                block.attention = swapped
        return super().run_blocks(x)


class TrainsSwapped(TrainsOverTensor):
    """Its attention is another one than the one that was cut."""

    network = SwappingGPT


class UntiedGPT(GPT):
    """Its head has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


class PaddedGPT(GPT):
    """One of its tokens stands for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)
        self.head.weight = self.tokens.weight


class TrainsTied(TrainsOverTensor):
    """The vocabulary is cut in the embedding and in the head, which have one weight."""

    network = PaddedGPT

    def model_plan(self) -> ModelPlan:
        vocabulary = {"net.tokens": "embedding_rowwise", "net.head": "colwise_gather_output"}
        return ModelPlan(styles={**super().model_plan().styles, **vocabulary})


class TrainsGathered(TrainsOverTensor):
    """The head, and what comes out of the first linear, are cut and gathered."""

    network = UntiedGPT

    def model_plan(self) -> ModelPlan:
        """Each linear by itself."""
        return ModelPlan(
            styles={
                "net.head": "colwise_gather_output",
                "net.blocks.*.up": "colwise_gather_output",
                "net.blocks.*.down": "rowwise_split_input",
            }
        )


class SharingGPT(GPT):
    """Its first and its last block have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight


class TrainsSharing(Trains):
    network = SharingGPT


class TrainsCheckpointed(Trains):
    """Recomputes its first block by the reentrant way of torch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net.run_blocks = self.run_blocks
        return super().training_step(batch, batch_idx)

    def run_blocks(self, x: Tensor) -> Any:
        """The blocks in turn, each under a checkpoint."""
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class TrainsAdding(Trains):
    network = AddingGPT


class TrainsSkipping(Trains):
    network = SkippingGPT


class TrainsSaidSkipping(TrainsOverTensor):
    """Says which block is read later."""

    network = SkippingGPT

    def model_plan(self) -> ModelPlan:
        return replace(super().model_plan(), skip_connections=("net.blocks.0",))


class TrainsInPlace(Trains):
    """Changes its batch in place."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        batch["tokens"].add_(1).remainder_(VOCABULARY)
        batch["targets"].add_(1).remainder_(VOCABULARY)
        return super().training_step(batch, batch_idx)


class TrainsDirect(Trains):
    network = DirectGPT


class TrainsLooped(Trains):
    network = LoopedGPT


class TrainsNoted(Trains):
    network = NotedGPT


class TrainsTranslator(Trains):
    network = Translator

    def model_plan(self) -> ModelPlan:
        """Encoder and decoder are both cut, and their feed-forward networks over tp."""
        styles = {"net.*coder.layers.*.linear1": "colwise", "net.*coder.layers.*.linear2": "rowwise"}
        return ModelPlan(layers=("net.encoder.layers", "net.decoder.layers"), styles=styles)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch["tokens"], batch["tokens"].flip(1))
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=-1)


class Encoder(nn.Module):
    """Layers of torch, which in evaluation take their weights into a kernel of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.tokens(tokens))
        return hidden


class PredictsEncoded(Built):
    """Predicts what the encoder returns."""

    network = Encoder

    def model_plan(self) -> ModelPlan:
        """The feed-forward networks are cut."""
        layer = "net.encoder.layers.*"
        return ModelPlan(styles={f"{layer}.linear1": "colwise", f"{layer}.linear2": "rowwise"})

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        encoded: Tensor = self.net(batch["tokens"])
        return encoded


class TrainsDiffusion(Trains):
    network = Diffusion

    def model_plan(self) -> ModelPlan:
        """The feed-forward networks are cut over tp."""
        return ModelPlan(styles={"net.blocks.*.up": "colwise", "net.blocks.*.down": "rowwise"})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.net(batch["noisy"], batch["time"]), batch["noisy"].flip(1))


def loader(batch_size: int = ROWS) -> DataLoader[Any]:
    """The rows of the batches, in their order."""
    rows = [{key: values[row] for key, values in batch.items()} for batch in batches() for row in range(ROWS)]
    return DataLoader(rows, batch_size=batch_size)  # type: ignore[arg-type]


def odd_batches() -> list[dict[str, Tensor]]:
    """The batches with 11 tokens in a row."""
    return [{name: one[:, :11] if one.dim() == 2 else one for name, one in batch.items()} for batch in batches()]


def batches() -> list[dict[str, Tensor]]:
    """Three batches: tokens [8, 12], targets of another number of valid ones in each row, noise [8, 12, 3]."""
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(3):
        tokens = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
        targets = tokens.roll(-1, 1)
        for row, length in enumerate((3, 12, 1, 7, 12, 5, 0, 9)):
            targets[row, length:] = -1
        noisy, time = (torch.randn(ROWS, *shape, generator=generator) for shape in ((TOKENS, 3), (1,)))
        found.append({"tokens": tokens, "targets": targets, "noisy": noisy, "time": time})
    return found
