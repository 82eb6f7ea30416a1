"""A T5 on one device in plain torch, written for clarity alone: what `T5Model` must equal on every mesh.

It takes the unsplit weights of a `T5Model` by name and shares with it only the definition of the random numbers. A pair
of documents, one of either stack, is a row of its own, beside others as long.
"""

import math
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models import T5Config
from tests.reference.gpt import ReferenceGPT, Weights


class ReferenceT5(ReferenceGPT):
    """Loss or logits from weights by name. `draws` gives the dropout masks of a training step; none, no training."""

    config: T5Config  # type: ignore[assignment]

    def __init__(self, config: T5Config, weights: Weights, draws: rng.Draws | None = None) -> None:
        super().__init__(config, weights, draws)  # type: ignore[arg-type]

    def loss(  # type: ignore[override]
        self,
        encoder_tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        encoder_segments: Tensor,
        decoder_segments: Tensor,
    ) -> Tensor:
        """Mean over the tokens of documents that have a label, weighted by the mask; 0 where there is none."""
        logits = self.pairs_of_documents(encoder_tokens, decoder_tokens, encoder_segments, decoder_segments)
        labels = torch.where(decoder_segments < 0, -100, labels)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        weights = torch.where(labels == -100, 0.0, loss_mask).to(losses.dtype)
        return (losses * weights).sum() / (weights.sum() if weights.sum() > 0 else 1.0)

    def pairs_of_documents(self, read: Tensor, told: Tensor, read_segments: Tensor, told_segments: Tensor) -> Tensor:
        """Logits of the decoder's tokens, zeros where there is no document."""
        table = self.weights["embedding.tokens.weight"]
        logits = torch.zeros(*told.shape, self.config.vocab_size, dtype=table.dtype)
        rows = None if self.draws is None else self.draws.sample_keys(len(told), torch.device("cpu"))
        alike = defaultdict(list)
        for row in range(len(told)):
            for number in range(int(told_segments[row].max()) + 1):
                places = [torch.nonzero(s[row] == number).flatten() for s in (read_segments, told_segments)]
                if len(places[1]):
                    alike[len(places[0]), len(places[1])].append((row, number, *places))
        for pairs in alike.values():
            row, number = (torch.tensor([pair[i] for pair in pairs]) for i in (0, 1))
            of_read, of_told = (torch.stack([pair[i] for pair in pairs]) for i in (2, 3))
            if rows is not None:
                self.sample_keys = rng.bits(rows[row], number)
            found = self.answer(read[row[:, None], of_read], told[row[:, None], of_told])
            logits = logits.index_put((row[:, None], of_told), found)
        self.sample_keys = None
        return logits

    def answer(self, read: Tensor, told: Tensor) -> Tensor:
        """Logits of whole rows."""
        memory = self.stack("encoder", read, None)
        x = self.stack("decoder", told, memory)
        if self.config.scales_head:
            x = x / math.sqrt(self.config.hidden_size)
        head = "embedding.tokens.weight" if self.config.tie_embeddings else "head.weight"
        return F.linear(x, self.weights[head])

    def stack(self, stack: str, tokens: Tensor, memory: Tensor | None) -> Tensor:
        config = self.config
        x = self.drop(self.weights["embedding.tokens.weight"][tokens], f"{stack}.embedding")
        for i in range(config.num_layers if memory is None else config.num_decoder_layers):
            layer = f"{stack}.layers.{i}"
            normed = self.norm(x, f"{layer}.attention_norm")
            x = x + self.drop(self.attend_itself(normed, f"{layer}.attention", stack), f"{layer}.attention")
            if memory is not None:
                normed = self.norm(x, f"{layer}.cross_norm")
                crossed = self.attend_to(normed, memory, f"{layer}.cross_attention")
                x = x + self.drop(crossed, f"{layer}.cross_attention")
            normed = self.norm(x, f"{layer}.mlp_norm")
            x = x + self.drop(self.feed_forward(normed, f"{layer}.mlp"), f"{layer}.mlp")
        return self.drop(self.norm(x, f"{stack}.final_norm.norm"), f"{stack}.final_norm")

    def attend_itself(self, x: Tensor, name: str, stack: str) -> Tensor:
        config, size, length = self.config, self.config.head_dim, x.shape[1]
        is_causal = stack == "decoder"
        table = self.weights[f"{stack}.layers.0.relative_bias.weight"]
        numbers = [[self.bucket(key - query, is_causal) for key in range(length)] for query in range(length)]
        biases = table[torch.tensor(numbers, dtype=torch.int64).view(length, length)]
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1) & is_causal
        fused = self.linear(x, f"{name}.qkv")
        outputs = []
        for head in range(config.num_attention_heads):
            # As many groups as heads: query, key and value of each head follow each other.
            query, key, value = fused[..., 3 * head * size : 3 * (head + 1) * size].split(size, dim=-1)
            scores = (query @ key.transpose(1, 2) + biases[..., head]).masked_fill(unseen, -math.inf)
            outputs.append(self.drop_attention(scores.softmax(dim=-1), name, head) @ value)
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.projection")

    def attend_to(self, x: Tensor, memory: Tensor, name: str) -> Tensor:
        size = self.config.head_dim
        queries, pairs = self.linear(x, f"{name}.query"), self.linear(memory, f"{name}.key_value")
        outputs = []
        for head in range(self.config.num_attention_heads):
            query = queries[..., head * size : (head + 1) * size]
            key, value = pairs[..., 2 * head * size : 2 * (head + 1) * size].split(size, dim=-1)
            # Of nothing to look at: no weights, and zeros.
            weights = (query @ key.transpose(1, 2)).softmax(dim=-1)
            outputs.append(self.drop_attention(weights, name, head) @ value)
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.projection")

    def bucket(self, distance: int, is_causal: bool) -> int:
        """The number of the range that a distance lies in, of the key from the query."""
        num, first, steps = self.config.relative_buckets, 0, max(0, -distance)
        if not is_causal:
            num //= 2
            first, steps = num * (distance > 0), abs(distance)
        near = num // 2
        if steps < near:
            return first + steps
        far = math.log(steps / near) / math.log(self.config.relative_max_distance / near) * (num - near)
        return first + min(num - 1, near + int(far))

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        y = self.activate(self.linear(x, f"{name}.up"))
        probability = self.config.ffn_dropout
        if self.draws is not None and probability > 0:
            keys = rng.bits(rng.key(name, "feature dropout"), self.token_keys(*y.shape[:2]))
            y = y * rng.keep_mask(keys, y.shape[2], probability) / (1 - probability)
        return self.linear(y, f"{name}.down")

    def activate(self, y: Tensor) -> Tensor:
        if self.config.activation == "relu":
            return y.clamp(min=0)
        gate, up = y.chunk(2, dim=-1)
        return super().activate(gate) * up
