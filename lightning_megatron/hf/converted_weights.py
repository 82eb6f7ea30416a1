"""Weights that the files of a model of transformers hold in other pieces: the experts of a layer one by one.

Transformers' own conversions say which weights of the files make which of the model, and put them together. They do so
for a weight at a time, once the model is cut: a rank reads the experts that it holds, and other weights whole.
"""

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from lightning_megatron.hf.folder import WeightFiles
from lightning_megatron.hf.later_weights import LaterWeights, part_of
from lightning_megatron.sharding import shard_of


class _Source(NamedTuple):
    name: str
    pattern: str
    """The pattern of a conversion that the name fits."""


@dataclass
class Conversion:
    """A conversion, the name of its first weight in the model, and the weights of the files that go into it."""

    converter: WeightConverter
    target: str
    dtype: torch.dtype
    sources: list[_Source] = field(default_factory=list)


class Sources(NamedTuple):
    """What the weights of a model are made of."""

    names: dict[str, str]
    """Names in the files by those in the model, where the two are one weight."""
    conversions: list[Conversion]
    """Conversions make the other weights."""


def sources_of(model: PreTrainedModel, files: WeightFiles) -> Sources:
    """The weights of the files for those of the model, as transformers finds them; the model notes, as transformers has
    it, how it writes them."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = {
        pattern: one for one in transforms if isinstance(one, WeightConverter) for pattern in one.source_patterns
    }
    wanted, found = model.state_dict(), Sources({}, [])
    by_target: dict[str, Conversion] = {}
    for name in sorted(files.shapes, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, list(dict.fromkeys(converters.values())), model.base_model_prefix, wanted
        )
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if target not in wanted:
            continue
        if pattern is None:
            found.names[target] = name
        else:
            made = Conversion(converters[pattern], target, wanted[target].dtype)
            by_target.setdefault(target, made).sources.append(_Source(name, pattern))
    found.conversions.extend(by_target.values())
    used: Any = [one for one in transforms if one.was_used()]
    model._weight_conversions = used
    return found


class ConvertedWeights(LaterWeights):
    """The weights of a model that conversions make of those in the files."""

    def __init__(self, model: PreTrainedModel, files: WeightFiles, conversions: list[Conversion]) -> None:
        super().__init__(type(model).__name__)
        self._config, self._files = model.config, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of the weights by name."""
        self._conversions: dict[frozenset[str], Conversion] = {}
        for conversion in conversions:
            try:
                made = self._convert(conversion, conversion.sources, on_meta=True)
            except (RuntimeError, ValueError, IndexError) as error:
                shapes = ", ".join(f"{one.name} {list(files.shapes[one.name])}" for one in conversion.sources[:4])
                raise ValueError(
                    f"{conversion.target} cannot be put together of the {len(conversion.sources)} weights for it in "
                    f"{files.folder} ({shapes}, ...): one is missing, or has another shape; fetch the files again"
                ) from error
            self.shapes |= {name: tuple(one.shape) for name, one in made.items()}
            self._conversions[frozenset(made)] = conversion

    def groups(self) -> list[frozenset[str]]:
        return list(self._conversions)

    def parts(self, group: frozenset[str], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
        conversion = self._conversions[group]
        if own := _own_sources(conversion, wanted):
            made = self._convert(conversion, own)
            if all(made[name].shape == tensor.shape for name, tensor in wanted.items()):
                return {name: made[name] for name in wanted}
        made = self._convert(conversion, conversion.sources)
        found = {name: part_of(tensor, made[name]) for name, tensor in wanted.items()}
        return {name: part for name, part in found.items() if part is not None}

    def _convert(self, conversion: Conversion, sources: list[_Source], *, on_meta: bool = False) -> dict[str, Tensor]:
        # It takes tensors in place of those that a thread reads.
        converter: Any = copy.deepcopy(conversion.converter)
        for name, pattern in sources:
            if on_meta:
                tensor = torch.empty(self._files.shapes[name], dtype=conversion.dtype, device="meta")
            else:
                tensor = self._files.mapped(name).to(conversion.dtype)
            converter.add_tensor(conversion.target, name, pattern, tensor)
        made: dict[str, Any] = converter.convert(conversion.target, config=self._config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _own_sources(conversion: Conversion, wanted: Mapping[str, Tensor]) -> list[_Source]:
    """The sources of the experts that this rank holds, of a weight with one row for each source; empty for any other
    weight."""
    [first, *others] = (shard_of(tensor) for tensor in wanted.values())
    counts = Counter(pattern for _, pattern in conversion.sources)
    if others or any(count != first.global_shape[0] for count in counts.values()) or len(first.boxes) > 1:
        return []
    (start, *_), (size, *_) = first.box.offsets, first.box.sizes
    numbers: Counter[str] = Counter()
    own = []
    for source in conversion.sources:
        if start <= numbers[source.pattern] < start + size:
            own.append(source)
        numbers[source.pattern] += 1
    return own if size < first.global_shape[0] else []
