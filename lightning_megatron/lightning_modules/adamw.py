"""AdamW with the usual curves of a pre-training run: linear warm-up, then half a cosine or another curve down.

What `configure_optimizers` of the ready modules returns. Weight decay acts on matrices alone: not on biases, not on
the weights of norms.
"""

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, get_args

import lightning as L
from torch import nn
from torch.optim import AdamW, Optimizer

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.optim.muon import Muon, muon_groups
from lightning_megatron.optim.param_scheduler import ParamScheduler
from lightning_megatron.optim.rates import DecayStyle, IncrStyle, RateCurve, WeightDecayRamp, WsdDecayStyle
from lightning_megatron.trainer.config import ConfigurationError

MatrixOptimizer = Literal["adamw", "muon"]
"""Optimizer of the matrices of layers."""


@config_dataclass
class AdamWConfig:
    """AdamW, or Muon beside it, and its learning-rate curve. Source of the defaults: Brown et al., arXiv 2005.14165,
    appendix B."""

    lr: float = 3e-4
    """Learning rate at the peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms have none. Where it rises, that of the first step."""
    weight_decay_incr_style: IncrStyle = "constant"
    """Curve on which the weight decay rises until the end of the run."""
    end_weight_decay: float = 0.0
    """Weight decay at the end of the run, where it rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running means of the gradient and of its square, per step."""
    epsilon: float = 1e-8
    """Term added to the denominator, the root of the mean square."""
    matrix_optimizer: MatrixOptimizer = "adamw"
    """Optimizer of the matrices of layers. muon: Muon, whose steps are as large as AdamW's, by the same rate and weight
    decay; embeddings, output heads and all else have AdamW."""
    muon_momentum: float = 0.95
    """Decay of Muon's running mean of the gradient, per step."""
    warmup_steps: int = 0
    """Optimizer steps of linear rise to the peak, of which the first has the initial fraction of it."""
    initial_fraction: float = 0.0
    """Fraction of the peak rate in the first step of the warm-up: at 0 that step changes no weight, as in Megatron."""
    decay_style: DecayStyle = "cosine"
    """Curve of the rate after the warm-up. WSD: constant, and down in the last wsd_decay_steps."""
    wsd_decay_style: WsdDecayStyle = "exponential"
    """Curve of the last steps of a WSD."""
    wsd_decay_steps: int = 0
    """Number of the last steps of a WSD, in which the rate goes down."""
    minimum_fraction: float = 0.1
    """Fraction of the peak rate that is left at the end; a constant curve keeps all of it."""
    total_steps: int = 0
    """Optimizer steps until the end of the curve; 0: as many as the Trainer will run."""

    def __post_init__(self) -> None:
        faults = [
            f"{name} ({value}) must be at least 0, and finite"
            for name, value in (
                ("lr", self.lr),
                ("weight_decay", self.weight_decay),
                ("end_weight_decay", self.end_weight_decay),
                ("total_steps", self.total_steps),
            )
            if not 0 <= value < math.inf
        ]
        faults += [f"betas ({beta}) must be at least 0 and below 1" for beta in self.betas if not 0 <= beta < 1]
        if not 0 <= self.muon_momentum < 1:
            faults.append(f"muon_momentum ({self.muon_momentum}) must be at least 0 and below 1")
        if not 0 < self.epsilon < math.inf:
            faults.append(f"epsilon ({self.epsilon}) must be above 0, and finite")
        for name, value, words in (
            ("weight_decay_incr_style", self.weight_decay_incr_style, IncrStyle),
            ("matrix_optimizer", self.matrix_optimizer, MatrixOptimizer),
            ("decay_style", self.decay_style, DecayStyle),
            ("wsd_decay_style", self.wsd_decay_style, WsdDecayStyle),
        ):
            if value not in get_args(words):
                faults.append(f"{name} ({value!r}) must be one of {', '.join(get_args(words))}")
        faults += [
            f"{name} ({value}) must be from 0 to 1; it is a fraction of the peak rate"
            for name, value in (
                ("initial_fraction", self.initial_fraction),
                ("minimum_fraction", self.minimum_fraction),
            )
            if not 0 <= value <= 1
        ]
        if self.weight_decay_incr_style != "constant" and self.end_weight_decay < self.weight_decay:
            faults.append(
                f"end_weight_decay ({self.end_weight_decay}) must be at least weight_decay ({self.weight_decay}), from "
                "which it rises; give a larger one, or set weight_decay_incr_style to constant"
            )
        faults += self._unused()
        if faults:
            raise ValueError("\n".join(faults))

    def _unused(self) -> list[str]:
        """Errors about settings that another one leaves without effect."""
        default = {field.name: field.default for field in fields(self)}
        rising = self.weight_decay_incr_style != "constant"
        needs = {
            "end_weight_decay": (rising, "weight_decay_incr_style linear or cosine"),
            "initial_fraction": (self.warmup_steps > 0, "warmup_steps above 0"),
            "wsd_decay_style": (self.decay_style == "WSD", "decay_style WSD"),
            "wsd_decay_steps": (self.decay_style == "WSD", "decay_style WSD"),
            "muon_momentum": (self.matrix_optimizer == "muon", "matrix_optimizer muon"),
        }
        return [
            f"{name} ({getattr(self, name)}) has no effect without {words}; set that, or leave it out"
            for name, (is_used, words) in needs.items()
            if not is_used and getattr(self, name) != default[name]
        ]


def adamw_with_warmup(module: L.LightningModule, config: AdamWConfig) -> dict[str, Any]:
    """The return value of `configure_optimizers`: AdamW or Muon, and its curves stepped once per optimizer step.

    Raises ConfigurationError where the curve does not fit the steps of the run.
    """
    optimizer = optimizer_of(module, config)
    num_steps = module.trainer.estimated_stepping_batches
    total_steps = config.total_steps or num_steps
    if math.isinf(total_steps):
        raise ConfigurationError("training has no end, and its learning rate no curve; give max_steps or total_steps")
    try:
        rate, ramp = _curves(config, int(total_steps), total_steps if math.isinf(num_steps) else num_steps)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    scheduler = ParamScheduler(optimizer, rate, ramp)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _curves(config: AdamWConfig, total_steps: int, num_steps: float) -> tuple[RateCurve, WeightDecayRamp | None]:
    """The curves of the learning rate and, where it rises over the steps of the run, of the weight decay."""
    rate = RateCurve(
        total_steps=total_steps,
        warmup_steps=config.warmup_steps,
        initial=config.initial_fraction,
        minimum=config.minimum_fraction,
        decay_style=config.decay_style,
        wsd_decay_style=config.wsd_decay_style,
        wsd_decay_steps=config.wsd_decay_steps,
    )
    if config.weight_decay_incr_style == "constant":
        return rate, None
    start, end = config.weight_decay, config.end_weight_decay
    style = config.weight_decay_incr_style
    return rate, WeightDecayRamp(start=start, end=end, total_steps=int(num_steps), style=style)


def optimizer_of(module: nn.Module, config: AdamWConfig) -> Optimizer:
    """The optimizer of a module's parameters, AdamW or Muon, without a curve."""
    named, weight_decay = module.named_parameters(), max(config.weight_decay, config.end_weight_decay)
    if config.matrix_optimizer == "adamw":
        return AdamW(decay_groups(named, weight_decay), lr=config.lr, betas=config.betas, eps=config.epsilon)
    return Muon(
        muon_groups(named, weight_decay=weight_decay),
        lr=config.lr,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
        betas=config.betas,
        adamw_eps=config.epsilon,
    )


def decay_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups on every rank, even where a stage has no parameter for one of them."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        # Biases of fused linears and of experts have several dims, so the number of dims alone is not enough.
        is_matrix = parameter.dim() > 1 and not name.endswith("bias")
        (decayed if is_matrix else others).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
