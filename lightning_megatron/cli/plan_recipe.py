"""The run that a recipe's YAML file describes, read without the packages that run recipes."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_megatron.cli.plain import made_of
from lightning_megatron.cli.plan_dynamic import ONE_A_ROW
from lightning_megatron.cli.plan_file import KINDS, model_of_folder
from lightning_megatron.cli.plan_request import PlanRequest
from lightning_megatron.cli.recipe_file import (
    at,
    is_count,
    is_packed,
    kind_of,
    module_of,
    num_gpus_of,
    precision_of,
    trained_of,
)
from lightning_megatron.cli.recipe_options import option_faults, sample_faults, strategy_faults, strategy_of
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.hf.load import upcycling
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import LlavaConfig, T5Config
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, context_fields
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.rules.cross_config import Facts
from lightning_megatron.rules.cross_config import faults as rule_faults
from lightning_megatron.rules.limits import MOST, MOST_OF_A_KIND, limit_faults, model_limit_faults
from lightning_megatron.trainer.config import PipelineConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
# Options that are read, and told of, here.
_READ_OF_STRATEGY = (
    *_SIZES,
    *("num_microbatches", "microbatch_size", "pipeline", "optimizer", "recompute", "context", "dynamic_context", "fp8"),
)
_READ = {
    "trainer": ("strategy", "precision", "devices", "num_nodes", "accumulate_grad_batches"),
    "model": ("config", "frozen", "lora", "upcycle"),
    "data": ("global_batch_size", "sequence_length"),
}


def run_of_recipe(path: Path, data: dict[str, Any], options: argparse.Namespace) -> PlanRequest:
    """What the file asks for. Raises ValueError with all of its faults, one a line."""
    faults: list[str] = []
    tables = {name: data[name] for name in ("trainer", "model", "data") if data.get(name) is not None}
    if bad := [name for name, table in tables.items() if not isinstance(table, dict)]:
        raise ValueError("\n".join(f"{name} ({tables[name]!r}) must be a table of options" for name in bad))
    model, kind_from = _model_of_recipe(path, data, options, faults)
    kind, is_tuned = _kind(model, data, options), _is_tuned(data)
    faults += option_faults(data, kind, is_tuned=is_tuned, read=_READ)
    if model is not None and (absurd := model_limit_faults(model)):
        raise ValueError("\n".join(absurd))
    trainer = data.get("trainer") or {}
    own = strategy_of(trainer, faults)
    arguments = own or {}
    faults += strategy_faults(arguments, _READ_OF_STRATEGY)
    pipeline = made_of(PipelineConfig, arguments.get("pipeline") or {}, "pipeline", faults)
    optimizer = made_of(OptimizerConfig, arguments.get("optimizer") or {}, "optimizer", faults)
    recompute = made_of(RecomputeConfig, arguments.get("recompute") or {}, "recompute", faults)
    context = made_of(ContextConfig, arguments.get("context") or {}, "context", faults)
    dynamic = None
    if arguments.get("dynamic_context"):
        dynamic = made_of(DynamicContextConfig, arguments["dynamic_context"], "dynamic_context", faults)
    fp8 = made_of(Fp8Config, arguments["fp8"], "fp8", faults) if arguments.get("fp8") else None
    precision, fp8 = precision_of(trainer, fp8, faults)
    trained = trained_of(data, faults)
    if model is not None:
        faults += trained.faults(model)
    world = options.num_gpus or num_gpus_of(trainer, faults)
    numbers = _counts_of(data, arguments, options, faults)
    if not world and not faults:
        faults.append(f"{options.world_option} is needed: {path} leaves trainer.devices to the machine")
    if faults:
        raise ValueError("\n".join(faults))
    assert model is not None and pipeline is not None and optimizer is not None and recompute is not None
    assert context is not None
    batch, length = numbers["data.global_batch_size"], numbers["data.sequence_length"]
    lengths = _texts_of(data, model, length, options)
    if faults := sample_faults(data.get("data") or {}, model, kind, lengths, batch, is_tuned=is_tuned):
        raise ValueError("\n".join(faults))
    sizes = Sizes(
        world=world,
        **{short: numbers[name] for name, short in _SIZES.items()},
        **context_fields(context, numbers["context_parallel_size"]),
        sequence_parallel=arguments.get("sequence_parallel", False),
        placement=placement_of(pipeline.schedule) if pipeline.schedule != "auto" else "loop",
        stage_layout=pipeline.layout,
    )
    num_microbatches, rows = numbers["num_microbatches"], arguments.get("microbatch_size", 0)
    replicas = 0 if sizes.faults() else sizes.dp
    run = Run(
        model=model,
        lengths=lengths,
        sizes=sizes,
        global_batch_size=batch,
        num_accumulated=numbers["trainer.accumulate_grad_batches"],
        micro_batch_size=rows or max(batch // max(replicas * num_microbatches, 1), 1),
        cuts_by_rows=bool(rows),
        precision=precision,
        fp8=fp8,
        recompute=recompute,
        optimizer=optimizer,
        schedule_name=None if pipeline.schedule == "auto" else pipeline.schedule,
        group_size=pipeline.microbatch_group_size,
        is_overlapped=pipeline.overlap_expert_exchange,
        context=context,
        trained=trained,
    )
    cut = Facts(sizes=sizes, num_microbatches=num_microbatches, microbatch_size=rows, global_batch_size=batch)
    return PlanRequest(
        run=run,
        has_layout=own is not None,
        faults=tuple(fault for fault in rule_faults(cut) if fault not in sizes.faults()),
        notes=(*_notes_on_kind(kind_from), *([ONE_A_ROW] if is_packed(data) else [])),
        unplanned=_unplanned(pipeline),
        dynamic=dynamic,
        cut=cut,
    )


def _texts_of(data: dict[str, Any], model: Model, length: int, options: argparse.Namespace) -> SequenceLengths:
    decoder = options.decoder_sequence_length or at(data, "data", "decoder_sequence_length")
    if isinstance(model, T5Config) and not decoder:
        decoder = model.max_decoder_sequence_length
    return SequenceLengths(
        sequence=length,
        decoder_sequence=decoder or 0,
        images=int(isinstance(model, LlavaConfig)),
        # Batches of a T5 say where its texts end, however many a row holds.
        are_packed=is_packed(data) or isinstance(model, T5Config),
    )


def _counts_of(
    data: dict[str, Any], arguments: Mapping[str, Any], options: argparse.Namespace, faults: list[str]
) -> dict[str, Any]:
    """Sizes, batches and lengths, by their names in the file."""
    numbers = {name: arguments.get(name, 1) for name in (*_SIZES, "num_microbatches")}
    # 0 leaves it to the number of microbatches.
    numbers["microbatch_size"] = arguments.get("microbatch_size", 0) or 1
    numbers["trainer.accumulate_grad_batches"] = (at(data, "trainer") or {}).get("accumulate_grad_batches", 1)
    for name in ("global_batch_size", "sequence_length"):
        numbers[f"data.{name}"] = getattr(options, name) or at(data, "data", name)
    faults += [
        f"{name} ({value!r}) must be a number of at least 1" for name, value in numbers.items() if not is_count(value)
    ]
    counts = {name: value for name, value in numbers.items() if is_count(value)}
    sizes = {name: value for name, value in counts.items() if name in _SIZES}
    faults += limit_faults(sizes, MOST_OF_A_KIND) + limit_faults(
        {name: value for name, value in counts.items() if name not in sizes}, MOST
    )
    return numbers


def _model_of_recipe(
    path: Path, data: dict[str, Any], options: argparse.Namespace, faults: list[str]
) -> tuple[Model | None, str]:
    """The model, and what says of which kind it is; empty where nothing does."""
    section = module_of(data)
    config, folder, upcycle = section.get("config"), section.get("path"), section.get("upcycle")
    if isinstance(config, dict):
        if options.model is not None:
            faults.append(f"--model ({options.model}) is for a recipe without a model.config; leave it out")
        kind, kind_from = kind_of(data, options.model_kind)
        return made_of(KINDS[kind], config, "model.config", faults), kind_from
    if options.model is None and not isinstance(folder, str):
        raise ValueError(
            f"{path} has no model.config and no model.path; give a recipe's file, a preset, or a Hugging Face "
            "config.json"
        )
    if options.model_kind is not None:
        faults.append(f"--model-kind ({options.model_kind}) is for a recipe with a model.config; leave it out")
    name = options.model or str(folder)
    if name in PRESETS:
        model = PRESETS[name].model
    elif Path(name).exists():
        model = model_of_folder(Path(name))
    else:
        raise ValueError(
            f"model.path ({name}) is no folder here; give the model by --model: a folder, its config.json, or a preset "
            f"({', '.join(PRESETS)})"
        )
    if upcycle is not None:
        moe = made_of(MoEConfig, upcycle, "model.upcycle", faults)
        model = model if moe is None else upcycling(model, moe).config
    return model, "model.path"


def _is_tuned(data: dict[str, Any]) -> bool:
    """Whether the recipe starts from a folder, and not from a model.config."""
    return not isinstance(module_of(data).get("config"), dict)


def _kind(model: Model | None, data: dict[str, Any], options: argparse.Namespace) -> str:
    """Of the model that is planned, where it could be read, by the names of `--model-kind`."""
    known = [name for name, kind in KINDS.items() if type(model) is kind]
    return known[0] if known else kind_of(data, options.model_kind)[0]


def _notes_on_kind(kind_from: str) -> list[str]:
    if kind_from:
        return []
    return ["taken for a GPT: the file has no field of a BERT, T5 or LLaVA alone; --model-kind says another"]


def _unplanned(pipeline: PipelineConfig) -> dict[str, str]:
    """What of a strategy changes memory or time and is not planned, and what it does."""
    return (
        {"pipeline mode 'collective'": "keeps the activations of all microbatches"}
        if pipeline.mode == "collective"
        else {}
    )
