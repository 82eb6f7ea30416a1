"""Checks of a run before a process is started or a batch is read; all errors are reported at once."""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils.data import DataLoader

from lightning_megatron.checkpoint.folder import Folder, is_remote
from lightning_megatron.checkpoint.manifest import require_checkpoint
from lightning_megatron.checkpoint.safe_metadata import faults_of
from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.mesh import Sizes
from lightning_megatron.precision.fp8 import device_faults
from lightning_megatron.rules import cross_config
from lightning_megatron.rules.limits import MOST_PROCESSES, limit_faults
from lightning_megatron.trainer.checkpointing.hyper_parameters import plain
from lightning_megatron.trainer.config import ConfigurationError, PipelineConfig
from lightning_megatron.trainer.setup.attention_library import attention_faults
from lightning_megatron.trainer.setup.compiled_layers import compiler_faults
from lightning_megatron.trainer.setup.early_model_checks import early_model_faults
from lightning_megatron.trainer.setup.launch_checks import launch_faults, num_started, queue_faults
from lightning_megatron.trainer.setup.memory_checks import memory_faults
from lightning_megatron.trainer.setup.process_groups import timeout_faults
from lightning_megatron.trainer.setup.written_folders import unwritable_faults
from lightning_megatron.transformer.config import TransformerConfig

# Steps of the runs that are no fit.
_STEPS = {
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
# What a Trainer takes for ckpt_path instead of a path.
_NAMED_CHECKPOINTS = ("best", "last", "hpc", "registry")


def is_named_checkpoint(path: str) -> bool:
    """Whether Lightning finds the checkpoint by a word, such as `last` or `registry:name`, and not by a path."""
    return path.partition(":")[0] in _NAMED_CHECKPOINTS


@runtime_checkable
class DescribesData(Protocol):
    """A data module whose batch size and sequence length are known before it loads anything."""

    global_batch_size: int
    sequence_length: int

    def faults(self) -> list[str]:
        """Errors that keep the data from loading, one sentence each."""
        ...


@runtime_checkable
class FeedsDecoder(Protocol):
    """A data module of samples for an encoder and a decoder; `sequence_length` is the encoder's."""

    decoder_sequence_length: int


@runtime_checkable
class GrowsBatches(Protocol):
    """A data module whose batches may grow."""

    batch_ramp: BatchRamp | None


@runtime_checkable
class HidesPadding(Protocol):
    """A data module that knows whether its batches have padding that is not marked for the model."""

    hides_padding: bool


@runtime_checkable
class SaysFaults(Protocol):
    """A callback that can report its errors before a run."""

    def faults(self, trainer: pl.Trainer) -> list[str]:
        """Errors of the configuration, one sentence each."""
        ...


def faults(trainer: pl.Trainer, arguments: tuple[Any, ...]) -> list[str]:
    """Every fault of a run, from the arguments of `trainer.fit` (or validate, test, predict)."""
    # A MegatronStrategy, which imports this module.
    strategy: Any = trainer.strategy
    pipeline, context = strategy.pipeline, strategy.context
    environment = strategy.cluster_environment
    found = launch_faults(environment, strategy.num_nodes, strategy.num_processes)
    # The other errors are those of the processes that are there.
    sizes = replace(strategy.sizes, world=num_started(environment)) if found else strategy.sizes
    found += timeout_faults(strategy.timeout_seconds)
    num_microbatches, microbatch_size = strategy.num_microbatches, strategy.microbatch_size
    data = next((argument for argument in arguments if isinstance(argument, DescribesData)), None)
    ramp = data.batch_ramp if isinstance(data, GrowsBatches) else None
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        schedule=strategy.schedule,
        model=architecture_of(trainer.lightning_module),
        global_batch_size=data.global_batch_size if data is not None else None,
        batch_unit=None if ramp is None else ramp.unit,
        sequence_length=data.sequence_length if data is not None else None,
        decoder_sequence_length=data.decoder_sequence_length if isinstance(data, FeedsDecoder) else None,
        fp8=strategy.fp8,
        recompute=strategy.recompute,
        kernels=strategy.kernels,
        precision=str(strategy.precision_plugin.precision),
        context=context,
        dynamic_context=strategy.dynamic_context,
        optimizer=strategy.optimizer,
    )
    found += cross_config.faults(facts)
    found += trainer_faults(trainer)
    found += early_model_faults(
        trainer.lightning_module,
        sizes,
        uses_schedule=pipeline.mode == "auto" and trainer.lightning_module.automatic_optimization,
        spreads_documents=trainer.training and strategy.dynamic_context is not None,
        plan=strategy.plan,
    )
    device = strategy.root_device
    if not found:
        found += limit_faults({"devices": strategy.num_processes}, MOST_PROCESSES)
        if device.type == "cpu":
            count, precision = strategy.num_processes, facts.precision
            found += memory_faults(facts.model, sizes, num_processes=count, precision=precision)
    if trainer.training:
        found += unwritable_faults(trainer)
        module = trainer.lightning_module
        manual = "" if module.automatic_optimization else type(module).__name__
        found += uncut_faults(sizes, num_microbatches, microbatch_size, pipeline, manual=manual)
        if strategy.dynamic_context is not None:
            found += dynamic_faults(pipeline, manual=manual)
    found += _iterator_faults(
        trainer, is_cut=num_microbatches > 1 or microbatch_size > 0 or strategy.dynamic_context is not None
    )
    if strategy.fp8 is not None:
        found += device_faults(strategy.fp8, device)
    if context.kernel == "flex" and device.type != "cuda":
        found.append(f"kernel ('flex') of ContextConfig is one of CUDA, and this run is on {device.type}; use 'fused'")
    if device.type == "cuda":
        found += queue_faults(sizes.num_stages)
    if strategy.checkpoint.local_folder and strategy.optimizer.shards_parameters:
        found.append(
            f"local_folder ({strategy.checkpoint.local_folder!r}) keeps what each rank holds of every weight, and with "
            f'optimizer kind {strategy.optimizer.kind!r} that is no whole weight; use kind "distributed_gradients", or '
            "leave local_folder out"
        )
    found += compiler_faults(strategy.kernels, device)
    if strategy.kernels.symmetric_memory and device.type != "cuda":
        found.append(
            f"kernels symmetric_memory (True) is memory of GPUs, and this run is on {device.type}; leave it out"
        )
    found += attention_faults(strategy.kernels, device)
    found += data.faults() if data is not None else []
    if trainer.training and trainer.checkpoint_callbacks and strategy.checkpoint.kind == "directory":
        data_modules = [argument for argument in arguments if isinstance(argument, pl.LightningDataModule)]
        found += _hyper_parameter_faults([trainer.lightning_module, *data_modules])
    if (
        isinstance(data, HidesPadding)
        and data.hides_padding
        and facts.model is not None
        and facts.model.moe is not None
    ):
        found.append(
            f"{type(data).__name__} pads rows without telling the model, and routers of experts would count the "
            "padding as tokens; use packing='documents'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        found += callback.faults(trainer) if isinstance(callback, SaysFaults) else []
        found += _link_faults(callback) if trainer.training else []
    for argument in arguments:
        if isinstance(argument, (str, Path)) and not is_named_checkpoint(str(argument)):
            found += _checkpoint_faults(str(argument))
    return found


def trainer_faults(trainer: pl.Trainer) -> list[str]:
    """Errors of the Trainer's own numbers that it does not look at, one sentence each."""
    faults = []
    if trainer.accumulate_grad_batches < 1:
        faults.append(f"accumulate_grad_batches ({trainer.accumulate_grad_batches}) must be at least 1")
    clip = trainer.gradient_clip_val
    if clip is not None and not clip >= 0:
        faults.append(f"gradient_clip_val ({clip}) must be at least 0, or None for no clipping")
    if trainer.world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        faults.append(
            f"BatchSizeFinder (Tuner.scale_batch_size) tries larger batches until one fails, and over "
            f"{trainer.world_size} processes a failure ends the run; set the batch size, or look for it on one process"
        )
    return faults


def architecture_of(module: pl.LightningModule) -> TransformerConfig | None:
    """The one architecture among the module's attributes, where there is one."""
    configs = [value for value in vars(module).values() if isinstance(value, TransformerConfig)]
    return configs[0] if len(configs) == 1 else None


def uncut_faults(
    sizes: Sizes, num_microbatches: int, microbatch_size: int, pipeline: PipelineConfig, *, manual: str = ""
) -> list[str]:
    """Errors of settings that make a step run once on its whole batch, although it was to be cut. `manual` names the
    module of a manual optimization."""
    if sizes.pp > 1 or (num_microbatches <= 1 and microbatch_size < 1):
        return []
    whats, ways = [], []
    if pipeline.mode == "collective":
        whats.append('PipelineConfig(mode="collective")')
        ways.append('PipelineConfig(mode="auto")')
    if manual:
        whats.append(f"the manual optimization of {manual}")
        ways.append("automatic_optimization=True")
    if not whats:
        return []
    setting = "num_microbatches", num_microbatches, 1
    if microbatch_size:
        setting = "microbatch_size", microbatch_size, 0
    name, value, wanted = setting
    return [
        f"{name} ({value}) must be {wanted} with {' and '.join(whats)} where "
        f"pipeline_model_parallel_size is 1: training_step takes the whole batch at once; use {name}={wanted} "
        f"(and a smaller batch_size to save memory), or {' and '.join(ways)}"
    ]


def _iterator_faults(trainer: pl.Trainer, *, is_cut: bool) -> list[str]:
    """Errors of steps that take their batches out of the loader by themselves: the strategy sees none of them."""
    strategy: Any = trainer.strategy
    module, fn = trainer.lightning_module, trainer.state.fn
    names = ["training_step", "validation_step"] if fn == TrainerFn.FITTING else []
    names += [name for kind, name in _STEPS.items() if kind == fn]
    if strategy.sizes.world == 1:
        names = ["training_step"] if fn == TrainerFn.FITTING and is_cut else []
    # A module may have set one to None, for which Lightning has its own words.
    steps = {name: step for name in names if callable(step := getattr(module, name))}
    taking = [
        name for name, step in steps.items() if is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
    ]
    return [
        f"{name}(self, dataloader_iter) of {type(module).__name__} takes its batches by itself, and with several "
        "processes or microbatches the strategy must see each batch: to cut it, to weigh it by its rows and to check "
        f"that ranks of one model replica read the same; use {name}(self, batch, batch_idx)"
        for name in taking
    ]


def dynamic_faults(pipeline: PipelineConfig, *, manual: str = "") -> list[str]:
    """Errors of settings that keep a step from being run once for each microbatch of a plan of documents. `manual`
    names the module of a manual optimization."""
    faults = []
    if pipeline.mode == "collective":
        faults.append(
            'PipelineConfig(mode="collective") runs training_step once for the whole batch, and dynamic_context once '
            'for each microbatch of its plan; use mode="auto"'
        )
    if manual:
        faults.append(
            f"the manual optimization of {manual} runs training_step once for the whole batch, and "
            "dynamic_context once for each microbatch of its plan; use automatic_optimization=True"
        )
    return faults


def _hyper_parameter_faults(owners: Iterable[pl.LightningModule | pl.LightningDataModule]) -> list[str]:
    """Errors of hyper-parameters that no checkpoint could keep: the first save would fail."""
    return [
        f"{line}, which a checkpoint does not keep: it has plain data alone, so that reading it runs no code. Leave it "
        'out by save_hyperparameters(ignore=[...]), or save files: CheckpointConfig(kind="file")'
        for owner in owners
        for line in faults_of(plain(dict(owner.hparams)), f"the hyper-parameters of {type(owner).__name__}")
    ]


def _link_faults(callback: pl.Callback) -> list[str]:
    """Errors of links that are asked for where there can be none: Lightning would fail at the first save."""
    if not isinstance(callback, ModelCheckpoint) or callback.save_last != "link":
        return []
    if callback.dirpath is None or not is_remote(callback.dirpath):
        return []
    return [
        f'ModelCheckpoint(save_last="link") makes a link, and at an address (dirpath {callback.dirpath}) there are '
        "none; use save_last=True"
    ]


def _checkpoint_faults(path: str) -> list[str]:
    if "://" in path or os.path.isfile(path):
        return []
    try:
        require_checkpoint(Folder(path))
    except ValueError as error:
        return [f"ckpt_path ({path}): {error}. 'last' finds the newest of a ModelCheckpoint's folder"]
    return []


def require_cuttable(trainer: pl.Trainer, dataloader: object, num_microbatches: int, microbatch_size: int) -> None:
    """Raises ConfigurationError where a training loader's batch cannot be cut into equal microbatches.

    A last batch that is smaller is fine: it is cut as evenly as its rows allow, and weighted by what it holds.
    """
    batch_size = dataloader.batch_size if isinstance(dataloader, DataLoader) else None
    name, unit = ("microbatch_size", microbatch_size) if microbatch_size else ("num_microbatches", num_microbatches)
    if not trainer.training or batch_size is None or batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
    fits = " or ".join(str(size) for size in (below, above) if size)
    divisors = ", ".join(str(n) for n in range(1, batch_size + 1) if batch_size % n == 0)
    rule = "must be a multiple of microbatch_size" if microbatch_size else "must be a multiple of num_microbatches"
    raise ConfigurationError(
        f"the training DataLoader's batch_size ({batch_size}, per data-parallel rank) {rule} ({unit}); use "
        f"batch_size {fits}, or {name} {divisors}"
    )
