"""A family of Hugging Face models: a table of rows and a translation of its configuration, both ways.

A family is one small file with a `Family`. Its `Table` for a configuration maps each tensor, on either side, to the
other; a tensor that no row names is a fault, and so is one that two rows name.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_megatron.hf.blocks import Layout, Shape, TensorBlock, identity, shapes_of_sources
from lightning_megatron.hf.config_reader import TRAINING_ONLY, ConfigReader, unwritten_faults
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.bert import BertConfig, BertModel
from lightning_megatron.models.gpt import GPTConfig, GPTModel
from lightning_megatron.models.llava import LlavaConfig, LlavaModel
from lightning_megatron.models.t5 import T5Model
from lightning_megatron.models.t5_config import T5Config
from lightning_megatron.rules.limits import model_limit_faults
from lightning_megatron.sharding import shard_of

Config = GPTConfig | BertConfig | T5Config
# A LlavaConfig is a GPTConfig, and a LlavaModel a GPTModel.
Model = GPTModel | BertModel | T5Model

# Of each configuration that families have.
_MODELS: dict[type[Any], type[Any]] = {
    GPTConfig: GPTModel,
    BertConfig: BertModel,
    T5Config: T5Model,
    LlavaConfig: LlavaModel,
}

CONFIGS: dict[str, type[Config]] = {model.__name__: config for config, model in _MODELS.items()}
"""The configuration of each model that families have, by the name of the model's class."""

_SHOWN = 20


def _always(config: Any) -> bool:
    return True


def _never(config: Any, name: str) -> bool:
    return False


@dataclass(frozen=True)
class ParamMapping:
    """Mapping of one of our tensors to those of theirs with the same numbers; `{}` is a number, of a layer say.

    Where theirs have one `{}` more it is the number of an expert: there is one tensor for every index of our dim 0.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = identity
    is_of: Callable[[Any], bool] = _always
    """Whether the mapping holds for a model of that configuration of ours."""

    def sources(self, numbers: tuple[str, ...], shape: Shape) -> tuple[str, ...]:
        """The names of theirs for our tensor of that shape, whose name has those numbers."""
        if all(name.count("{}") == len(numbers) for name in self.theirs):
            return tuple(name.format(*numbers) for name in self.theirs)
        return tuple(name.format(*numbers, expert) for expert in range(shape[0]) for name in self.theirs)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of models of one `model_type`."""

    name: str
    """The model_type."""
    architecture: str
    """The class of transformers that a saved model names."""
    prefix: str
    """Prefix of their tensor names, left out by models that were saved without a head."""
    rows: tuple[ParamMapping, ...]
    """Mappings of the tensors of files that are written."""
    ignored: tuple[str, ...]
    """Names of theirs that are not weights."""
    tied: Mapping[str, str]
    """Names of theirs that repeat another tensor where embeddings are tied."""
    defaults: Mapping[str, Any]
    """Fields of theirs that a config.json may leave out."""
    harmless: frozenset[str]
    """Fields of theirs that change no number of a forward."""
    config_from_hf: Callable[[ConfigReader], dict[str, Any]]
    """Our fields, with faults noted in the reader; the keys, one set for all files, are what it translates."""
    config_to_hf: Callable[[Any], dict[str, Any]]
    """Their fields, of a `config_class`."""
    rules: Callable[[Any], list[str]]
    """Function that gives the family's own rules that a configuration of ours breaks, one sentence each."""
    ruled: frozenset[str] = frozenset()
    """Fields of ours that are not translated and that `rules` look at."""
    other_rows: tuple[ParamMapping, ...] = ()
    """Mappings of files that some version of transformers writes too."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Names of theirs that always repeat another tensor."""
    config_class: type[Config] = GPTConfig
    """Class of our configurations of this family."""
    is_left_out: Callable[[Any, str], bool] = _never
    """Whether a tensor of theirs is of a part that models of a configuration do not have, as in transformers."""
    gives_way: bool = False
    """Whether a model that another family could also have is written as that one unless this one is named."""

    def rows_of(self, names: Iterable[str]) -> tuple[ParamMapping, ...]:
        """The rows of a file with tensors of those names."""
        if not self.other_rows:
            return self.rows
        of_one = {name for row in self.other_rows for name in row.theirs} - {
            name for row in self.rows for name in row.theirs
        }
        bare = tuple(pattern.removeprefix(self.prefix) for pattern in of_one)
        is_other = any(matches(pattern, name) for name in names for pattern in (*of_one, *bare))
        return self.other_rows if is_other else self.rows

    def repeated(self, config: Config) -> Mapping[str, str]:
        """Names of theirs that repeat another tensor in a model of that configuration."""
        return {**self.copies, **self.tied} if config.tie_embeddings else self.copies

    def config(self, raw: Mapping[str, Any]) -> Config:
        """Configuration of ours. Raises ValueError with every field that cannot be translated."""
        reader = ConfigReader(raw, self.defaults)
        fields = self.config_from_hf(reader)
        reader.note_unknown(self.name, self.harmless)
        faults = reader.faults
        try:
            config = self.config_class(**fields)
        except ValueError as error:
            # Errors in theirs cause errors in ours too.
            faults = faults or str(error).splitlines()
        else:
            faults = faults or list(model_limit_faults(config))
        if faults:
            raise ValueError("\n  ".join([f"config.json of model_type {self.name!r} cannot be used:", *faults]))
        return config

    def faults(self, config: Config) -> list[str]:
        """Reasons why a configuration of ours is not of this family: rules it breaks, fields that would be lost."""
        translated = self.config_from_hf(ConfigReader({}, self.defaults))
        return self.rules(config) + unwritten_faults(config, {*translated, *self.ruled, *TRAINING_ONLY})


def is_of_training_alone(name: str) -> bool:
    """Whether a tensor of ours is of a layer that acts in training alone, and that no file has."""
    return name.startswith("mtp.")


def model_of(config: Config, mesh: Mesh) -> Model:
    """The model of a configuration on a mesh, built on torch's default device."""
    model: Model = _MODELS[type(config)](config, mesh=mesh)
    return model


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """Location of one of our tensors, unsplit, in theirs."""

    shape: Shape
    sources: tuple[str, ...]
    blocks: tuple[TensorBlock, ...]


class Table:
    """Every tensor of a model of one configuration: `links` by our names, `theirs` shapes by theirs, in our order.

    `buffers` are those of our names that are no parameters, such as expert biases.
    """

    def __init__(self, family: Family, config: Config, names: Iterable[str] = ()) -> None:
        """`names` are those of a file's tensors, where one is read."""
        self.family, self.config = family, config
        self._rows = tuple(row for row in family.rows_of(names) if row.is_of(config))
        with torch.device("meta"):
            model = model_of(config, Mesh.single())
        shapes = {name: shard_of(parameter).global_shape for name, parameter in model.named_parameters()}
        buffers = {
            name: tuple(buffer.shape)
            for name, buffer in model.named_buffers()
            if self._has_row(name) and not is_of_training_alone(name)
        }
        self.buffers = frozenset(buffers)
        shapes = {name: shape for name, shape in (shapes | buffers).items() if not is_of_training_alone(name)}
        self.links: dict[str, TensorSource] = {}
        self.theirs: dict[str, Shape] = {}
        for name, shape in shapes.items():
            row, numbers = self._row_of(name)
            sources, blocks = row.sources(numbers, shape), row.layout(config, shape)
            self.links[name] = TensorSource(shape=shape, sources=sources, blocks=blocks)
            for source, their_shape in zip(sources, shapes_of_sources(blocks), strict=True):
                assert source not in self.theirs, f"two rows of {family.name} name {source}"
                self.theirs[source] = their_shape

    @property
    def wide(self) -> frozenset[str]:
        """Names of theirs that are written in float32 at least, whatever the dtype of weights: those of our buffers."""
        return frozenset(source for name in self.buffers for source in self.links[name].sources)

    def _has_row(self, name: str) -> bool:
        return any(matches(row.ours, name) for row in self._rows)

    def _row_of(self, name: str) -> tuple[ParamMapping, tuple[str, ...]]:
        for row in self._rows:
            if match := matches(row.ours, name):
                return row, match.groups()
        raise ValueError(f"family {self.family.name!r} has no row for our tensor {name}; add one to its table")

    def compare(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype], where: str) -> dict[str, str]:
        """The name in the file of each of their tensors. Raises ValueError with all that does not fit."""
        prefix = self.family.prefix
        is_bare = not any(name.startswith(prefix) for name in shapes)
        found = {prefix + name if is_bare and prefix + name in self.theirs else name: name for name in shapes}
        known = self.family.repeated(self.config)
        ignored = (*self.family.ignored, *(p.removeprefix(prefix) for p in self.family.ignored))
        unknown = [
            file_name
            for name, file_name in found.items()
            if name not in self.theirs
            and name not in known
            and not any(matches(p, file_name) for p in ignored)
            and not self.family.is_left_out(self.config, name)
        ]
        missing = [name for name in self.theirs if name not in found]
        misshapen = [
            f"{found[name]} ({tuple(shapes[found[name]])} there, {shape} by the config)"
            for name, shape in self.theirs.items()
            if name in found and tuple(shapes[found[name]]) != shape
        ]
        no_floats = [found[name] for name in self.theirs if name in found and not dtypes[found[name]].is_floating_point]
        faults = [
            *listed(unknown, f"in it and unknown to family {self.family.name!r}"),
            *listed(missing, "needed and not in it"),
            *listed(misshapen, "of another shape"),
            *listed(no_floats, "neither F64, F32, F16 nor BF16"),
        ]
        if faults:
            raise ValueError("\n  ".join([f"the weights in {where} do not fit its config.json:", *faults]))
        return found


def matches(pattern: str, name: str) -> re.Match[str] | None:
    """The numbers in a name that a pattern with `{}` stands for, or None."""
    return re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), name)


def listed(names: Iterable[str], kind: str) -> list[str]:
    """One line with the number of names, their error and the names; none where there are no names."""
    names = sorted(names)
    if not names:
        return []
    return [f"{len(names)} {kind}: {', '.join(names[:_SHOWN])}" + (", ..." if len(names) > _SHOWN else "")]
