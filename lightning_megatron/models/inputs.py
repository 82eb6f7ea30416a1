"""Checks of a model call's inputs: token ids and tensors of their shape, of lengths that the model can take."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from lightning_megatron.context.context_layout import require_even
from lightning_megatron.mesh import Mesh
from lightning_megatron.transformer.config import LanguageModelConfig

_NOT_SHIFTED = "; labels are not shifted here: give each position its own target"


def require_shapes(name: str, tokens: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError unless the tokens called `name` are integers [batch, sequence] and the others are as they."""
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ValueError(
            f"{name} ({tuple(tokens.shape)} of {tokens.dtype}) must be integers of shape [batch, sequence]"
        )
    for other, value in others.items():
        if value is not None and value.shape != tokens.shape:
            hint = _NOT_SHIFTED if other == "labels" else ""
            raise ValueError(f"{other} {tuple(value.shape)} must have the shape of {name} {tuple(tokens.shape)}{hint}")


def require_labels(labels: Tensor | None, others: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError where something is given that has a meaning only with labels, and they are not."""
    given = [name for name, value in others.items() if value is not None]
    if labels is None and given:
        raise ValueError(f"{given[0]} needs labels: without labels there is no loss")


def require_positions(
    config: LanguageModelConfig,
    lengths: Sequence[int],
    limit: int,
    *,
    name: str = "max_sequence_length",
    of_stack: str = "",
) -> None:
    """Raises ValueError for sequences (of a stack, where there are several) longer than the learned positions; `name`
    is the field that says how many there are."""
    longest = max(lengths, default=0)
    if config.position == "learned" and longest > limit:
        raise ValueError(
            f"a sequence of {longest} tokens{of_stack} must not be longer than {name} ({limit}), because positions are "
            "learned; shorten it, or build the model with more positions"
        )


def require_even_parts(lengths: Sequence[int], mesh: Mesh, *, is_causal: bool = True) -> None:
    """Raises ValueError for sequences that ranks of cp cannot share evenly, where nothing is to be padded."""
    if not mesh.sizes.pads_uneven:
        ring_size, ulysses_size = (mesh.axis(name).size for name in ("cp_ring", "cp_ulysses"))
        require_even(lengths, ring_size=ring_size, ulysses_size=ulysses_size, is_zigzag=is_causal)
