"""The run that a recipe's YAML file describes, for plans; the recipe's own parser reads the file."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from torch import nn

from lightning_megatron.any_module.plan import ModelPlan
from lightning_megatron.cli.option_errors import settings_of
from lightning_megatron.cli.plan_dynamic import ONE_A_ROW
from lightning_megatron.cli.plan_file import KINDS, is_causal_recipe, model_of_folder
from lightning_megatron.cli.plan_request import PlanRequest, R
from lightning_megatron.cli.planned_optimizer import recipe_optimizer, step_fault
from lightning_megatron.cli.recipe_optimizer import OPTIMIZER
from lightning_megatron.cli.recipe_reader import (
    CAUSAL,
    FINETUNING,
    PRETRAINING,
    Recipe,
    data_config,
    made_settings,
    read_recipe,
    sample_errors,
)
from lightning_megatron.context.balance import DynamicContextConfig
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.hf.load import upcycling
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.lightning_modules.adamw import AdamWConfig
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import LlavaConfig, T5Config
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.registry import placement_of
from lightning_megatron.planner.model_parts import Model, SequenceLengths
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run, RunSettings, context_fields
from lightning_megatron.planner.trainable import Trainable
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.precision.kernels import KernelConfig
from lightning_megatron.rules.cross_config import Facts
from lightning_megatron.rules.cross_config import faults as rule_faults
from lightning_megatron.rules.limits import MOST, MOST_OF_A_KIND, limit_faults, model_limit_faults
from lightning_megatron.trainer import MegatronStrategy
from lightning_megatron.trainer.config import PipelineConfig
from lightning_megatron.trainer.setup.checks import dynamic_faults, uncut_faults
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

_MODULES = {"GPTModule": "gpt", "BertModule": "bert", "T5Module": "t5", "LlavaModule": "llava"}
# Short names of precisions that Lightning takes.
_SHORT_PRECISIONS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}
_TAKEN_FOR_GPT = "taken for a GPT: the file has no field of a BERT, T5 or LLaVA alone; --model-kind says another"
_TE_PRECISION = "transformer-engine"
# Of a number that is text.
_MOST_DIGITS = 20
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
# Of MegatronStrategy, each with the dataclass that it takes.
_SETTINGS: dict[str, type] = {
    "pipeline": PipelineConfig,
    "optimizer": OptimizerConfig,
    "recompute": RecomputeConfig,
    "context": ContextConfig,
    "dynamic_context": DynamicContextConfig,
    "fp8": Fp8Config,
    "kernels": KernelConfig,
    "plan": ModelPlan,
}


def run_of_recipe(path: Path, data: dict[str, Any], options: argparse.Namespace) -> PlanRequest[Run]:
    """The run that the file asks for. Raises ValueError with its errors, one a line."""
    _require_tables(data)
    errors: list[str] = []
    section = module_section(data)
    model, kind, kind_from = _model_of_folder(path, section, options, errors), "", "model.path"
    if model is None:
        kind, kind_from = kind_of(data, section, options.model_kind)
        recipe = PRETRAINING[kind]
    else:
        kind = next(name for name, known in KINDS.items() if type(model) is known)
        recipe = FINETUNING.get(kind, FINETUNING["gpt"])
    config = read_recipe(data | {"model": _known_options(data, section, recipe, options)}, recipe)
    model = _model_of_recipe(model, kind, config.model, errors)
    _check_settings(recipe, config.model, errors)
    if model is not None and (absurd := model_limit_faults(model)):
        raise ValueError("\n".join(absurd))
    trained = _trained_of(config.model, errors)
    if model is not None:
        errors += trained.faults(model)
    notes = () if kind_from else (_TAKEN_FOR_GPT,)

    def make(**settings: Any) -> Run:
        assert model is not None
        return Run(model=model, trained=trained, **settings)

    return _with_optimizer(_request(make, path, config, recipe, model, options, errors, notes), config, data)


def run_of_causal_recipe(
    path: Path, data: dict[str, Any], options: argparse.Namespace
) -> tuple[PlanRequest[RunSettings], dict[str, Any]]:
    """The run that a recipe asks for which trains a model of transformers as it is, by `CausalModule` or, where its
    type has no family, by fine-tuning; and the arguments of `CausalModule`. Errors as `run_of_recipe`."""
    _require_tables(data)
    errors: list[str] = []
    recipe = CAUSAL if is_causal_recipe(path) else FINETUNING["gpt"]
    section = module_section(data) | ({} if options.model is None else {"path": options.model})
    config = read_recipe(data | {"model": section}, recipe)
    _check_settings(recipe, config.model, errors)
    if config.model.get("upcycle"):
        errors.append("model.upcycle is for a model of this package's families; leave it out")
    if options.model_kind is not None:
        errors.append(f"--model-kind ({options.model_kind}) is for a recipe with a model.config; leave it out")
    arguments = {"path": config.model.path, "from_scratch": bool(config.model.get("from_scratch"))}
    arguments["lora"] = _trained_of(config.model, errors).lora
    request = _request(RunSettings, path, config, recipe, None, options, errors, ())
    return _with_optimizer(request, config, data), arguments


def _require_tables(data: Mapping[str, Any]) -> None:
    if bad := [name for name in ("trainer", "model", "data") if not isinstance(data.get(name) or {}, dict)]:
        raise ValueError("\n".join(f"{name} ({data[name]!r}) must be a table of options" for name in bad))


def _request(
    make: Callable[..., R],
    path: Path,
    config: Namespace,
    recipe: Recipe,
    model: Model | None,
    options: argparse.Namespace,
    errors: list[str],
    notes: tuple[str, ...],
) -> PlanRequest[R]:
    """The run that `make` makes of the settings in the file."""
    arguments = _strategy_arguments(config.trainer.strategy, errors)
    settings = _strategy_settings(arguments, errors)
    precision, settings["fp8"] = _precision_of(config.trainer.precision, settings["fp8"], errors)
    world = options.num_gpus or _num_gpus_of(config.trainer, errors)
    numbers = _counts_of(config, arguments or Namespace(), options, errors)
    if not world and not errors:
        errors.append(f"{options.world_option} is needed: {path} leaves trainer.devices to the machine")
    if errors:
        raise ValueError("\n".join(errors))
    fp8: Fp8Config | None = settings["fp8"]
    batch = numbers["data.global_batch_size"]
    lengths = _lengths_of(config, model, numbers["data.sequence_length"], options)
    if config.get("data") is not None and (errors := sample_errors(recipe, config.data, model, lengths, batch)):
        raise ValueError("\n".join(errors))
    pipeline, context, is_packed = settings["pipeline"], settings["context"], _is_packed(config)
    sizes = Sizes(
        world=world,
        **{short: numbers[name] for name, short in _SIZES.items()},
        **context_fields(context, numbers["context_parallel_size"]),
        sequence_parallel=bool(arguments and arguments.get("sequence_parallel")),
        placement=placement_of(pipeline.schedule) if pipeline.schedule != "auto" else "loop",
        stage_layout=pipeline.layout,
    )
    num_microbatches, microbatch_size = numbers["num_microbatches"], numbers["microbatch_size"]
    data_parallel_size = 0 if sizes.faults() else sizes.dp
    run = make(
        lengths=lengths,
        sizes=sizes,
        global_batch_size=batch,
        num_accumulated=numbers["trainer.accumulate_grad_batches"],
        micro_batch_size=microbatch_size or max(batch // max(data_parallel_size * num_microbatches, 1), 1),
        cuts_by_rows=bool(microbatch_size),
        precision=precision,
        fp8=fp8 if fp8 is not None and fp8.is_float8 else None,
        recompute=settings["recompute"],
        optimizer=settings["optimizer"],
        schedule_name=None if pipeline.schedule == "auto" else pipeline.schedule,
        group_size=pipeline.microbatch_group_size,
        is_overlapped=pipeline.overlap_expert_exchange,
        # One stage has one microbatch then.
        is_collective=pipeline.mode == "collective" and sizes.pp > 1,
        context=context,
        kernels=settings["kernels"],
    )
    # A run checks the configured numbers, whether they cut a batch or not.
    cut = Facts(
        sizes=sizes,
        num_microbatches=numbers["num_microbatches"],
        microbatch_size=numbers["microbatch_size"],
        global_batch_size=batch,
    )
    faults = [fault for fault in rule_faults(cut) if fault not in sizes.faults()]
    faults += uncut_faults(sizes, num_microbatches, microbatch_size, pipeline)
    if settings["dynamic_context"] is not None:
        faults += dynamic_faults(pipeline)
    return PlanRequest(
        run=run,
        has_layout=arguments is not None,
        faults=tuple(faults),
        notes=(*notes, *([ONE_A_ROW] if is_packed else [])),
        unplanned=_unplanned(settings["kernels"]),
        dynamic=settings["dynamic_context"],
        plan=settings["plan"],
        cut=cut,
    )


def module_section(data: dict[str, Any]) -> dict[str, Any]:
    """The options of the module, which are under init_args where the file names its class."""
    section = data.get("model") or {}
    if "class_path" in section:
        section = section.get("init_args") or {}
    return section if isinstance(section, dict) else {}


def _known_options(
    data: dict[str, Any], section: dict[str, Any], recipe: Recipe, options: argparse.Namespace
) -> dict[str, Any]:
    """The options of the module that the recipe's parser reads: of a user's own class those that ours has too."""
    name = str((data.get("model") or {}).get("class_path") or "").rpartition(".")[2]
    if name and name != recipe.module.__name__:
        section = {option: value for option, value in section.items() if option in signature(recipe.module).parameters}
    if not isinstance(section.get("config"), dict) and options.model is not None:
        return section | {"path": options.model}
    return section


def _model_of_folder(
    path: Path, section: Mapping[str, Any], options: argparse.Namespace, errors: list[str]
) -> Model | None:
    """The model of a recipe that starts from a folder; None for one with a model.config."""
    if section.get("config") is not None:
        if options.model is not None:
            errors.append(f"--model ({options.model}) is for a recipe without a model.config; leave it out")
        return None
    if options.model is None and not isinstance(section.get("path"), str):
        raise ValueError(
            f"{path} has no model.config and no model.path; give a recipe's file, a preset, or a Hugging Face "
            "config.json"
        )
    if options.model_kind is not None:
        errors.append(f"--model-kind ({options.model_kind}) is for a recipe with a model.config; leave it out")
    name = options.model or section["path"]
    if name in PRESETS:
        return PRESETS[name].model
    folder = Path(model_folder(name, CONFIG_FILES))
    if folder.exists():
        return model_of_folder(folder)
    raise ValueError(
        f"model.path ({name}) is no folder here; give the model by --model: a folder, its config.json, or a preset "
        f"({', '.join(PRESETS)})"
    )


def kind_of(data: dict[str, Any], section: Mapping[str, Any], option: str | None) -> tuple[str, str]:
    """The kind of model that a file with a model.config describes, and the option that shows it; "" for a plain GPT."""
    if option is not None:
        return option, "--model-kind"
    name = str((data.get("model") or {}).get("class_path") or "").rpartition(".")[2]
    if name in _MODULES:
        return _MODULES[name], f"model.class_path ({name})"
    for kind in ("llava", "t5", "bert"):
        for where, table, of in (
            ("model.config", _with_placement(section.get("config")), {k: _settings_of(KINDS[k]) for k in KINDS}),
            ("data", data.get("data"), {k: set(signature(data_config(PRETRAINING[k].data)).parameters) for k in KINDS}),
        ):
            others = set().union(*(names for known, names in of.items() if known != kind))
            if own := [name for name in table or () if name in of[kind] - others]:
                return kind, f"{where}.{own[0]}"
    return "gpt", ""


def _settings_of(kind: type[Model]) -> set[str]:
    """Names of the settings of a kind of model, and the places of norms that it knows."""
    return {field.name for field in fields(kind)} | {f"norm_placement: {place}" for place in kind.norm_placements}


def _with_placement(config: Any) -> Any:
    """A table of settings, of which the place of norms is one by its value too."""
    if not isinstance(config, dict) or "norm_placement" not in config:
        return config
    return {**config, f"norm_placement: {config['norm_placement']}": None}


def _model_of_recipe(known: Model | None, kind: str, module: Namespace, errors: list[str]) -> Model | None:
    """The model of a folder, as the recipe changes it, or that of its model.config."""
    if known is None:
        model: Model | None = made_settings(KINDS[kind], module.config, "model.config", errors)
        return model
    moe = made_settings(MoEConfig, module.upcycle, "model.upcycle", errors) if module.get("upcycle") else None
    return known if moe is None else upcycling(known, moe).config


def _check_settings(recipe: Recipe, module: Namespace, errors: list[str]) -> None:
    """Adds the errors of the module's settings that a plan does not read, such as the rates of its optimizer."""
    for name, parameter in signature(recipe.module, eval_str=True).parameters.items():
        given = module.get(name)
        if name == "config" or given is None or not is_dataclass(parameter.annotation):
            continue
        if isinstance(given, (Namespace, Mapping)):
            made_settings(parameter.annotation, given, f"model.{name}", errors)
        else:
            errors.append(f"model.{name} ({given!r}) must be a table of options")


def _strategy_arguments(strategy: Any, errors: list[str]) -> Namespace | None:
    """The options of MegatronStrategy; None where the file leaves the strategy to Lightning."""
    if strategy in (None, "auto"):
        return None
    if strategy == "megatron":
        return Namespace()
    given = strategy.class_path if isinstance(strategy, Namespace) else strategy
    if given.rpartition(".")[2] == MegatronStrategy.__name__:
        arguments: Namespace = strategy.get("init_args") or Namespace()
        return arguments
    errors.append(
        f"trainer.strategy ({given!r}) must be MegatronStrategy to be planned; give class_path: "
        "lightning_megatron.MegatronStrategy, or leave the strategy out and write a --layout"
    )
    return None


def _strategy_settings(arguments: Namespace | None, errors: list[str]) -> dict[str, Any]:
    """The dataclasses that MegatronStrategy takes, by its options; defaults where a recipe gives none."""
    made = {}
    for name, settings in _SETTINGS.items():
        given = None if arguments is None else arguments.get(name)
        if given is not None:
            made[name] = made_settings(settings, given, name, errors)
        else:
            made[name] = None if name in ("dynamic_context", "fp8", "plan") else settings()
    return made


def _precision_of(value: Any, fp8: Fp8Config | None, errors: list[str]) -> tuple[str, Fp8Config | None]:
    """The full name of the Trainer's precision, and how linears multiply in FP8, where they do."""
    name = "32-true" if value is None else _SHORT_PRECISIONS.get(str(value), str(value))
    if name != _TE_PRECISION:
        return name, fp8
    if fp8 is not None:
        errors.append(
            "FP8 is asked for twice, by precision 'transformer-engine' and by the strategy's fp8; leave one of them out"
        )
    return "bf16-true", Fp8Config(engine="transformer_engine", scaling="delayed")


def _trained_of(module: Namespace, errors: list[str]) -> Trainable:
    """The trained weights: all, unless the module freezes components or trains LoRA adapters."""
    lora = module.get("lora")
    config = None if lora is None else made_settings(LoraConfig, lora, "model.lora", errors)
    return Trainable(frozen=tuple(module.get("frozen") or ()), lora=config)


def _num_gpus_of(trainer: Namespace, errors: list[str]) -> int:
    """GPUs of all nodes; 0 where it is left to the machine."""
    devices, nodes = trainer.devices, trainer.num_nodes
    if isinstance(devices, str) and "," in devices:
        devices = devices.strip(",").split(",")
    if isinstance(devices, list):
        devices = len(devices)
    elif isinstance(devices, str) and devices.isdecimal() and len(devices) < _MOST_DIGITS:
        devices = int(devices)
    if devices in ("auto", "-1", -1):
        devices = 0
    elif not _is_count(devices):
        errors.append(f"trainer.devices ({devices!r}) must be a number of at least 1, a list of devices, or auto")
        devices = 0
    if not _is_count(nodes):
        errors.append(f"trainer.num_nodes ({nodes!r}) must be a number of at least 1")
        nodes = 1
    errors += limit_faults({"trainer.devices": int(devices), "trainer.num_nodes": int(nodes)}, MOST_OF_A_KIND)
    return int(devices) * int(nodes)


def _counts_of(
    config: Namespace, arguments: Namespace, options: argparse.Namespace, errors: list[str]
) -> dict[str, Any]:
    """Sizes, batches and lengths, by their names in the file."""
    data = config.get("data") or Namespace()
    numbers = {name: arguments.get(name, 1) for name in (*_SIZES, "num_microbatches")}
    numbers["trainer.accumulate_grad_batches"] = config.trainer.accumulate_grad_batches
    for name in ("global_batch_size", "sequence_length"):
        numbers[f"data.{name}"] = getattr(options, name) or data.get(name)
    # 0 leaves it to the number of microbatches.
    microbatch_size = arguments.get("microbatch_size", 0)
    checked = numbers | {"microbatch_size": microbatch_size or 1}
    errors += [
        f"{name} ({value!r}) must be a number of at least 1" for name, value in checked.items() if not _is_count(value)
    ]
    counts = {name: value for name, value in checked.items() if _is_count(value)}
    errors += limit_faults({name: value for name, value in counts.items() if name in _SIZES}, MOST_OF_A_KIND)
    errors += limit_faults({name: value for name, value in counts.items() if name not in _SIZES}, MOST)
    return numbers | {"microbatch_size": microbatch_size}


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _lengths_of(config: Namespace, model: Model | None, length: int, options: argparse.Namespace) -> SequenceLengths:
    decoder = options.decoder_sequence_length or (config.get("data") or Namespace()).get("decoder_sequence_length")
    if isinstance(model, T5Config) and not decoder:
        decoder = model.max_decoder_sequence_length
    return SequenceLengths(
        sequence=length,
        decoder_sequence=decoder or 0,
        images=int(isinstance(model, LlavaConfig)),
        # Batches of a T5 have the ends of its texts, however many a row holds.
        are_packed=_is_packed(config) or isinstance(model, T5Config),
    )


def _is_packed(config: Namespace) -> bool:
    """Whether rows hold documents that do not attend to each other."""
    data = config.get("data") or Namespace()
    return data.get("packing") == "documents" or bool(data.get("separates_documents"))


def _with_optimizer(request: PlanRequest[R], config: Namespace, data: Mapping[str, Any]) -> PlanRequest[R]:
    """The request for the run with the recipe's optimizer, or with one that does not run here among what is not
    planned."""
    chosen = data.get(OPTIMIZER)
    settings = (config.get("model") or Namespace()).get("optimizer") or AdamWConfig()
    make = recipe_optimizer(settings_of(AdamWConfig, settings), chosen)
    if fault := step_fault(make, nn.Linear(2, 2, device="meta")):
        name = chosen.get("class_path") if isinstance(chosen, Mapping) else chosen
        does = f"does not step tensors without numbers ({fault}): its states count as AdamW's"
        return replace(request, unplanned={**request.unplanned, f"optimizer ({name})": does})
    return replace(request, run=replace(request.run, make_optimizer=make))


def _unplanned(kernels: KernelConfig) -> dict[str, str]:
    """Options of the strategy that change memory or time and are not planned, and what each does."""
    found = {}
    if kernels.compile_layers:
        found["kernels compile_layers (True)"] = (
            "makes neighbouring operations one kernel, which saves fewer activations"
        )
    if kernels.symmetric_memory:
        found["kernels symmetric_memory (True)"] = "holds buffers that ranks read of each other"
    return found
