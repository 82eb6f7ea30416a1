"""Rotary position embedding: pairs of features of queries and keys rotate by an angle that grows with the position.

Feature i of the first half of the rotated part makes a pair with feature i of the second half, and rotates by
position * base^(-i / pairs). Features past the rotated part stay. Angles are computed in float64.
Source: Su et al., arXiv 2104.09864, section 3.2.2 (there neighbours make a pair; the order of features is free).

A `RopeScaling` stretches the waves, so that positions past those first trained on rotate by angles that were seen:

    kind     wave of length w                                                                       amplitude
    linear   factor w                                                                               1
    llama3   w where the original length holds many of it, factor w where it holds few, a           1
             straight line between the two frequencies
    yarn     the same, the line over the index of the wave                                          attention_factor

R pairs of rotated features; all angles are computed in float64.
"""

import math
from dataclasses import fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_megatron.config_dataclass import config_dataclass

ScalingKind = Literal["linear", "llama3", "yarn"]

# Which settings act under which kinds.
_ACTS_UNDER = {
    "original_max_sequence_length": ("llama3", "yarn"),
    "low_frequency_factor": ("llama3",),
    "high_frequency_factor": ("llama3",),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "truncate": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "attention_factor": ("yarn",),
}


@config_dataclass
class RopeScaling:
    """Scaling of rotary wavelengths for longer sequences. Raises ValueError that lists all faults at once.

    Source: Chen et al., arXiv 2306.15595 (linear); the Llama 3 models (llama3); Peng et al., arXiv 2309.00071 (yarn).
    """

    kind: ScalingKind
    """Rule by which wavelengths are stretched: linear (all of them), llama3, or yarn."""
    factor: float
    """Factor by which long wavelengths are stretched, at least 1."""
    original_max_sequence_length: int = 0
    """Sequence length in tokens of the first training; for llama3 and yarn."""
    low_frequency_factor: float = 1.0
    """llama3: wavelengths of which the original length holds at most this many are stretched in full."""
    high_frequency_factor: float = 4.0
    """llama3: wavelengths of which the original length holds at least this many stay as they are."""
    beta_fast: float = 32.0
    """yarn: pairs that rotate at least this often within the original length stay as they are."""
    beta_slow: float = 1.0
    """yarn: pairs that rotate at most this often within the original length are stretched in full."""
    truncate: bool = True
    """yarn: whether the line over the index of the wave begins and ends at an integer."""
    mscale_all_dim: float = 0.0
    """yarn: coefficient c by which scores of latent attention are multiplied by (0.1 c ln(factor) + 1)^2; 0: by 1."""
    attention_factor: float = 0.0
    """yarn: factor of rotated queries and keys; 0: 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))
        if self.kind == "yarn" and self.attention_factor == 0.0:
            object.__setattr__(self, "attention_factor", 0.1 * math.log(self.factor) + 1.0)

    def faults(self) -> list[str]:
        """Every rule that this scaling breaks, one sentence each."""
        faults = []
        if self.kind not in get_args(ScalingKind):
            kinds = ", ".join(map(repr, get_args(ScalingKind)))
            return [f"rope_scaling kind ({self.kind!r}) must be one of {kinds}"]
        if not self.factor >= 1.0:
            faults.append(f"rope_scaling factor ({self.factor}) must be at least 1")
        if self.kind != "linear" and self.original_max_sequence_length < 1:
            faults.append(
                f"rope_scaling original_max_sequence_length ({self.original_max_sequence_length}) must be at least 1 "
                f"under kind {self.kind!r}"
            )
        for low, high in (("low_frequency_factor", "high_frequency_factor"), ("beta_slow", "beta_fast")):
            if not 0.0 < (lower := getattr(self, low)) < (upper := getattr(self, high)):
                faults.append(f"rope_scaling {low} ({lower}) must be above 0 and below {high} ({upper})")
        if self.attention_factor < 0.0:
            faults.append(f"rope_scaling attention_factor ({self.attention_factor}) must be at least 0")
        defaults = {field.name: field.default for field in fields(self)}
        faults += [
            f"rope_scaling {name} ({getattr(self, name)}) acts under kind {' and '.join(kinds)} alone, and it is "
            f"{self.kind!r}; leave it out"
            for name, kinds in _ACTS_UNDER.items()
            if self.kind not in kinds and getattr(self, name) != defaults[name]
        ]
        return faults


def yarn_amplitude(factor: float, coefficient: float) -> float:
    """Amplitude of rotated features. Source: Peng et al., arXiv 2309.00071, section 3.4."""
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(pairs: int, base: float, scaling: RopeScaling | None, device: torch.device | None = None) -> Tensor:
    """The angle of each pair at position 1: float64 [R]."""
    plain_R = base ** -(torch.arange(pairs, dtype=torch.float64, device=device) / max(pairs, 1))
    if scaling is None:
        return plain_R
    if scaling.kind == "linear":
        return plain_R / scaling.factor
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        num_waves_R = scaling.original_max_sequence_length * plain_R / (2 * math.pi)
        unscaled_R = ((num_waves_R - low) / (high - low)).clamp(0, 1)
    else:
        first, last = (_index_of(turns, pairs, base, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        # Where both are one index the line is a step.
        width = last - first if last != first else 0.001
        unscaled_R = 1 - ((torch.arange(pairs, dtype=torch.float64, device=device) - first) / width).clamp(0, 1)
    return plain_R * (unscaled_R + (1 - unscaled_R) / scaling.factor)


def _index_of(turns: float, pairs: int, base: float, scaling: RopeScaling) -> float:
    """Index of the pair that turns that often in the original length."""
    return pairs * math.log(scaling.original_max_sequence_length / (turns * 2 * math.pi)) / math.log(base)


def angles(positions_BS: Tensor, frequencies_R: Tensor, scaling: RopeScaling | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, times the scaling's amplitude: float64 [B, S, R] each."""
    if len(frequencies_R) == 0:
        # Two of them: a compiler takes no tensor twice.
        cos_BSR, sin_BSR = torch.empty(2, *positions_BS.shape, 0, dtype=torch.float64, device=positions_BS.device)
        return cos_BSR, sin_BSR
    angles_BSR = positions_BS.unsqueeze(-1) * frequencies_R
    if scaling is None or scaling.kind != "yarn":
        return angles_BSR.cos(), angles_BSR.sin()
    return angles_BSR.cos() * scaling.attention_factor, angles_BSR.sin() * scaling.attention_factor


class _Rotate(torch.autograd.Function):
    """`rotate_into` a new tensor; saves only the angles for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x)
        rotate_into(out, x, cos, sin)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        out = torch.empty_like(grad)
        rotate_into(out, grad, cos, -sin)
        return out, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., D] rotated by angles [..., R] of its dtype."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Writes `x` [..., D], rotated by the angles [..., pairs], to `out`; rotated back if `sin` is negated."""
    pairs = cos.shape[-1]
    if pairs == 0:
        out.copy_(x)
    elif torch.compiler.is_compiling() or torch.is_grad_enabled():
        # A compiler makes one kernel of what is written at once; a graph of autograd takes no `out`.
        out.copy_(rotated(x, cos, sin))
    else:
        for index, (left, right, factor) in enumerate(_terms(x, cos, sin)):
            torch.add(left, right, alpha=factor, out=out[..., index * pairs : (index + 1) * pairs])
        out[..., 2 * pairs :].copy_(x[..., 2 * pairs :])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_into` a new tensor."""
    halves = [torch.add(left, right, alpha=factor) for left, right, factor in _terms(x, cos, sin)]
    return torch.cat((*halves, x[..., 2 * cos.shape[-1] :]), dim=-1)


def _terms(x: Tensor, cos: Tensor, sin: Tensor) -> list[tuple[Tensor, Tensor, int]]:
    """The two halves of what rotates, each as a sum: left, right, and the factor of right."""
    # Each product is rounded by itself: how a CPU rounds `addcmul` depends on the strides, which a compiler changes.
    pairs = x[..., : 2 * cos.shape[-1]].unflatten(-1, (2, cos.shape[-1]))
    by_cos, by_sin = pairs * cos.unsqueeze(-2), pairs * sin.unsqueeze(-2)
    return [(by_cos[..., 0, :], by_sin[..., 1, :], -1), (by_cos[..., 1, :], by_sin[..., 0, :], 1)]
