"""What a user sets about gradients, master weights and the optimizer's shards."""

from dataclasses import dataclass
from typing import Literal, get_args

OptimizerKind = Literal["replicated", "distributed"]
GradientDtype = Literal["auto", "float32", "bfloat16"]
OnNonfinite = Literal["stop", "skip", "ignore"]
DeclaredScope = Literal["auto", "elementwise", "parameter"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How gradients are summed over replicas, and who steps which weights.

    Source of the distributed kind: Rajbhandari et al., arXiv 1910.02054, section 5.1 (ZeRO, stage 1).
    """

    kind: OptimizerKind = "replicated"
    """replicated: every replica steps all of its weights. distributed: each of the d replicas (dp x cp; of experts edp)
    holds the optimizer state of 1/d of them, steps those, and the replicas exchange the results."""
    grad_dtype: GradientDtype = "auto"
    """Of accumulated gradients and of their sums. auto: float32 under mixed precision, else that of the weights."""
    bucket_size: int = 40_000_000
    """Numbers whose gradients are summed in one message; a larger parameter has a bucket of its own."""
    overlap_grad_reduce: bool = False
    """Send a bucket as soon as the backward of the last microbatch has made its last gradient."""
    overlap_param_gather: bool = False
    """distributed: return from the step before the others' weights have landed and wait for them part by part in the
    next forward; hooks in between must not read weights."""
    on_nonfinite: OnNonfinite = "stop"
    # NaN or Inf in a gradient. stop: end the run on all ranks, naming rank, parameter and step. skip: leave the
    # weights as they are, on all ranks. ignore: step with it
    check_replicas_every_n_steps: int = 0
    """Compare, bit by bit, weights that several ranks hold; 0: never."""
    update_scope: DeclaredScope = "auto"
    """What an optimizer that torch does not ship looks at when it steps one number of a weight. number: that number's
    gradient and state alone, as AdamW does, so that it may be given any part of a weight. parameter: more of the
    weight, as Muon does. auto: not known, hence refused where tensor or expert parallelism cuts weights."""

    def __post_init__(self) -> None:
        choices = (
            ("kind", self.kind, get_args(OptimizerKind)),
            ("grad_dtype", self.grad_dtype, get_args(GradientDtype)),
            ("on_nonfinite", self.on_nonfinite, get_args(OnNonfinite)),
            ("update_scope", self.update_scope, get_args(DeclaredScope)),
        )
        faults = [
            f"optimizer {name} ({value!r}) must be one of {', '.join(allowed)}"
            for name, value, allowed in choices
            if value not in allowed
        ]
        if self.bucket_size < 1:
            faults.append(f"bucket_size ({self.bucket_size}) must be at least 1; it counts numbers, 40000000 is usual")
        if self.check_replicas_every_n_steps < 0:
            faults.append(
                f"check_replicas_every_n_steps ({self.check_replicas_every_n_steps}) must be at least 0; 0 is never"
            )
        if self.overlap_param_gather and self.kind == "replicated":
            faults.append(
                "overlap_param_gather (True) needs kind 'distributed': replicas that step all of their weights gather "
                "none"
            )
        if faults:
            raise ValueError("\n".join(faults))


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """By how much a float16 loss is multiplied, so that small gradients do not become zero.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
    """

    initial: float = 65536.0
    """Factor of the first step."""
    growth_factor: float = 2.0
    """By which it grows after `window` steps in a row without Inf or NaN."""
    backoff_factor: float = 0.5
    """By which it shrinks."""
    window: int = 1000
    """Steps."""
    hysteresis: int = 2
    """Bad steps until it shrinks; counted anew after it has grown."""
    minimum: float = 1.0
    """Below which it does not shrink."""

    def __post_init__(self) -> None:
        faults = []
        if self.minimum <= 0:
            faults.append(f"minimum ({self.minimum}) must be above 0")
        if self.initial < self.minimum:
            faults.append(f"initial ({self.initial}) must be at least minimum ({self.minimum})")
        if self.growth_factor < 1:
            faults.append(f"growth_factor ({self.growth_factor}) must be at least 1; with 1 the scale never grows")
        if not 0 < self.backoff_factor <= 1:
            faults.append(f"backoff_factor ({self.backoff_factor}) must be above 0 and at most 1")
        faults += [
            f"{name} ({value}) must be at least 1"
            for name, value in (("window", self.window), ("hysteresis", self.hysteresis))
            if value < 1
        ]
        if faults:
            raise ValueError("\n".join(f"loss scale {fault}" for fault in faults))
