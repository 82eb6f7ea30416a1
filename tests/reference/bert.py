"""A BERT on one device in plain torch, written for clarity alone: what `BertModel` must equal on every mesh.

It takes the unsplit weights of a `BertModel` by name, shares with it only the definition of the random numbers, and
goes row by row, each cut to its real tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models import BertConfig


class ReferenceBert:
    """Loss or logits from weights by name. `draws` gives the dropout masks of a training step; none, no training."""

    def __init__(self, config: BertConfig, weights: dict[str, Tensor], draws: rng.Draws | None = None) -> None:
        self.config, self.weights, self.draws = config, weights, draws
        # By which the row that is worked on draws.
        self.row_key: Tensor | None = None

    def logits(
        self, tokens: Tensor, token_types: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Those of tokens [batch, sequence, vocabulary] and of samples [batch, 2], zeros where there is nothing."""
        dtype = self.weights["embedding.tokens.weight"].dtype
        of_tokens = torch.zeros(*tokens.shape, self.config.vocab_size, dtype=dtype)
        of_samples = torch.zeros(len(tokens), 2, dtype=dtype)
        rows, orders = [], []
        keys = None if self.draws is None else self.draws.sample_keys(len(tokens), torch.device("cpu"))
        for row in range(len(tokens)):
            if keys is not None:
                # A row with padding is the first document of its row.
                self.row_key = keys[row] if padding_mask is None else rng.bits(keys[row], torch.tensor(0))
            length = tokens.shape[1] if padding_mask is None else int(padding_mask[row].sum())
            types = torch.zeros_like(tokens[row]) if token_types is None else token_types[row]
            if length == 0:
                rows.append(of_tokens[row])
                orders.append(of_samples[row])
                continue
            hidden = self.encode(tokens[row, :length], types[:length])
            rows.append(torch.cat((self.predict(hidden), of_tokens[row, length:])))
            orders.append(self.order(hidden[0]) if self.config.add_binary_head else of_samples[row])
        return torch.stack(rows), torch.stack(orders)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        sentence_order_labels: Tensor | None = None,
    ) -> Tensor:
        of_tokens, of_samples = self.logits(tokens, token_types, padding_mask)
        weights = torch.where(labels == -100, 0.0, torch.ones_like(tokens) if loss_mask is None else loss_mask)
        if padding_mask is not None:
            weights = weights * padding_mask
        smoothing = self.config.label_smoothing
        losses = F.cross_entropy(of_tokens.transpose(1, 2), labels, reduction="none", label_smoothing=smoothing)
        total = torch.where(weights > 0, losses * weights, 0.0).sum()
        if sentence_order_labels is not None:
            orders = F.cross_entropy(of_samples, sentence_order_labels, reduction="none")
            total = total + (orders * weights.sum(1)).sum()
        return total / (weights.sum() if weights.sum() > 0 else 1.0)

    def encode(self, ids: Tensor, types: Tensor) -> Tensor:
        """The hidden states of one row, [tokens, hidden]."""
        config = self.config
        x = self.weights["embedding.tokens.weight"][ids]
        if config.position == "learned":
            x = x + self.weights["embedding.positions.weight"][: len(ids)]
        if config.num_token_types:
            x = x + self.weights["embedding.token_types.weight"][types]
        if config.embedding_norm:
            x = self.norm(x, "embedding.norm")
        x = self.drop(x, "embedding")
        for i in range(config.num_layers):
            layer = f"layers.{i}"
            if config.norm_placement == "post":
                x = self.norm(x + self.attend(x, f"{layer}.attention"), f"{layer}.attention_norm")
                x = self.norm(x + self.feed_forward(x, f"{layer}.mlp"), f"{layer}.mlp_norm")
            else:
                x = x + self.attend(self.norm(x, f"{layer}.attention_norm"), f"{layer}.attention")
                x = x + self.feed_forward(self.norm(x, f"{layer}.mlp_norm"), f"{layer}.mlp")
        return self.norm(x, "final_norm") if config.norm_placement == "pre" else x

    def attend(self, x: Tensor, name: str) -> Tensor:
        config, size = self.config, self.config.head_dim
        fused = self.linear(x, f"{name}.qkv").view(len(x), config.num_query_groups, config.heads_per_group + 2, size)
        heads = []
        for head in range(config.num_attention_heads):
            group, place = divmod(head, config.heads_per_group)
            query, key, value = fused[:, group, place], fused[:, group, -2], fused[:, group, -1]
            weights = self.drop_attention((query @ key.t() / size**0.5).softmax(dim=-1), name, head)
            heads.append(weights @ value)
        return self.drop(self.linear(torch.cat(heads, dim=1), f"{name}.projection"), name)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        return self.drop(self.linear(self.activate(self.linear(x, f"{name}.up")), f"{name}.down"), name)

    def drop(self, x: Tensor, name: str) -> Tensor:
        probability = self.config.hidden_dropout
        if self.row_key is None or probability == 0:
            return x
        keys = rng.bits(rng.key(name, "dropout"), rng.bits(self.row_key, torch.arange(len(x))))
        return x * rng.keep_mask(keys, x.shape[1], probability) / (1 - probability)

    def drop_attention(self, weights: Tensor, name: str, head: int) -> Tensor:
        probability = self.config.attention_dropout
        if self.row_key is None or probability == 0:
            return weights
        tokens = rng.bits(self.row_key, torch.arange(len(weights)))
        rows = rng.bits(rng.key(name, "attention dropout"), tokens)
        keys = rng.bits(rows, torch.full_like(rows, head))
        return weights * rng.keep_mask(keys, weights.shape[1], probability) / (1 - probability)

    def predict(self, x: Tensor) -> Tensor:
        head = "head.masked_tokens"
        x = self.norm(self.activate(self.linear(x, f"{head}.dense")), f"{head}.norm")
        matrix = "embedding.tokens.weight" if self.config.tie_embeddings else f"{head}.weight"
        return x @ self.weights[matrix].t() + self.weights[f"{head}.bias"]

    def order(self, first: Tensor) -> Tensor:
        head = "head.sentence_order"
        return self.linear(self.linear(first, f"{head}.pooler").tanh(), f"{head}.output")

    def activate(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh" if self.config.activation == "gelu_tanh" else "none")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.config.norm_epsilon
        )
