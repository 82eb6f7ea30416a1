"""Muon on whole weights, by singular values: what the steps of a layout are compared with."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalised(matrix: Tensor, num_steps: int = 5, eps: float = 1e-7) -> Tensor:
    """U p(p(... p(s))) V of a matrix U s V over its Frobenius norm, with p(s) = a s + b s^3 + c s^5."""
    u, s, v = torch.linalg.svd(matrix / matrix.norm().clamp(min=eps), full_matrices=False)
    for _ in range(num_steps):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ v


def matrices_of(name: str, weight: Tensor, config: Any) -> list[Tensor]:
    """The matrices of a layer's weight, as views of it: rows may be several dims."""
    # A LLaVA's tower of images has layers of its own.
    config = config.vision if name.startswith("vision.") else config
    hidden = config.hidden_size
    is_gated = config.is_gated
    if ".attention.qkv." in name:
        groups, queries = config.num_query_groups, config.num_attention_heads // config.num_query_groups
        by_group = weight.view(groups, queries + 2, config.head_dim, hidden)
        return [by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]]
    if ".cross_attention.key_value." in name:
        pairs = weight.view(config.num_query_groups, 2, config.head_dim, hidden)
        return [pairs[:, 0], pairs[:, 1]]
    if ".experts." in name:
        return [one for expert in weight for one in (expert if name.endswith(".up") and is_gated else [expert])]
    if name.endswith("up.weight") and is_gated and weight.dim() == 3:
        return [weight[0], weight[1]]
    return [weight]


class ReferenceMuon(torch.optim.Optimizer):
    """Muon for the named weights that `is_matrix`, AdamW for the others."""

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        config: Any,
        is_matrix: Callable[[str, Tensor], bool],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        named = list(named)
        self.config = config
        self.names = {weight: name for name, weight in named}
        self.is_matrix = {weight: is_matrix(name, weight) for name, weight in named}
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        # Biases of gates have two dims.
        decayed = [weight for name, weight in named if weight.dim() > 1 and not name.endswith("bias")]
        others = [weight for name, weight in named if weight.dim() == 1 or name.endswith("bias")]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of all weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                state.setdefault("step", 0)
                state["step"] += 1
                weight *= 1 - group["lr"] * group["weight_decay"]
                update = self._muon if self.is_matrix[weight] else self._adamw
                update(weight, weight.grad, state, group)

    def _muon(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mu = group["momentum"]
        velocity = state["velocity"] = mu * state.get("velocity", torch.zeros_like(grad)) + (1 - mu) * grad
        update = (1 - mu) * grad + mu * velocity
        name = self.names[weight]
        for own, source in zip(
            matrices_of(name, weight, self.config), matrices_of(name, update, self.config), strict=True
        ):
            matrix = source.reshape(-1, source.shape[-1])
            rows, columns = matrix.shape
            own -= group["lr"] * math.sqrt(max(1.0, rows / columns)) * orthogonalised(matrix).view(own.shape)

    def _adamw(self, weight: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (b1, b2), step = group["betas"], state["step"]
        first = state["first"] = b1 * state.get("first", torch.zeros_like(grad)) + (1 - b1) * grad
        second = state["second"] = b2 * state.get("second", torch.zeros_like(grad)) + (1 - b2) * grad.square()
        weight -= group["lr"] * (first / (1 - b1**step)) / ((second / (1 - b2**step)).sqrt() + group["eps"])
