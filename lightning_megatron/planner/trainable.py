"""Which weights of a run are trained, and what a backward needs not do for the others.

    weights          gradient of what goes in   backward of products, of attention   held beside the weights
    trained          needed                     2 forwards, 2                        gradients, master weights, moments
    trained          needed by nobody           1, 0                                 the same
    frozen           needed                     1, 2                                 nothing; those of a path, if any
    frozen           needed by nobody           0, 0                                 nothing

What goes into a piece needs a gradient where something before it is trained; the first layer of what is trained counts
as its others do, as in `models.llava_cost`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from lightning_megatron.mesh import Sizes
from lightning_megatron.models import LlavaConfig, T5Config
from lightning_megatron.models.llava import PARTS
from lightning_megatron.planner.model_parts import (
    LoraAdapter,
    Model,
    ModelPart,
    ModelParts,
    SequenceLengths,
    Stage,
    adapter_parameters,
    model_parts_of,
    parameters_of,
)
from lightning_megatron.transformer import cost
from lightning_megatron.transformer.linears import COLUMN_PARALLEL, cross_linear_sizes, linear_sizes
from lightning_megatron.transformer.lora import LoraConfig


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """Weights that are trained; by default all."""

    frozen: tuple[str, ...] = ()
    """Parts of a LLaVA that are not: of vision, projector, language."""
    lora: LoraConfig | None = None
    """Low-rank paths, beside weights that are all frozen."""

    def faults(self, model: Model) -> list[str]:
        """What does not fit the model, one sentence each."""
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
    """The pieces of a model, each with what a backward does for it."""
    model_parts = model_parts_of(model, lengths)
    parts = model_parts.parts
    if isinstance(model, LlavaConfig):
        parts = tuple(_with_frozen_parts(parts, set(trained.frozen)))
    if trained.lora is not None:
        parts = tuple(_behind_first(_with_adapters(part, trained.lora) for part in parts))
    return replace(model_parts, parts=parts)


def trained_parameters(model_parts: ModelParts) -> int:
    """Trained parameters of the unsplit model, without padding."""
    idle = tuple(replace(part, is_trained=True, adapters=()) for part in model_parts.parts if not part.is_trained)
    frozen = replace(model_parts, parts=idle).parameters()
    return model_parts.parameters() - frozen


def trained_of_stages(stages: Iterable[Stage], model_parts: ModelParts, sizes: Sizes) -> tuple[int, int]:
    """Trained parameters that a rank holds on its stages: dense ones, and those of experts."""
    dense, experts = 0, 0
    has_matrix, needs_matrix = False, False
    for stage in stages:
        for part, count in stage.items():
            has_matrix |= part.matrices > 0
            needs_matrix |= part.shared_matrices > 0 and part.is_trained
            own = parameters_of(part, model_parts, sizes) if part.is_trained else (adapter_parameters(part, sizes), 0)
            dense, experts = dense + count * own[0], experts + count * own[1]
    if needs_matrix and not has_matrix:
        dense += cost.vocabulary_parameters(model_parts.config, sizes)
    return dense, experts


def backward_part(stage: Stage) -> Stage:
    """The pieces of a stage that keep anything for a backward."""
    return {part: count for part, count in stage.items() if part.is_trained or part.passes_gradient}


def _with_frozen_parts(parts: tuple[ModelPart, ...], frozen: set[str]) -> Iterable[ModelPart]:
    """Those of a LLaVA. The first piece looks at pixels; layers and a norm that no image goes through train never."""
    tower, projector, language = ("vision" not in frozen, "projector" not in frozen, "language" not in frozen)
    for place, part in enumerate(parts):
        is_used = bool(part.products) or (part.layer is not None and part.layer.repeats > 0)
        match part.component:
            case "vision":
                own = tower and is_used
                yield replace(part, is_trained=own, passes_gradient=own and place > 0)
            case "projector":
                # The first of its linears reads the tower.
                is_first = parts[place - 1].component == "vision"
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


def _behind_first(parts: Iterable[ModelPart]) -> Iterable[ModelPart]:
    """Of pieces with frozen weights those before the first path pass no gradient: nobody needs it. What embeds passes
    none anywhere."""
    is_needed = False
    for part in parts:
        is_needed |= bool(part.adapters)
        yield replace(part, passes_gradient=is_needed and not part.embedded_tokens)
