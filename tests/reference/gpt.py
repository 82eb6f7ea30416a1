"""A GPT on one device in plain torch, written for clarity alone: what `GPTModel` must equal on every mesh.

It takes the unsplit weights of a `GPTModel` by name and shares with it only the definition of the random numbers.
Heads, groups, rotations and masks are spelled out one by one, on [batch, sequence, hidden].
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatron.comm import rng
from lightning_megatron.models import GPTConfig
from tests.reference import moe

Weights = dict[str, Tensor]


class ReferenceGPT:
    """Loss or logits from weights by name. `draws` gives the dropout masks of a training step; none, no training.

    `routers` are those of layers with experts, by the number of the layer: read, and in training told what they saw.
    """

    def __init__(
        self,
        config: GPTConfig,
        weights: Weights,
        draws: rng.Draws | None = None,
        routers: dict[int, moe.RouterState] | None = None,
    ) -> None:
        self.config, self.weights, self.draws, self.routers = config, weights, draws, routers or {}
        # Of the rows of a call, where they are not those of a batch.
        self.sample_keys: Tensor | None = None
        # How much each token of a call counts [batch, sequence].
        self.counts: Tensor | None = None
        # Of a call that teaches layers to predict tokens beyond the next [batch, sequence].
        self.labels: Tensor | None = None
        # The losses of the routers so far: sums over tokens, each times its weight.
        self.auxiliary = torch.zeros(())

    def logits(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        if segments is not None:
            return self.logits_of_documents(tokens, segments)
        config = self.config
        sequence = tokens.shape[1]
        x = self.embed(tokens)
        if config.position == "learned":
            x = x + self.weights["embedding.positions.weight"][torch.arange(sequence)]
        x = self.drop(x, "embedding")
        for i in range(config.num_layers):
            x = self.layer(x, f"layers.{i}", i)
        if self.labels is not None:
            self.predict_further(x, tokens)
        x = self.norm(x, "final_norm")
        head = "embedding.tokens.weight" if config.tie_embeddings else "head.weight"
        return self.cap(F.linear(x, self.weights[head]), config.logit_softcap)

    def layer(self, x: Tensor, layer: str, i: int) -> Tensor:
        normed = self.norm_input(x, f"{layer}.attention_norm")
        attended = self.attend(normed, f"{layer}.attention", self.config.window_of(i))
        x = x + self.drop(self.norm_output(attended, f"{layer}.attention_output_norm"), f"{layer}.attention")
        normed = self.norm_input(x, f"{layer}.mlp_norm")
        is_dense = i not in self.routers
        y = self.feed_forward(normed, f"{layer}.mlp") if is_dense else self.mix(normed, i)
        return x + self.drop(self.norm_output(y, f"{layer}.mlp_output_norm"), f"{layer}.mlp")

    def predict_further(self, x: Tensor, tokens: Tensor) -> None:
        """Adds the losses of layers that predict tokens beyond the next to those of routers; each row is a document."""
        config = self.config
        assert self.labels is not None and self.counts is not None
        head = "embedding.tokens.weight" if config.tie_embeddings else "head.weight"
        for k in range(config.num_mtp_layers):
            name, distance = f"mtp.{k}", k + 1
            after = torch.zeros_like(tokens)
            labels, counts = torch.full_like(tokens, -100), torch.zeros_like(self.counts)
            if distance < tokens.shape[1]:
                after[:, :-distance] = tokens[:, distance:]
                labels[:, :-distance] = self.labels[:, distance:]
                counts[:, :-distance] = self.counts[:, distance:]
            joined = [self.norm(self.embed(after), f"{name}.embedding_norm"), self.norm(x, f"{name}.hidden_norm")]
            x = self.linear(torch.cat(joined, dim=-1), f"{name}.projection")
            x = self.layer(x, f"{name}.layer", config.num_layers - 1)
            logits = self.cap(F.linear(self.norm(x, f"{name}.norm"), self.weights[head]), config.logit_softcap)
            losses = F.cross_entropy(
                logits.flatten(0, 1),
                labels.flatten(),
                ignore_index=-100,
                reduction="none",
                label_smoothing=config.label_smoothing,
            )
            share = config.mtp_loss_weight / config.num_mtp_layers
            self.auxiliary = self.auxiliary + share * (losses * counts.flatten().to(losses.dtype)).sum()

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = self.weights["embedding.tokens.weight"][tokens]
        return embedded * math.sqrt(self.config.hidden_size) if self.config.scales_embedding else embedded

    def cap(self, x: Tensor, bound: float) -> Tensor:
        return bound * torch.tanh(x / bound) if bound else x

    def logits_of_documents(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Each document as a row of its own, beside others as long; zeros where there is none."""
        logits = torch.zeros(*tokens.shape, self.config.vocab_size, dtype=self.weights["final_norm.weight"].dtype)
        rows = None if self.draws is None else self.draws.sample_keys(len(tokens), torch.device("cpu"))
        labels = self.labels
        counts, documents = (
            self.counts,
            [
                (row, number, torch.nonzero(segments[row] == number).flatten())
                for row in range(len(tokens))
                for number in range(int(segments[row].max()) + 1)
            ],
        )
        for length in sorted({len(places) for *_, places in documents} - {0}):
            alike = [document for document in documents if len(document[2]) == length]
            row, number = (torch.tensor([document[i] for document in alike]) for i in (0, 1))
            places = torch.stack([document[2] for document in alike])
            if rows is not None:
                self.sample_keys = rng.bits(rows[row], number)
            self.counts = None if counts is None else counts[row[:, None], places]
            self.labels = None if labels is None else labels[row[:, None], places]
            logits = logits.index_put((row[:, None], places), self.logits(tokens[row[:, None], places]))
        self.sample_keys, self.counts, self.labels = None, counts, labels
        return logits

    def loss(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None, segments: Tensor | None = None
    ) -> Tensor:
        """Mean over the tokens with a label, weighted by the mask; 0 where there is none. No document, no label.

        Losses of routers are in its gradient and not in its value.
        """
        if segments is not None:
            labels = torch.where(segments < 0, -100, labels)
        counts = torch.ones(labels.shape) if loss_mask is None else loss_mask
        self.counts = torch.where(labels == -100, 0.0, counts)
        self.auxiliary = torch.zeros(())
        self.labels = labels if self.draws is not None else None
        logits, self.labels = self.logits(tokens, segments), None
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=-100,
            reduction="none",
            label_smoothing=self.config.label_smoothing,
        )
        mask = self.counts.flatten().to(losses.dtype)
        total = (losses * mask).sum() + (self.auxiliary - self.auxiliary.detach())
        return total / (mask.sum() if mask.sum() > 0 else 1.0)

    def linear(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        y = F.linear(x, weight.flatten(0, -2))
        if f"{name}.bias" in self.weights:
            y = y + self.weights[f"{name}.bias"].flatten()
        return y

    def norm(self, x: Tensor, name: str, epsilon: float = 0.0) -> Tensor:
        weight, epsilon = self.weights[f"{name}.weight"], epsilon or self.config.norm_epsilon
        if self.config.normalization == "layernorm":
            return F.layer_norm(x, x.shape[-1:], weight, self.weights[f"{name}.bias"], epsilon)
        if self.config.normalization == "zero_centered_rmsnorm":
            weight = 1 + weight
        return x / torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon) * weight

    def norm_input(self, x: Tensor, name: str) -> Tensor:
        return x if self.config.norm_placement == "output" else self.norm(x, name)

    def norm_output(self, x: Tensor, name: str) -> Tensor:
        return x if self.config.norm_placement == "pre" else self.norm(x, name)

    def attend_latent(self, x: Tensor, name: str, window: int) -> Tensor:
        """Latent attention, one head after the other."""
        config, latent = self.config, self.config.latent
        assert latent is not None
        plain, turned, size = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
        if latent.q_lora_rank:
            queries = self.norm(self.linear(x, f"{name}.query_down"), f"{name}.query_norm", latent.norm_epsilon)
            queries = self.linear(queries, f"{name}.query_up")
        else:
            queries = self.linear(x, f"{name}.query")
        down = self.linear(x, f"{name}.key_value_down")
        kept = self.norm(down[..., : latent.kv_lora_rank], f"{name}.key_value_norm", latent.norm_epsilon)
        up = self.linear(kept, f"{name}.key_value_up")
        shared = self.rotate(down[..., latent.kv_lora_rank :], window)
        stretched = 1.0
        if config.rope_scaling is not None and config.rope_scaling.mscale_all_dim:
            stretched = (0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor) + 1) ** 2
        outputs = []
        for head in range(config.num_attention_heads):
            query = queries[..., head * (plain + turned) : (head + 1) * (plain + turned)]
            query = torch.cat([query[..., :plain], self.rotate(query[..., plain:], window)], dim=-1)
            own = up[..., head * (plain + size) : (head + 1) * (plain + size)]
            key = torch.cat([own[..., :plain], shared], dim=-1)
            scores = stretched * (query @ key.transpose(1, 2)) / math.sqrt(plain + turned)
            weights = scores.masked_fill(self.unseen(x.shape[1], window), -math.inf).softmax(dim=-1)
            outputs.append(self.drop_attention(weights, name, head) @ own[..., plain:])
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.projection")

    def unseen(self, sequence: int, window: int) -> Tensor:
        unseen = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
        if window:
            unseen |= torch.ones(sequence, sequence, dtype=torch.bool).tril(-window)
        return unseen

    def attend(self, x: Tensor, name: str, window: int) -> Tensor:
        if self.config.latent is not None:
            return self.attend_latent(x, name, window)
        config = self.config
        sequence, size = x.shape[1], config.head_dim
        fused = self.linear(x, f"{name}.qkv")
        unseen = self.unseen(sequence, window)
        heads_per_group = config.num_attention_heads // config.num_query_groups
        if config.qk_norm_across_heads:
            fused = self.norm_all_heads(fused, name)
        outputs = []
        for group in range(config.num_query_groups):
            first = group * (heads_per_group + 2) * size
            block = fused[..., first : first + (heads_per_group + 2) * size]
            key = block[..., heads_per_group * size : (heads_per_group + 1) * size]
            key = self.rotate(self.norm_head(key, f"{name}.k_norm"), window)
            value = block[..., (heads_per_group + 1) * size :]
            for i in range(heads_per_group):
                query = self.rotate(self.norm_head(block[..., i * size : (i + 1) * size], f"{name}.q_norm"), window)
                scores = query @ key.transpose(1, 2) / math.sqrt(config.score_dim or size)
                scores = self.cap(scores, config.attention_softcap).masked_fill(unseen, -math.inf)
                head = group * heads_per_group + i
                if config.attention_sinks:
                    sink = self.weights[f"{name}.sinks"][head].expand(*scores.shape[:2], 1)
                    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
                else:
                    weights = scores.softmax(dim=-1)
                weights = self.drop_attention(weights, name, head)
                outputs.append(weights @ value)
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.projection")

    def norm_head(self, x: Tensor, name: str) -> Tensor:
        """The root of the mean square of a head's features becomes 1, where the model has that."""
        is_of_one = self.config.qk_norm and not self.config.qk_norm_across_heads
        return self.norm(x, name) if is_of_one else x

    def norm_all_heads(self, fused: Tensor, name: str) -> Tensor:
        """Queries and keys, each normed over the features of all heads."""
        groups, size = self.config.num_query_groups, self.config.head_dim
        by_group = fused.unflatten(-1, (groups, -1, size))
        queries = self.norm(by_group[..., :-2, :].flatten(-3), f"{name}.q_norm").unflatten(-1, (groups, -1, size))
        keys = self.norm(by_group[..., -2, :].flatten(-2), f"{name}.k_norm").unflatten(-1, (groups, 1, size))
        return torch.cat([queries, keys, by_group[..., -1:, :]], dim=-2).flatten(-3)

    def rotate(self, x: Tensor, window: int) -> Tensor:
        """Each pair (i, i + half) of features as a complex number, times e^(i position / wavelength).

        Of the ways to stretch wavelengths it knows the linear one.
        """
        if self.config.position != "rotary":
            return x
        half = int(x.shape[-1] * self.config.rotary_fraction) // 2
        is_local = self.config.window_rotary_base > 0 and window > 0
        base = self.config.window_rotary_base if is_local else self.config.rotary_base
        steps = base ** (-torch.arange(half, dtype=torch.float64) / half)
        if self.config.rope_scaling is not None and not is_local:
            assert self.config.rope_scaling.kind == "linear"
            steps = steps / self.config.rope_scaling.factor
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), steps)
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1).to(x.dtype)

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        return self.linear(self.activate(self.linear(x, f"{name}.up")), f"{name}.down")

    def activate(self, y: Tensor) -> Tensor:
        if self.config.activation == "swiglu":
            gate, up = y.chunk(2, dim=-1)
            return gate * torch.sigmoid(gate) * up
        if self.config.activation == "gelu":
            return 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
        return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))

    def mix(self, x: Tensor, layer: int) -> Tensor:
        """What the experts of a layer make of its tokens; each row is a sequence."""
        assert self.config.moe is not None
        state, prefix = self.routers[layer], f"layers.{layer}.moe."
        own = {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}
        y, losses, counts = moe.mix(x, self.jitter(x, f"{prefix}router"), self.config.moe, own, state, self.activate)
        if self.draws is not None:
            weights = torch.ones(x.shape[:2]) if self.counts is None else self.counts
            state.seen.add(counts, losses, weights)
            # The tokens of a sequence share alike in what its targets weigh.
            objective = moe.objective(losses, state.config)
            self.auxiliary = self.auxiliary + (weights.mean(1).to(x.dtype) * objective).sum()
        return y

    def jitter(self, x: Tensor, name: str) -> Tensor:
        """What a router reads: in training, where asked for, times random numbers around 1."""
        assert self.config.moe is not None
        width = self.config.moe.router.jitter
        if self.draws is None or width == 0:
            return x
        keys = rng.bits(rng.key(name, "jitter"), self.token_keys(x.shape[0], x.shape[1])).unsqueeze(-1)
        uniform = rng.uniform(keys, torch.arange(x.shape[2]))
        return x * (1 - width + 2 * width * uniform).to(x.dtype)

    def drop(self, x: Tensor, name: str) -> Tensor:
        probability = self.config.hidden_dropout
        if self.draws is None or probability == 0:
            return x
        keys = rng.bits(rng.key(name, "dropout"), self.token_keys(x.shape[0], x.shape[1]))
        return x * rng.keep_mask(keys, x.shape[2], probability) / (1 - probability)

    def drop_attention(self, weights: Tensor, name: str, head: int) -> Tensor:
        probability = self.config.attention_dropout
        if self.draws is None or probability == 0:
            return weights
        rows = rng.bits(rng.key(name, "attention dropout"), self.token_keys(weights.shape[0], weights.shape[1]))
        keys = rng.bits(rows, torch.full_like(rows, head))
        return weights * rng.keep_mask(keys, weights.shape[2], probability) / (1 - probability)

    def token_keys(self, batch: int, sequence: int) -> Tensor:
        assert self.draws is not None
        keys = self.sample_keys
        if keys is None:
            keys = self.draws.sample_keys(batch, torch.device("cpu"))
        return rng.bits(keys[:, None], torch.arange(sequence)[None])
