"""The run that CONFIG and the options of a command ask for, whatever CONFIG is."""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_megatron.cli.plan_file import model_of_folder, planned_file, trains_unchanged
from lightning_megatron.cli.plan_request import PlanRequest, R
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.data.bert_samples import BertSampleConfig
from lightning_megatron.data.span_corruption import SpanCorruption
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, LlavaConfig, T5Config
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.planner.model_size import kind_name
from lightning_megatron.planner.presets import preset_of
from lightning_megatron.planner.run import Run
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.rules.limits import model_limit_faults
from lightning_megatron.text_files import read_table
from lightning_megatron.transformer.recompute import RecomputeConfig

# Tokens of a sample of a Hugging Face model that may take longer ones.
_USUAL_LENGTH = 8192


def asks_for_unchanged(options: argparse.Namespace) -> bool:
    """Whether CONFIG, which becomes the file of a shipped recipe where it is the name of one, trains a network that
    knows nothing of ranks. Raises UsageError for what is not planned, and for options that have no effect."""
    try:
        options.config = planned_file(options.config)
        is_unchanged = trains_unchanged(options.config, options.model)
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    if not is_unchanged:
        require_no_module(options)
    return is_unchanged


def require_no_module(options: argparse.Namespace) -> None:
    """Raises UsageError where options of a module of the user's are given, and CONFIG is none."""
    given = {f"--{name}": getattr(options, name) for name in ("data", "precision")}
    if faults := [
        f"{name} ({value}) is for a module of yours, as in module.py:MyModule; leave it out"
        for name, value in given.items()
        if value is not None
    ]:
        raise UsageError(faults)


def read_run(options: argparse.Namespace) -> PlanRequest[Run]:
    """The run that a configuration and the options ask for."""
    path = Path(options.config)
    try:
        if not options.config.strip():
            raise ValueError("CONFIG is empty; give a recipe's YAML file, a preset, or a Hugging Face config.json")
        if path.is_dir():
            request = _of_hugging_face(path, options)
        elif os.path.lexists(path) or path.suffix in (".yaml", ".yml", ".json"):
            data = read_table(path)
            is_model = "model_type" in data and "model" not in data
            request = _of_hugging_face(path, options) if is_model else _of_recipe(path, data, options)
        elif (fetched := Path(model_folder(options.config, CONFIG_FILES))).is_dir():
            request = _of_hugging_face(fetched, options)
        else:
            preset = preset_of(options.config)
            request = _bare(preset.model, preset.lengths, preset.global_batch_size, options)
        if options.decoder_sequence_length is not None and not isinstance(request.run.model, T5Config):
            raise ValueError(
                f"--decoder-sequence-length ({options.decoder_sequence_length}) is that of a T5, and the model is a "
                f"{kind_name(request.run.model)}; leave it out"
            )
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    return with_run_options(request, options)


def with_run_options(request: PlanRequest[R], options: argparse.Namespace) -> PlanRequest[R]:
    """The request for the run with what the options of `add_run_options` say of FP8 and of recomputation."""
    run = request.run
    if options.fp8 and run.fp8 is None:
        run = replace(run, fp8=Fp8Config())
    if options.recompute is not None:
        run = replace(run, recompute=RecomputeConfig(granularity=options.recompute))
    return replace(request, run=run)


def _bare(model: Model, lengths: SequenceLengths, batch: int, options: argparse.Namespace) -> PlanRequest[Run]:
    """The request for a model alone, trained with the package's fastest settings."""
    if faults := [
        f"{name} ({value}) is for a recipe's file, and {options.config} is none; leave it out"
        for name, value in (("--model", options.model), ("--model-kind", options.model_kind))
        if value is not None
    ]:
        raise ValueError("\n".join(faults))
    if absurd := model_limit_faults(model):
        raise ValueError("\n".join(absurd))
    lengths = replace(
        lengths,
        sequence=options.sequence_length or lengths.sequence,
        decoder_sequence=options.decoder_sequence_length or lengths.decoder_sequence,
    )
    # The length of a T5's answers is up to its fine-tuning.
    pretrained = replace(lengths, decoder_sequence=max(lengths.decoder_sequence, lengths.sequence))
    if faults := _sample_faults(model, pretrained):
        raise ValueError("\n".join(faults))
    if options.num_gpus is None:
        raise ValueError(f"{options.world_option} is needed: {options.config} does not say how many")
    run = Run(
        model=model,
        lengths=lengths,
        sizes=Sizes(world=options.num_gpus),
        global_batch_size=options.global_batch_size or batch,
        optimizer=OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
    )
    return PlanRequest(run=run, has_layout=False)


def _sample_faults(model: Model, lengths: SequenceLengths) -> list[str]:
    """Errors that keep samples of these lengths from being made with the data modules' defaults."""
    try:
        if isinstance(model, BertConfig):
            BertSampleConfig(sequence_length=lengths.sequence, class_token=0, separator_token=0, padding_token=0)
        elif isinstance(model, T5Config):
            SpanCorruption(
                sentinels=(2,),
                start_token=0,
                end_token=1,
                padding_token=0,
                encoder_length=lengths.sequence,
                decoder_length=lengths.decoder_sequence,
            )
        elif isinstance(model, LlavaConfig) and model.features_per_image >= lengths.sequence:
            length = model.features_per_image
            return [f"sequence_length ({lengths.sequence}) must be above the {length} tokens that an image takes"]
    except ValueError as error:
        text = str(error).replace("encoder_length", "sequence_length")
        return text.replace("decoder_length", "decoder_sequence_length").split("; ")
    return []


def _of_recipe(path: Path, data: Any, options: argparse.Namespace) -> PlanRequest[Run]:
    # A recipe's options are those of Lightning's Trainer among others, and importing it takes seconds.
    from lightning_megatron.cli.plan_recipe import run_of_recipe

    return run_of_recipe(path, data, options)


def _of_hugging_face(path: Path, options: argparse.Namespace) -> PlanRequest[Run]:
    model = model_of_folder(path)
    needed = {"--global-batch-size": options.global_batch_size, options.world_option: options.num_gpus}
    if missing := [name for name, value in needed.items() if value is None]:
        raise ValueError("\n".join(f"{name} is needed: {path} does not say how many" for name in missing))
    length = min(model.max_sequence_length, _USUAL_LENGTH)
    lengths = SequenceLengths(
        sequence=length,
        decoder_sequence=length if isinstance(model, T5Config) else 0,
        images=int(isinstance(model, LlavaConfig)),
    )
    return _bare(model, lengths, options.global_batch_size, options)
