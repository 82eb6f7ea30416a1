"""AdamW with the usual curve of a pre-training run: linear warm-up, then half a cosine down.

What `configure_optimizers` of the ready modules returns. Weight decay acts on matrices alone: not on biases, not on
the weights of norms.
"""

import math
from collections.abc import Iterable
from typing import Any

import lightning as L
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.optim.rates import WarmupCosine
from lightning_megatron.trainer.config import ConfigurationError


@config_dataclass
class AdamWConfig:
    """AdamW and its learning-rate curve. Source of the defaults: Brown et al., arXiv 2005.14165, appendix B."""

    lr: float = 3e-4
    """Learning rate at the peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms have none."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square, per step."""
    epsilon: float = 1e-8
    """Term added to the denominator, the root of the mean square."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise to the peak, the first at 1/warmup_steps of it."""
    minimum_fraction: float = 0.1
    """Fraction of the peak rate that is left at the end."""
    total_steps: int = 0
    """Optimizer steps until the end of the curve; 0: as many as the Trainer will run."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) must be at least 0, and finite"
            for name, value in (("lr", self.lr), ("weight_decay", self.weight_decay), ("total_steps", self.total_steps))
            if not 0 <= value < math.inf
        ]
        faults += [f"betas ({beta}) must be at least 0 and below 1" for beta in self.betas if not 0 <= beta < 1]
        if not 0 < self.epsilon < math.inf:
            faults.append(f"epsilon ({self.epsilon}) must be above 0, and finite")
        if faults:
            raise ValueError("\n".join(faults))


def adamw_with_warmup(module: L.LightningModule, config: AdamWConfig) -> dict[str, Any]:
    """The return value of `configure_optimizers`: AdamW, and its learning-rate curve stepped once per optimizer step.

    Raises ConfigurationError where the curve does not fit the steps of the run.
    """
    optimizer = AdamW(
        _groups(module.named_parameters(), config.weight_decay), lr=config.lr, betas=config.betas, eps=config.epsilon
    )
    total_steps = config.total_steps or module.trainer.estimated_stepping_batches
    if math.isinf(total_steps):
        raise ConfigurationError("training has no end, and its learning rate no curve; give max_steps or total_steps")
    try:
        curve = WarmupCosine(
            warmup_steps=config.warmup_steps, total_steps=int(total_steps), minimum=config.minimum_fraction
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    # A function, because LambdaLR saves the fields of an object and, on resuming, overwrites the configured ones.
    scheduler = LambdaLR(optimizer, lambda step: curve(step))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups on every rank, even where a stage has no parameter for one of them."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        # Biases of fused linears have several dims, so the number of dims alone is not enough.
        is_matrix = parameter.dim() > 1 and name.rpartition(".")[2] != "bias"
        (decayed if is_matrix else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
