"""The trained weights of a run, and what a backward omits for frozen ones.

    weights          gradient of the input      backward of products, of attention   held on top of the weights
    trained          needed                     2 forwards, 2                        gradients, master weights, moments
    trained          not needed                 1, 0                                 gradients, master weights, moments
    frozen           needed                     1, 2                                 only those of a LoRA adapter
    frozen           not needed                 0, 0                                 nothing

The input of a part needs a gradient where something before the part is trained; the first trained layer counts like the
other ones, as in `models.llava_cost`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_megatron.models import LlavaConfig, T5Config
from lightning_megatron.models.llava import PARTS
from lightning_megatron.planner.model_parts import (
    LoraAdapter,
    Model,
    ModelPart,
    ModelParts,
    SequenceLengths,
    Stage,
    model_parts_of,
)
from lightning_megatron.transformer.linears import COLUMN_PARALLEL, cross_linear_sizes, linear_sizes
from lightning_megatron.transformer.lora import LoraConfig


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """Weights that are trained; by default all."""

    frozen: tuple[str, ...] = ()
    """Frozen components of a LLaVA: of vision, projector, language."""
    lora: LoraConfig | None = None
    """LoRA adapters; all other weights are frozen."""

    def faults(self, model: Model) -> list[str]:
        """Errors of these settings for a model, one sentence each."""
        faults = []
        if self.frozen and not isinstance(model, LlavaConfig):
            faults.append(
                f"frozen ({', '.join(self.frozen)}) names parts of a LLaVA, and the model is none; leave it out"
            )
        if unknown := [name for name in self.frozen if name not in PARTS]:
            faults.append(f"frozen ({', '.join(map(repr, unknown))}) must be of {', '.join(map(repr, PARTS))}")
        if set(self.frozen) >= set(PARTS):
            faults.append("frozen names all parts, and nothing is left to train; leave one out")
        if self.lora is not None:
            offered = {name for layer in range(model.num_layers) for name in linear_sizes(model, layer)}
            offered |= set(cross_linear_sizes(model)) if isinstance(model, T5Config) else set()
            if missing := [name for name in self.lora.targets if name not in offered]:
                faults.append(
                    f"lora targets ({', '.join(missing)}) must be of what the layers have: {', '.join(sorted(offered))}"
                )
        return faults


ALL = Trainable()


@lru_cache(maxsize=64)
def trainable_parts_of(model: Model, lengths: SequenceLengths, trained: Trainable) -> ModelParts:
    """The parts of a model, each with what a backward does for it."""
    model_parts = model_parts_of(model, lengths)
    parts = model_parts.parts
    if isinstance(model, LlavaConfig):
        parts = tuple(_with_frozen_parts(parts, set(trained.frozen)))
    if trained.lora is not None:
        parts = tuple(_after_first_adapter(_with_adapters(part, trained.lora) for part in parts))
    return replace(model_parts, parts=parts)


def trained_parameters(model_parts: ModelParts) -> int:
    """Number of trained parameters of the unsplit model, without padding."""
    frozen = tuple(replace(part, is_trained=True, adapters=()) for part in model_parts.parts if not part.is_trained)
    return model_parts.parameters() - replace(model_parts, parts=frozen).parameters()


def backward_part(stage: Stage) -> Stage:
    """The parts of a stage that save anything for backward."""
    return {part: count for part, count in stage.items() if part.is_trained or part.passes_gradient}


def _with_frozen_parts(parts: tuple[ModelPart, ...], frozen: set[str]) -> Iterable[ModelPart]:
    """Parts of a LLaVA, trained or frozen. The first one reads pixels; layers and a norm without images never train."""
    tower, projector, language = ("vision" not in frozen, "projector" not in frozen, "language" not in frozen)
    for index, part in enumerate(parts):
        is_used = bool(part.products) or (part.layer is not None and part.layer.repeats > 0)
        match part.component:
            case "vision":
                own = tower and is_used
                yield replace(part, is_trained=own, passes_gradient=own and index > 0)
            case "projector":
                # The projector's first linear reads the tower's output.
                is_first = parts[index - 1].component == "vision"
                yield replace(part, is_trained=projector, passes_gradient=tower or (projector and not is_first))
            case _:
                yield replace(part, is_trained=language, passes_gradient=tower or projector or language)


def _with_adapters(part: ModelPart, lora: LoraConfig) -> ModelPart:
    frozen = replace(part, is_trained=False)
    if part.layer is None:
        return frozen
    linears = linear_sizes(part.layer.config, part.layer.index)
    if part.layer.memory:
        linears |= cross_linear_sizes(part.layer.config)
    return replace(
        frozen,
        adapters=tuple(
            LoraAdapter(
                name=name,
                rank=lora.rank,
                inputs=linears[name][0],
                outputs=linears[name][1],
                cuts_outputs=name in COLUMN_PARALLEL,
                has_dropout=lora.dropout > 0,
            )
            for name in lora.targets
            if name in linears
        ),
    )


def _after_first_adapter(parts: Iterable[ModelPart]) -> Iterable[ModelPart]:
    """Frozen parts, of which those before the first adapter and all embeddings pass no gradient on."""
    is_needed = False
    for part in parts:
        is_needed |= bool(part.adapters)
        # Layers that predict further tokens embed some, and read hidden states besides.
        reads_ids_alone = part.embedded_tokens and not part.products
        yield replace(part, passes_gradient=is_needed and not reads_ids_alone)
