"""`lightning-megatron plan`: which layouts of a model fit on so many GPUs, how fast each is, and why others do not.

Nothing is built and nothing runs: a model of a trillion parameters on 3,072 GPUs is planned on a laptop.
"""

import argparse
import inspect
import json
import math
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.cli.plain import made_of
from lightning_megatron.cli.recipe_file import (
    KINDS,
    at,
    is_count,
    kind_of,
    module_of,
    num_gpus_of,
    precision_of,
    trained_of,
)
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.hf.families import family_of_file
from lightning_megatron.hf.folder import read_config
from lightning_megatron.hf.load import upcycling
from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.models import LlavaConfig, T5Config
from lightning_megatron.moe.config import MoEConfig
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.choice import placement_of
from lightning_megatron.planner.anatomy import Model, Texts
from lightning_megatron.planner.estimate import Estimate, estimate
from lightning_megatron.planner.hardware import GIGA, Gpu, gpu_of
from lightning_megatron.planner.picture import write_plan
from lightning_megatron.planner.presets import PRESETS, preset_of
from lightning_megatron.planner.report import (
    Shown,
    estimate_text,
    found_text,
    kind_name,
    layout_text,
    model_record,
    model_text,
    record_of,
    rejected_record,
)
from lightning_megatron.planner.rules import Facts
from lightning_megatron.planner.rules import faults as rule_faults
from lightning_megatron.planner.run import Run, context_fields, faults_of
from lightning_megatron.planner.search import Found, fewest_gpus, search
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.trainer import MegatronStrategy
from lightning_megatron.trainer.config import PipelineConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

_EPILOG = f"""\
CONFIG is a recipe's YAML file, a preset ({", ".join(PRESETS)}), or a Hugging Face config.json,
of any name, or its folder.

example:  lightning-megatron plan llama3_70b --gpu h100 --num-gpus 64
          lightning-megatron plan recipes/configs/gpt_1t.yaml --gpu a100-80gb --layout recipe --tokens 450e9
"""
# Of --layout, and which field of a run each sets.
_KEYS = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "recompute", "stages")
_WORDS = {"recompute": ("none", "selective", "full"), "stages": ("layers", "cost", "recipe")}
_USUAL_LENGTH = 8192


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a configuration says."""

    run: Run
    has_layout: bool
    # and not the model alone
    faults: tuple[str, ...] = ()
    # of that layout, beyond those of the run
    notes: tuple[str, ...] = ()
    # on how it was read


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "plan",
        help="which layouts fit on so many GPUs, and how fast each would be",
        description="Predicts memory and step time of every layout of a model on so many GPUs, the fastest that fits "
        "first, without building anything.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_options(parser)
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--gpu", required=True, metavar="NAME", help="a known GPU, or a YAML file that describes one")
    machine.add_argument("--num-gpus", type=int, metavar="NUMBER", help="GPUs in all (default: those of the recipe)")
    machine.add_argument("--memory-gb", type=float, metavar="GB", help="memory of one (default: that of the GPU)")
    run = parser.add_argument_group("the run")
    run.add_argument("--global-batch-size", type=int, metavar="SAMPLES", help="of a batch (default: the recipe's)")
    run.add_argument("--sequence-length", type=int, metavar="TOKENS", help="of a sample (default: the recipe's)")
    run.add_argument("--decoder-sequence-length", type=int, metavar="TOKENS", help="of a T5's answers")
    run.add_argument("--fp8", action="store_true", help="linears of layers multiply in FP8")
    run.add_argument("--recompute", choices=("none", "selective", "full"), help="(default: full where it must be)")
    run.add_argument("--layout", metavar="SIZES", help="explain one layout, as in tp=8,pp=64,mbs=1; recipe: its own")
    run.add_argument("--tokens", type=float, default=0.0, metavar="NUMBER", help="tell the days to train on so many")
    output = parser.add_argument_group("the output")
    output.add_argument("--top", type=int, default=10, metavar="NUMBER", help="layouts that are shown (default: 10)")
    output.add_argument("--json", action="store_true", help="print everything as JSON")
    output.add_argument("--out", type=Path, metavar="FILE.svg", help="write a picture of the layout, or of the best")
    parser.set_defaults(run=run_plan)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `read_run` takes the model from."""
    parser.add_argument("config", metavar="CONFIG", help="a recipe's YAML, a preset, or a Hugging Face config.json")
    parser.add_argument(
        "--model", metavar="MODEL", help="of a recipe that starts from a folder: another folder, config.json, or preset"
    )
    parser.add_argument("--model-kind", choices=tuple(KINDS), help="of a recipe (default: by its class or its fields)")


def run_plan(options: argparse.Namespace) -> None:
    """Prints the plan. Raises UsageError with what is wrong with the options, and where nothing fits."""
    gpu = _gpu_of(options)
    if counts := [
        f"--{name.replace('_', '-')} ({value}) must be at least 1"
        for name in ("num_gpus", "global_batch_size", "sequence_length", "decoder_sequence_length", "top")
        if (value := getattr(options, name)) is not None and value < 1
    ]:
        raise UsageError(counts)
    if bad := [
        f"--{name} ({value}) must be a number above 0"
        for name, value in (("tokens", options.tokens or None), ("memory-gb", options.memory_gb))
        if value is not None and not (math.isfinite(value) and value > 0)
    ]:
        raise UsageError(bad)
    asked = read_run(options)
    if options.out is not None and (options.out.suffix != ".svg" or not options.out.parent.is_dir()):
        raise UsageError([f"--out ({options.out}) must be a file.svg in a folder that is there"])
    if options.layout is not None:
        _explain(options, asked, gpu)
    else:
        _search(options, asked, gpu)


def _explain(options: argparse.Namespace, asked: Asked, gpu: Gpu) -> None:
    run = asked.run
    if options.layout == "recipe":
        if not asked.has_layout:
            raise UsageError(
                [f"--layout recipe: {options.config} has no layout of its own; write one, as in tp=8,pp=4"]
            )
        faults = faults_of(run)
        if not any(fault.startswith("global_batch_size") for fault in faults):
            faults += asked.faults
    else:
        run = with_layout(run, options.layout)
        faults = faults_of(run)
    if faults:
        raise UsageError(faults)
    found = estimate(run, gpu)
    if options.out is not None:
        _write(found, options.out)
    if options.json:
        print(json.dumps(record_of(found, num_tokens=options.tokens) | {"notes": asked.notes}))
    else:
        print("\n".join([model_text(run), *asked.notes, "", estimate_text(found, num_tokens=options.tokens)]))


def _search(options: argparse.Namespace, asked: Asked, gpu: Gpu) -> None:
    run, is_free = asked.run, options.recompute is None
    found = search(run, gpu, memory_bytes=gpu.memory_bytes, free_recompute=is_free)
    if not found.fitting:
        raise UsageError([_nothing_fits(run, gpu, found, is_free)])
    shown = _distinct(found, gpu, options.top)
    best = shown[0].estimate
    if options.out is not None:
        _write(best, options.out)
    if options.json:
        record = model_record(run) | {
            "layouts": [record_of(one.estimate, num_tokens=options.tokens) | {"alike": one.alike} for one in shown],
            "num_fitting": len(found.fitting),
            "fell_out": found.reasons(),
            "rejected": [rejected_record(one) for one in found.rejected],
            "notes": asked.notes,
        }
        print(json.dumps(record))
    else:
        text = found_text(found, gpu.name, shown)
        print("\n".join([model_text(run), *asked.notes, "", text, "", estimate_text(best, num_tokens=options.tokens)]))


def _distinct(found: Found, gpu: Gpu, num_shown: int) -> list[Shown]:
    """The fastest layouts; of those whose times print alike the one that needs the least memory."""
    shown: list[Shown] = []
    for _, alike in groupby(zip(found.seconds, found.fitting, strict=True), key=lambda pair: f"{pair[0]:.4g}"):
        if len(shown) == num_shown:
            break
        estimates = sorted((estimate(run, gpu) for _, run in alike), key=lambda one: one.peak_bytes)
        shown.append(Shown(estimate=estimates[0], alike=tuple(layout_text(one.run) for one in estimates[1:])))
    return shown


def _write(found: Estimate, path: Path) -> None:
    try:
        write_plan(found, path)
    except OSError as error:
        raise UsageError([f"--out ({path}) cannot be written: {error.strerror or error}"]) from error


def _nothing_fits(run: Run, gpu: Gpu, found: Found, free_recompute: bool) -> str:
    world, batch = run.sizes.world, run.global_batch_size
    if not found.rejected:
        fits = [number for number in range(max(batch, 1), 2 * max(batch, 1) + world) if number % world == 0][:1]
        return (
            f"no number of replicas that {world} GPUs allow divides global_batch_size ({batch}); give "
            f"--global-batch-size {fits[0] if fits else world}, or another --num-gpus"
        )
    least = found.least()
    if least is None:
        return f"no layout on {world} GPUs can run: {found.rejected[0].why}"
    more = fewest_gpus(run, gpu, memory_bytes=gpu.memory_bytes, free_recompute=free_recompute)
    ways = f"{least.needed_bytes / GIGA:.1f} GB a GPU would do" + (f", or {more} GPUs of this kind" if more else "")
    return f"no layout on {world} x {gpu.name} fits in {gpu.memory_gb:g} GB; {ways}"


def _gpu_of(options: argparse.Namespace) -> Gpu:
    try:
        gpu = gpu_of(options.gpu)
        return gpu if options.memory_gb is None else replace(gpu, memory_gb=options.memory_gb)
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error


def with_layout(run: Run, text: str) -> Run:
    values: dict[str, str] = {}
    faults = []
    for part in (part.strip() for part in text.split(",")):
        key, _, value = part.partition("=")
        if key not in _KEYS or not value or (key not in _WORDS and not value.isdecimal()):
            faults.append(f"--layout part {part!r} must be one of {', '.join(_KEYS)}, = and a number, as in tp=8,pp=4")
        elif value not in _WORDS.get(key, (value,)):
            faults.append(f"--layout {key} ({value!r}) must be one of {', '.join(_WORDS[key])}")
        if key in values:
            faults.append(f"--layout names {key} twice; leave one of them out")
        values[key] = value
    if faults:
        raise UsageError(faults)
    sizes: dict[str, Any] = {key: int(values.get(key, 1)) for key in ("tp", "pp", "vp", "cp", "ep", "etp")}
    stages = values.get("stages", "layers")
    own = Sizes(
        world=run.sizes.world,
        **sizes,
        **context_fields(run.context, sizes["cp"]),
        sequence_parallel=sizes["tp"] > 1,
        stage_layout=run.sizes.stage_layout if stages == "recipe" else StageLayout(balance=stages),  # type: ignore[arg-type]
    )
    recompute = RecomputeConfig(granularity=values["recompute"]) if "recompute" in values else run.recompute  # type: ignore[arg-type]
    return replace(
        run,
        sizes=own,
        micro_batch_size=int(values.get("mbs", 1)),
        recompute=recompute,
        schedule_name=None,
        group_size=0,
    )


def read_run(options: argparse.Namespace) -> Asked:
    """The run that a configuration and the options ask for."""
    path = Path(options.config)
    try:
        if path.is_dir():
            asked = _of_hugging_face(path, options)
        elif path.is_file() or path.suffix in (".yaml", ".yml", ".json"):
            data = _table_of(path)
            is_model = "model_type" in data and "model" not in data
            asked = _of_hugging_face(path, options) if is_model else _of_recipe(path, data, options)
        else:
            preset = preset_of(options.config)
            asked = _bare(preset.model, preset.texts, preset.global_batch_size, options)
        if options.decoder_sequence_length is not None and not isinstance(asked.run.model, T5Config):
            raise ValueError(
                f"--decoder-sequence-length ({options.decoder_sequence_length}) is that of a T5, and the model is a "
                f"{kind_name(asked.run.model)}; leave it out"
            )
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    run = asked.run
    if options.fp8 and run.fp8 is None:
        run = replace(run, fp8=Fp8Config())
    if options.recompute is not None:
        run = replace(run, recompute=RecomputeConfig(granularity=options.recompute))
    if run.fp8 is not None and options.gpu and not _gpu_of(options).fp8_tflops:
        raise UsageError([f"GPU {options.gpu!r} has no units for FP8; leave FP8 out, or plan for another"])
    slow = ["times are those of products in 16 bits: in 32-true they are several times longer"]
    return replace(asked, run=run, notes=(*asked.notes, *(slow if run.precision == "32-true" else [])))


def _bare(model: Model, texts: Texts, batch: int, options: argparse.Namespace) -> Asked:
    """A model alone: how it is trained is what the package does best."""
    if strange := [name for name in ("model", "model_kind") if getattr(options, name) is not None]:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in strange)
        raise ValueError(f"{names} is for a recipe's file, and {options.config} is none; leave it out")
    texts = replace(
        texts,
        sequence=options.sequence_length or texts.sequence,
        decoder_sequence=options.decoder_sequence_length or texts.decoder_sequence,
    )
    if options.num_gpus is None:
        raise ValueError(f"--num-gpus is needed: {options.config} does not say how many")
    run = Run(
        model=model,
        texts=texts,
        sizes=Sizes(world=options.num_gpus),
        global_batch_size=options.global_batch_size or batch,
        optimizer=OptimizerConfig(kind="distributed", overlap_grad_reduce=True, overlap_param_gather=True),
    )
    return Asked(run=run, has_layout=False)


def _of_hugging_face(path: Path, options: argparse.Namespace) -> Asked:
    model = _model_of_folder(path)
    if options.global_batch_size is None:
        raise ValueError(f"--global-batch-size is needed: {path} does not say it")
    length = min(model.max_sequence_length, _USUAL_LENGTH)
    texts = Texts(
        sequence=length,
        decoder_sequence=length if isinstance(model, T5Config) else 0,
        images=int(isinstance(model, LlavaConfig)),
    )
    return _bare(model, texts, options.global_batch_size, options)


def _model_of_folder(path: Path) -> Model:
    """The model of a folder's config.json, or of such a file, whatever its name."""
    raw = read_config(path) if path.is_dir() else _table_of(path)
    where = path / "config.json" if path.is_dir() else path
    return family_of_file(raw, str(where)).config(raw)


def _table_of(path: Path) -> dict[str, Any]:
    """What a file of YAML or JSON holds."""
    try:
        text = path.read_text(encoding="utf-8")
        # YAML's own reader takes seconds for a long JSON.
        data = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is no YAML and no JSON: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} is no table of fields; give a recipe's file or a Hugging Face config.json")
    return data


def _of_recipe(path: Path, data: dict[str, Any], options: argparse.Namespace) -> Asked:
    faults: list[str] = []
    model, kind_from = _model_of_recipe(path, data, options, faults)
    arguments = at(data, "trainer", "strategy", "init_args") or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{path}: trainer.strategy.init_args ({arguments!r}) must be a table of options")
    known = inspect.signature(MegatronStrategy).parameters
    for name in arguments:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1)
            faults.append(f"{name} is no option of the strategy" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    pipeline = made_of(PipelineConfig, arguments.get("pipeline") or {}, "pipeline", faults)
    optimizer = made_of(OptimizerConfig, arguments.get("optimizer") or {}, "optimizer", faults)
    recompute = made_of(RecomputeConfig, arguments.get("recompute") or {}, "recompute", faults)
    context = made_of(ContextConfig, arguments.get("context") or {}, "context", faults)
    fp8 = made_of(Fp8Config, arguments["fp8"], "fp8", faults) if arguments.get("fp8") else None
    trainer = at(data, "trainer") or {}
    precision, fp8 = precision_of(trainer, fp8, faults)
    trained = trained_of(data, faults)
    if model is not None:
        faults += trained.faults(model)
    world = options.num_gpus or num_gpus_of(trainer, faults)
    numbers = _counts_of(data, arguments, options, faults)
    if not world and not faults:
        faults.append(f"--num-gpus is needed: {path} leaves trainer.devices to the machine")
    if faults:
        raise ValueError("\n".join(faults))
    assert model is not None and pipeline is not None and optimizer is not None and recompute is not None
    assert context is not None
    sizes = Sizes(
        world=world,
        **{short: numbers[name] for name, short in _SIZES.items()},
        **context_fields(context, numbers["context_parallel_size"]),
        sequence_parallel=bool(arguments.get("sequence_parallel", False)),
        placement=placement_of(pipeline.schedule) if pipeline.schedule != "auto" else "loop",
        stage_layout=pipeline.layout,
    )
    batch, length = numbers["data.global_batch_size"], numbers["data.sequence_length"]
    num_microbatches, rows = numbers["num_microbatches"], arguments.get("microbatch_size", 0)
    replicas = 0 if sizes.faults() else sizes.dp
    decoder = options.decoder_sequence_length or at(data, "data", "decoder_sequence_length")
    if isinstance(model, T5Config) and not decoder:
        decoder = model.max_decoder_sequence_length
    run = Run(
        model=model,
        texts=Texts(sequence=length, decoder_sequence=decoder or 0, images=int(isinstance(model, LlavaConfig))),
        sizes=sizes,
        global_batch_size=batch,
        num_accumulated=numbers["trainer.accumulate_grad_batches"],
        micro_batch_size=rows or max(batch // max(replicas * num_microbatches, 1), 1),
        precision=precision,
        fp8=fp8,
        recompute=recompute,
        optimizer=optimizer,
        schedule_name=None if pipeline.schedule == "auto" else pipeline.schedule,
        group_size=pipeline.microbatch_group_size,
        context=context,
        trained=trained,
    )
    cut = Facts(sizes=sizes, num_microbatches=num_microbatches, microbatch_size=rows, global_batch_size=batch)
    return Asked(
        run=run,
        has_layout=at(data, "trainer", "strategy") is not None,
        faults=tuple(fault for fault in rule_faults(cut) if fault not in sizes.faults()),
        notes=(*_notes_on_kind(kind_from), *_notes_on_arguments(arguments, pipeline)),
    )


def _counts_of(
    data: dict[str, Any], arguments: dict[str, Any], options: argparse.Namespace, faults: list[str]
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
        model = _model_of_folder(Path(name))
    else:
        raise ValueError(
            f"model.path ({name}) is no folder here; give the model by --model: a folder, its config.json, or a preset "
            f"({', '.join(PRESETS)})"
        )
    if upcycle is not None:
        moe = made_of(MoEConfig, upcycle, "model.upcycle", faults)
        model = model if moe is None else upcycling(model, moe).config
    return model, "model.path"


def _notes_on_kind(kind_from: str) -> list[str]:
    if kind_from:
        return []
    return ["taken for a GPT: the file has no field of a BERT, T5 or LLaVA alone; --model-kind says another"]


def _notes_on_arguments(arguments: dict[str, Any], pipeline: PipelineConfig) -> list[str]:
    """What of a strategy changes memory or time and is not planned."""
    notes = []
    if arguments.get("dynamic_context"):
        notes.append("not planned: dynamic_context, which cuts each batch anew; context_parallel_size counts")
    if pipeline.overlap_expert_exchange:
        notes.append("not planned: overlap_expert_exchange, which keeps more and waits less")
    if pipeline.mode == "collective":
        notes.append("not planned: pipeline mode 'collective', which keeps the activations of all microbatches")
    return notes


_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
