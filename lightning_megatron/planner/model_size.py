"""Name and size of what a run trains, as reports tell them."""

from dataclasses import dataclass

from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.planner.model_parts import Model
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.trainable import trained_parameters
from lightning_megatron.transformer import cost

# A LlavaConfig is a GPTConfig.
_KINDS: tuple[tuple[type[Model], str], ...] = (
    (LlavaConfig, "LLaVA"),
    (T5Config, "T5"),
    (BertConfig, "BERT"),
    (GPTConfig, "GPT"),
)


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Name of a model and numbers of its parameters."""

    name: str
    """Kind of a model of the package, class of any other."""
    parameters: int
    trained: int
    """Number of parameters that are trained."""
    active: int = 0
    """Number of parameters that a token uses, where it uses some of the experts; 0: all, or not known."""
    num_experts: int = 1
    """Number of experts that ranks may share, of a model that is not the package's; 1: none."""
    num_layers: int = 1
    """Number of layers that stages share, of a model that is not the package's."""


def kind_name(model: Model) -> str:
    """Name of the model's kind in reports."""
    return next(name for kind, name in _KINDS if isinstance(model, kind))


def size_of(run: Run) -> ModelSize:
    """Size of the model of a run."""
    has_experts = run.model.moe is not None and type(run.model) is GPTConfig
    return ModelSize(
        name=kind_name(run.model),
        parameters=run.model_parts.parameters(),
        trained=trained_parameters(run.model_parts),
        active=cost.active_parameters(run.model) if has_experts else 0,
    )
