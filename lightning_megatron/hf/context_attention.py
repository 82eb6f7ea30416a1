"""Attention of transformers' models over ranks of `cp`: queries of own tokens, keys and values of all ranks.

Models of transformers look up their masks and their attention by the name in their configuration. Here the names lead
to the same functions, with the rows of the own tokens alone and with gathered keys and values: windows, packed
documents, soft caps and sinks are the model's own.
"""

import sys
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_megatron.comm import differentiable
from lightning_megatron.mesh import Axis

_EAGER = "eager"
_SDPA = "sdpa"
# Functions that take a mask with the rows of some tokens; others are replaced by one of these.
_WITH_MASKS = (_SDPA, _EAGER)


class ContextAttention:
    """Masks and attention of one network's layers over the ranks of `cp`, each with a contiguous part of the tokens."""

    def __init__(self, cp: Axis) -> None:
        self.cp = cp
        self.is_off = False
        self._before: list[tuple[Any, Any]] = []

    def take_over(self, config: Any, name: str) -> None:
        """Has the layers of a configuration look their attention up by a name."""
        self._before.append((config, config._attn_implementation_internal))
        config._attn_implementation_internal = name

    def give_back(self) -> None:
        """Has all configurations name what they named before `take_over`."""
        while self._before:
            config, name = self._before.pop()
            config._attn_implementation_internal = name

    def mask(self, kind: str, *, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
        """The mask [B, 1, T/cp, T] of own tokens, of a model that has all of them: `q_length` is T."""
        make = ALL_MASK_ATTENTION_FUNCTIONS[kind]
        if self.is_off or q_length % self.cp.size:
            return make(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)  # type: ignore[no-any-return]
        own = q_length // self.cp.size
        options["q_offset"] = options.get("q_offset", 0) + self.cp.rank * own
        # A mask that is left out says nothing of rows that do not begin with the first token.
        skips: dict[str, Any] = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask: Tensor = make(batch_size=batch_size, q_length=own, kv_length=kv_length, **{**options, **skips})
        return mask

    def attend(
        self,
        kind: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The attention of own queries [B, A, T/cp, D] to the keys and values [B, G, T/cp, D] of all ranks."""
        attention = _attention_of(kind, module)
        if self.is_off:
            return attention(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
        if options.get("position_bias") is not None:
            raise RuntimeError(
                f"{type(module).__name__} adds a bias by position to its scores, which is made for the tokens of a "
                "rank; use context_parallel_size=1"
            )
        num_keys = key.shape[2] * self.cp.size
        if num_keys == attention_mask.shape[-1] if attention_mask is not None else key.shape[2] == query.shape[2]:
            # One message for both.
            both = differentiable.all_gather(torch.cat((key, value), -1), self.cp, 2)
            key, value = both.split((key.shape[-1], value.shape[-1]), -1)
        is_causal = options.pop("is_causal", None)
        if attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            attention_mask = self.mask(
                kind,
                batch_size=query.shape[0],
                q_length=query.shape[2] * self.cp.size,
                kv_length=key.shape[2],
                mask_function=causal_mask_function,
                dtype=query.dtype,
                device=query.device,
            )
        options["is_causal"] = False
        return attention(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]


def take_over(network: nn.Module, layers: Iterable[str], cp: Axis) -> ContextAttention:
    """The attention over `cp` that the layers of a network use from now on, see `can_take_over`."""
    attention, model = ContextAttention(cp), _model_of(network, layers)
    for config in _configs(network, layers):
        kind = config._attn_implementation
        if kind not in _WITH_MASKS:
            # Sinks and soft caps are in the eager one alone.
            kind = _SDPA if getattr(model, "_supports_sdpa", False) else _EAGER
        name = f"{kind}_over_cp_{id(attention)}"
        AttentionInterface.register(name, partial(attention.attend, kind))
        AttentionMaskInterface.register(name, partial(attention.mask, kind))
        weakref.finalize(network, _forget, name)
        attention.take_over(config, name)
    return attention


def can_take_over(network: nn.Module, layers: Iterable[str]) -> bool:
    """Whether the layers of a network are a model's of transformers, and look up their attention by a name."""
    model = _model_of(network, layers)
    return model is not None and model._can_set_attn_implementation() and bool(_configs(network, layers))


def _model_of(network: nn.Module, layers: Iterable[str]) -> PreTrainedModel | None:
    """The outermost model of transformers in a network that has all of these layers."""
    names = tuple(layers)
    for name, module in network.named_modules():
        if isinstance(module, PreTrainedModel) and all(one.startswith(f"{name}." if name else "") for one in names):
            return module
    return None


def _configs(network: nn.Module, layers: Iterable[str]) -> list[Any]:
    """The configurations by which the attention of the layers is looked up."""
    found = {}
    for layer in layers:
        for module in network.get_submodule(layer).modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) is not None:
                found[id(config)] = config
    return list(found.values())


def _attention_of(kind: str, module: nn.Module) -> Any:
    if kind != _EAGER:
        return ALL_ATTENTION_FUNCTIONS[kind]
    # Each file of models has its own.
    return sys.modules[type(module).__module__].eager_attention_forward


def _forget(name: str) -> None:
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
