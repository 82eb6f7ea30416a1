"""Configuration of FP8 training, and the one door to Transformer Engine.

    engine               what multiplies                                     runs on
    torch                torch's own scaled product, under our linears       CPU, and GPUs that know float8
    transformer_engine   Transformer Engine's linears, with our weights      GPUs where it is installed

Transformer Engine scales and keeps its amaxes by itself; what is here builds its layers for an axis of ours, translates
the configuration, and says what to install where it is absent.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import noop_context_fn

from lightning_megatron.config_dataclass import config_dataclass
from lightning_megatron.mesh import Axis
from lightning_megatron.precision.cast import TILE
from lightning_megatron.precision.mx import BLOCK, UNITS

Format = Literal["e4m3", "hybrid"]
RecipeName = Literal["current", "delayed", "mxfp8", "none"]
AmaxFrom = Literal["max", "most_recent"]
Engine = Literal["torch", "transformer_engine"]
ParamGather = Literal["full", "float8"]
ParallelMode = Literal["column", "row"]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes contexts around a forward and around its recomputation."""

_FLOAT8 = (8, 9)
# Source: transformer_engine.pytorch.quantization, check_mxfp8_support, at v2.18.
_WITHOUT_ENGINE_MX = (12, 0)
# Releases of Transformer Engine that first have Float8CurrentScaling, and a GroupedLinear that multiplies by it.
_OLDEST, _OLDEST_GROUPED = (2, 2), (2, 3)
# Weights that are cast twice keep their numbers while the largest is a normal one of e4m3, from 2^-6 to 448.
_LARGEST_GATHER_MARGIN = 13
HISTORY_LENGTH = 1024
"""Default number of steps whose amaxes a delayed scale is made from."""


@config_dataclass
class Fp8Config:
    """FP8 in the linear layers of transformer layers, or of the layers of another network. Embeddings, output head and
    norms never use it."""

    format: Format = "hybrid"
    """Float8 format. e4m3: for inputs, weights and gradients; hybrid: e4m3 for inputs and weights, and e5m2, which has
    a wider range, for gradients."""
    scaling: RecipeName = "current"
    """Scaling of a tensor before its cast. current: by its own amax; delayed: by its amaxes in earlier steps; mxfp8:
    each 32 numbers along the inner dim of a GEMM by their own; none: no FP8, but Transformer Engine's fused layers in
    the precision of the trainer."""
    amax_history_length: int = HISTORY_LENGTH
    """Steps whose amaxes count for a delayed scale."""
    amax_from: AmaxFrom = "max"
    """Amax that a delayed scale is made from. max: the largest of the history; most_recent: the latest."""
    margin: int = 0
    """Powers of two between the amax and the largest float8 number that are left free, where a tensor has one scale."""
    num_first_layers_bf16: int = 0
    """Layers at the start of the model that stay in the precision of the trainer."""
    num_last_layers_bf16: int = 0
    """Layers at the end of the model that stay in the precision of the trainer."""
    engine: Engine = "torch"
    """Library that multiplies. torch: torch's scaled GEMM; transformer_engine: Transformer Engine's layers."""
    param_gather: ParamGather = "full"
    """Form in which OptimizerConfig(kind="distributed_parameters") gathers the weights of these layers. full: in the
    precision of the trainer; float8: as the bytes of their cast, half of the message of 16 bits, for the same products.
    Code of a layer that reads such a weight for anything else reads it rounded."""

    def __post_init__(self) -> None:
        if faults := self.faults():
            raise ValueError("\n".join(faults))

    @property
    def is_float8(self) -> bool:
        """Whether anything multiplies in float8."""
        return self.scaling != "none"

    @property
    def tile(self) -> int:
        """Number that must divide both sizes of each weight of a rank, and to which tokens are padded."""
        return {"mxfp8": BLOCK, "none": 1}.get(self.scaling, TILE)

    def faults(self) -> list[str]:
        """Every rule that these settings break, one sentence each."""
        choices = {
            "format": Format,
            "scaling": RecipeName,
            "amax_from": AmaxFrom,
            "engine": Engine,
            "param_gather": ParamGather,
        }
        faults = [
            f"fp8 {name} ({getattr(self, name)!r}) must be one of {', '.join(map(repr, get_args(choice)))}"
            for name, choice in choices.items()
            if getattr(self, name) not in get_args(choice)
        ]
        least = {"amax_history_length": 1, "margin": 0, "num_first_layers_bf16": 0, "num_last_layers_bf16": 0}
        faults += [
            f"fp8 {name} ({getattr(self, name)}) must be at least {smallest}"
            for name, smallest in least.items()
            if getattr(self, name) < smallest
        ]
        usual = {"amax_history_length": HISTORY_LENGTH, "amax_from": "max"}
        faults += [
            f"fp8 {name} ({getattr(self, name)!r}) belongs to scaling='delayed'; choose that, or leave it out"
            for name, value in usual.items()
            if self.scaling != "delayed" and getattr(self, name) != value
        ]
        if self.scaling == "mxfp8" and self.margin:
            faults.append(
                f"fp8 margin ({self.margin}) is for scales of whole tensors, and scaling='mxfp8' has one for each 32 "
                "numbers; use margin=0"
            )
        if self.scaling == "none" and (self.margin or self.format != "hybrid"):
            faults.append(
                f"fp8 format ({self.format!r}) and margin ({self.margin}) are for float8, and scaling='none' has none; "
                "leave them out"
            )
        if self.scaling == "none" and self.engine == "torch":
            faults.append(
                "fp8 scaling='none' is for engine='transformer_engine', whose fused layers also multiply without "
                "float8; choose that, or leave fp8 out"
            )
        if self.param_gather == "float8" and self.margin > _LARGEST_GATHER_MARGIN:
            faults.append(
                f"fp8 margin ({self.margin}) must be at most {_LARGEST_GATHER_MARGIN} with param_gather='float8': "
                "numbers of a weight that are small for float8 are rounded once more where its GEMM casts it again"
            )
        if self.param_gather == "float8" and (self.scaling != "current" or self.engine != "torch"):
            faults.append(
                "fp8 param_gather ('float8') is for scaling='current' of engine='torch', whose scales ranks agree on "
                f"before they gather, and these are {self.scaling!r} and {self.engine!r}; use param_gather='full'"
            )
        if self.engine == "transformer_engine" and self.scaling == "current" and self.margin:
            faults.append(
                f"fp8 margin ({self.margin}) with scaling='current' is known to engine='torch' alone; use margin=0, "
                "or scaling='delayed'"
            )
        return faults


def engine_faults(config: Fp8Config) -> list[str]:
    """Why the configured engine is not available in this environment: nothing, or one sentence."""
    if config.engine == "torch":
        return []
    try:
        _transformer_engine()
    except ImportError as error:
        return [str(error)]
    return _release_faults(_OLDEST, "Float8CurrentScaling")


def expert_engine_faults(config: Fp8Config) -> list[str]:
    """Why the configured engine, which is there, does not multiply experts so: nothing, or one sentence."""
    if config.engine == "torch" or config.scaling in ("delayed", "none") or engine_faults(config):
        return []
    return _release_faults(_OLDEST_GROUPED, f"a GroupedLinear for experts under scaling={config.scaling!r}")


def device_faults(config: Fp8Config, device: torch.device) -> list[str]:
    """Why this device does not multiply so: nothing, or one sentence. A CPU multiplies anything."""
    if device.type != "cuda" or not config.is_float8:
        return []
    capability = torch.cuda.get_device_capability(device)
    has = f"and this {device} has {capability[0]}.{capability[1]}"
    if capability < _FLOAT8:
        return [
            f"fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper, Blackwell), {has}; leave fp8 out and use "
            "precision='bf16-mixed'"
        ]
    if config.scaling == "mxfp8" and capability < UNITS:
        return [
            "fp8 scaling='mxfp8' needs a GPU of compute capability 10.0 or more (Blackwell), whose units read scales "
            f"of blocks, {has}; use scaling='current' or 'delayed'"
        ]
    if config.scaling == "mxfp8" and config.engine == "transformer_engine" and capability >= _WITHOUT_ENGINE_MX:
        return [
            "fp8 scaling='mxfp8' of Transformer Engine is for GPUs of compute capability 10.0 up to 12.0, for which it "
            f"has every layout of GEMM, {has}; use engine='torch' or scaling='current'"
        ]
    return []


# --- Transformer Engine -----------------------------------------------------------------------------------------------


def _transformer_engine() -> Any:
    """The package; raises ImportError, naming the extra, where it cannot be had."""
    try:
        import transformer_engine.common.recipe
        import transformer_engine.pytorch
    # On a machine without CUDA's libraries its import ends with a RuntimeError, or an OSError.
    except Exception as error:
        raise ImportError(
            "fp8 engine 'transformer_engine' needs Transformer Engine, which cannot be imported here "
            f"({type(error).__name__}: {error}); on a machine with an NVIDIA GPU, CUDA's compiler and cuDNN install "
            "the extra, pip install 'lightning-megatron[fp8]' --no-build-isolation, or use Fp8Config(engine='torch')"
        ) from error
    return transformer_engine


def _release_faults(oldest: tuple[int, int], what: str) -> list[str]:
    """Why the installed release is too old for something: nothing, or one sentence."""
    release: str = _transformer_engine().__version__
    if tuple(int(part) for part in release.split(".")[:2]) >= oldest:
        return []
    needed = ".".join(map(str, oldest))
    return [
        f"fp8 engine 'transformer_engine' needs Transformer Engine {needed} or later, which has {what}, and {release} "
        f"is installed; pip install 'transformer-engine[pytorch]>={needed}', or use Fp8Config(engine='torch')"
    ]


def recipe(config: Fp8Config) -> Any:
    """Transformer Engine's recipe for the configuration."""
    recipes = _transformer_engine().common.recipe
    fp8_format = recipes.Format.E4M3 if config.format == "e4m3" else recipes.Format.HYBRID
    if config.scaling == "current":
        return recipes.Float8CurrentScaling(fp8_format=fp8_format)
    if config.scaling == "mxfp8":
        return recipes.MXFP8BlockScaling(fp8_format=fp8_format)
    return recipes.DelayedScaling(
        margin=config.margin,
        fp8_format=fp8_format,
        amax_history_len=config.amax_history_length,
        amax_compute_algo=config.amax_from,
    )


def config_of_recipe(recipe: Any) -> Fp8Config:
    """The configuration equivalent to a recipe of Transformer Engine. Raises ValueError for one that is not offered."""
    names = {"DelayedScaling": "delayed", "Float8CurrentScaling": "current", "MXFP8BlockScaling": "mxfp8"}
    name, formats = type(recipe).__name__, {"E4M3": "e4m3", "HYBRID": "hybrid"}
    fp8_format = recipe.fp8_format.name
    if name not in names or fp8_format not in formats:
        raise ValueError(
            f"FP8 recipe {name} with format {fp8_format} is not offered; use one of {', '.join(names)} with one of "
            f"{', '.join(formats)}"
        )
    fields: dict[str, Any] = {"format": formats[fp8_format], "scaling": names[name], "engine": "transformer_engine"}
    if fields["scaling"] == "delayed":
        fields["margin"] = recipe.margin
        fields["amax_history_length"] = recipe.amax_history_len
        # A function of the user's is none of the two, and refused as such.
        fields["amax_from"] = recipe.amax_compute_algo
    return Fp8Config(**fields)


def autocast(config: Fp8Config, ranks: ProcessGroup | None) -> AbstractContextManager[None]:
    """Inside the block Transformer Engine's layers multiply as configured; its end reduces amaxes over `ranks`."""
    if not config.is_float8:
        return left_out()
    return _autocast(enabled=True, recipe=recipe(config), amax_reduction_group=ranks)


def left_out() -> AbstractContextManager[None]:
    """Inside the block Transformer Engine's layers compute without FP8, and their amaxes are not reduced."""
    return _autocast(enabled=False)


def checkpoint(run: Callable[..., Any], *inputs: Any, context_fn: Contexts = noop_context_fn) -> Any:
    """`run(*inputs)`, recomputed in the backward inside of the autocast that is on now, by the scales of now."""

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recompute = context_fn()
        return forward, _inside(recompute)

    return _transformer_engine().pytorch.checkpoint(run, *inputs, use_reentrant=False, context_fn=contexts)


@contextmanager
def _inside(recompute: AbstractContextManager[Any]) -> Iterator[None]:
    """Inside of an autocast without FP8, too: one with FP8 reduces amaxes over ranks at its end, and moves histories,
    where there is none around it. Once for each call of the model is enough."""
    with left_out(), recompute:
        yield


_FORMER_NAMES = {"recipe": "fp8_recipe", "amax_reduction_group": "fp8_group"}


def _autocast(**arguments: Any) -> AbstractContextManager[None]:
    """Transformer Engine's autocast, which older releases have under another name that newer ones warn of."""
    pytorch = _transformer_engine().pytorch
    context: AbstractContextManager[None]
    if hasattr(pytorch, "autocast"):
        context = pytorch.autocast(**arguments)
    else:
        context = pytorch.fp8_autocast(**{_FORMER_NAMES.get(name, name): value for name, value in arguments.items()})
    return context


def linear(in_features: int, out_features: int, *, mode: ParallelMode, tp: Axis, sp: Axis, **rest: Any) -> nn.Module:
    """Transformer Engine's Linear over `tp`; features are those of the unsplit layer, `rest` as it takes it."""
    return _build("Linear", in_features, out_features, parallel_mode=mode, **_parallel(tp, sp), **rest)


def norm_linear(in_features: int, out_features: int, *, tp: Axis, sp: Axis, **rest: Any) -> nn.Module:
    """Transformer Engine's LayerNormLinear: a norm and a column-parallel linear in one."""
    return _build("LayerNormLinear", in_features, out_features, parallel_mode="column", **_parallel(tp, sp), **rest)


def grouped_linear(num_groups: int, in_features: int, out_features: int, **rest: Any) -> nn.Module:
    """Transformer Engine's GroupedLinear: as many linears as groups of tokens (experts), of a rank's own features.

    It sums nothing over ranks, and under current scaling refuses to know of any.
    """
    return _build("GroupedLinear", num_groups, in_features, out_features, **rest)


def attention(
    num_heads: int, head_dim: int, *, num_groups: int, is_causal: bool, window: int, tp: Axis, sp: Axis, **rest: Any
) -> nn.Module:
    """Transformer Engine's DotProductAttention of `[S, B, A, D]` or as `rest` says; heads are those of all ranks.

    Under causal attention a token sees the last `window`, itself among them, or all where that is 0.
    """
    mask = "causal" if is_causal else "no_mask"
    left, right = window - 1 if window else -1, 0 if is_causal else -1
    return _build(
        "DotProductAttention",
        num_heads,
        head_dim,
        num_gqa_groups=num_groups,
        attn_mask_type=mask,
        window_size=(left, right),
        **_parallel(tp, sp),
        **rest,
    )


def _parallel(tp: Axis, sp: Axis) -> dict[str, Any]:
    """Arguments by which each layer of Transformer Engine takes its axes."""
    return {"tp_group": tp.group, "tp_size": tp.size, "sequence_parallel": sp.size > 1}


def _build(kind: str, *args: Any, **kwargs: Any) -> nn.Module:
    build: Callable[..., nn.Module] = getattr(_transformer_engine().pytorch, kind)
    return build(*args, **kwargs)
