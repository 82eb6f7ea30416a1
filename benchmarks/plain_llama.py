"""A Llama or a Mixtral as one would write it in plain torch: the yardstick of `gpu` and `experts`, with the parameter
names of Hugging Face's.

B batch, S sequence, A heads, G key-value groups, D head size, R half of it; T tokens, H hidden, K experts of a token.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatron.models import GPTConfig
from lightning_megatron.moe.config import MoEConfig


class Attention(nn.Module):
    """Causal attention whose queries share keys and values in groups, with rotated positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, self.size = config.hidden_size, config.head_dim
        self.is_grouped = config.num_query_groups < config.num_attention_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.size, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_query_groups * self.size, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_query_groups * self.size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.size, hidden, bias=False)

    def forward(self, x: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotate(heads, cos_SR, sin_SR) for heads in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.is_grouped)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output


def rotate(x: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Each pair (i, i + R) of features of [B, A, S, D] rotated by its position."""
    first, second = x.chunk(2, dim=-1)
    cos_SR, sin_SR = cos_SR.to(x.dtype), sin_SR.to(x.dtype)
    return torch.cat((first * cos_SR - second * sin_SR, second * cos_SR + first * sin_SR), dim=-1)


class MLP(nn.Module):
    """MLP with SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Experts(nn.Module):
    """The weights of all experts of a layer, gate and up as one."""

    def __init__(self, num: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(num, hidden, ffn))


class Mixture(nn.Module):
    """The best experts of each token, weighed by a softmax over them; every product is one kernel for all experts."""

    def __init__(self, config: GPTConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.num, self.num_chosen = moe.router.num_experts, moe.router.top_k
        self.gate = nn.Linear(config.hidden_size, self.num, bias=False)
        self.experts = Experts(self.num, config.hidden_size, moe.ffn_hidden_size or config.ffn_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x_TH = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x_TH.to(self.gate.weight.dtype), self.gate.weight)
        best_TK, expert_ids_TK = logits.topk(self.num_chosen, dim=1)
        probs_TK = best_TK.softmax(1)
        order = expert_ids_TK.flatten().argsort(stable=True)
        tokens = order // self.num_chosen
        numbers = torch.arange(self.num, device=x.device)
        ends = (expert_ids_TK.flatten()[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        up, down = (w.to(dtype).transpose(1, 2) for w in (self.experts.gate_up_proj, self.experts.down_proj))
        gate, value = F.grouped_mm(x_TH.to(dtype)[tokens], up, offs=ends).chunk(2, dim=1)
        rows = F.grouped_mm(F.silu(gate) * value, down, offs=ends) * probs_TK.flatten()[order, None]
        return torch.zeros_like(x_TH).index_add(0, tokens, rows.to(x_TH.dtype)).view_as(x)


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.mlp = MLP(config) if config.moe is None else Mixture(config, config.moe)

    def forward(self, x: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_SR, sin_SR)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Trunk(nn.Module):
    """Tokens [B, S] to the last hidden states."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_epsilon)
        self.half, self.rotary_base = config.head_dim // 2, config.rotary_base

    def forward(self, tokens: Tensor) -> Tensor:
        steps = self.rotary_base ** (-torch.arange(self.half, device=tokens.device, dtype=torch.float32) / self.half)
        angles_SR = torch.outer(torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32), steps)
        cos_SR, sin_SR = angles_SR.cos(), angles_SR.sin()
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos_SR, sin_SR)
        normed: Tensor = self.norm(x)
        return normed


class PlainLlama(nn.Module):
    """Called with tokens and labels [B, S], returns the mean loss, in float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(self.model(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_plain(config: GPTConfig, device: torch.device) -> PlainLlama:
    """The model on the device, with the same weights at every call there."""
    with torch.device("meta"):
        model = PlainLlama(config)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=config.init_std, generator=generator)
        else:
            nn.init.ones_(parameter)
    return model


def our_weights(plain: PlainLlama, config: GPTConfig) -> dict[str, Tensor]:
    """Its weights under the names of our GPT: queries, keys and values fused group by group, gate and up as one."""
    found = plain.state_dict()
    weights = {
        "embedding.tokens.weight": found["model.embed_tokens.weight"],
        "final_norm.weight": found["model.norm.weight"],
        "head.weight": found["lm_head.weight"],
    }
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        groups = [
            found[f"{theirs}.self_attn.{kind}_proj.weight"].unflatten(0, (config.num_query_groups, -1))
            for kind in ("q", "k", "v")
        ]
        weights |= {
            f"{ours}.attention_norm.weight": found[f"{theirs}.input_layernorm.weight"],
            f"{ours}.attention.qkv.weight": torch.cat(groups, dim=1).flatten(0, 1),
            f"{ours}.attention.projection.weight": found[f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.mlp_norm.weight": found[f"{theirs}.post_attention_layernorm.weight"],
            **_our_mlp(found, theirs, ours),
        }
    return weights


def _our_mlp(found: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    """The weights of a layer's MLP, or of its router and experts."""
    if f"{theirs}.mlp.gate.weight" in found:
        return {
            f"{ours}.moe.router.weight": found[f"{theirs}.mlp.gate.weight"],
            f"{ours}.moe.experts.up": found[f"{theirs}.mlp.experts.gate_up_proj"].unflatten(1, (2, -1)),
            f"{ours}.moe.experts.down": found[f"{theirs}.mlp.experts.down_proj"],
        }
    return {
        f"{ours}.mlp.up.weight": torch.stack(
            (found[f"{theirs}.mlp.gate_proj.weight"], found[f"{theirs}.mlp.up_proj.weight"])
        ),
        f"{ours}.mlp.down.weight": found[f"{theirs}.mlp.down_proj.weight"],
    }
