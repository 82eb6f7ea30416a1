"""`lightning-megatron plan`: which layouts of a model fit on so many GPUs, how fast each is, and why others do not.

Nothing is built and nothing runs: a model of a trillion parameters on 3,072 GPUs is planned on a laptop.
"""

import argparse
import inspect
import json
import math
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from lightning_megatron.cli.plain import made_of
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.context.config import ContextConfig
from lightning_megatron.hf.families import family_of_file
from lightning_megatron.hf.folder import read_config
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.pipeline.choice import placement_of
from lightning_megatron.planner.anatomy import Model, Texts
from lightning_megatron.planner.estimate import Estimate, estimate
from lightning_megatron.planner.hardware import GIGA, Gpu, gpu_of
from lightning_megatron.planner.picture import write_plan
from lightning_megatron.planner.presets import PRESETS, preset_of
from lightning_megatron.planner.report import estimate_text, found_text, record_of
from lightning_megatron.planner.run import Run, faults_of
from lightning_megatron.planner.search import Found, fewest_gpus, search
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.trainer import MegatronStrategy
from lightning_megatron.trainer.config import PipelineConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

_EPILOG = f"""\
CONFIG is a recipe's YAML file, a preset ({", ".join(PRESETS)}), or a Hugging Face config.json or
its folder.

example:  lightning-megatron plan llama3_70b --gpu h100 --num-gpus 64
          lightning-megatron plan recipes/configs/gpt_1t.yaml --gpu a100-80gb --layout recipe --tokens 450e9
"""
# Of --layout, and which field of a run each sets.
_KEYS = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "recompute")
_USUAL_LENGTH = 8192


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a configuration says."""

    run: Run
    has_layout: bool
    # and not the model alone


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
    parser.add_argument("config", metavar="CONFIG", help="a recipe's YAML, a preset, or a Hugging Face config.json")
    machine = parser.add_argument_group("the machine")
    machine.add_argument("--gpu", required=True, metavar="NAME", help="a known GPU, or a YAML file that describes one")
    machine.add_argument("--num-gpus", type=int, metavar="NUMBER", help="GPUs in all (default: those of the recipe)")
    machine.add_argument("--memory-gb", type=float, metavar="GB", help="memory of one (default: that of the GPU)")
    run = parser.add_argument_group("the run")
    run.add_argument("--global-batch-size", type=int, metavar="SAMPLES", help="of a step (default: the recipe's)")
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
        _search(options, asked.run, gpu)


def _explain(options: argparse.Namespace, asked: Asked, gpu: Gpu) -> None:
    run = asked.run
    if options.layout == "recipe":
        if not asked.has_layout:
            raise UsageError(
                [f"--layout recipe: {options.config} has no layout of its own; write one, as in tp=8,pp=4"]
            )
    else:
        run = with_layout(run, options.layout)
    if faults := faults_of(run):
        raise UsageError(faults)
    found = estimate(run, gpu)
    if options.out is not None:
        _write(found, options.out)
    if options.json:
        print(json.dumps(record_of(found, num_tokens=options.tokens)))
    else:
        print(estimate_text(found, num_tokens=options.tokens))


def _search(options: argparse.Namespace, run: Run, gpu: Gpu) -> None:
    found = search(run, gpu, memory_bytes=gpu.memory_bytes, free_recompute=options.recompute is None)
    if not found.fitting:
        raise UsageError([_nothing_fits(run, gpu, found, options.recompute is None)])
    best = [estimate(one, gpu) for one in found.fitting[: max(options.top, 1)]]
    if options.out is not None:
        _write(best[0], options.out)
    if options.json:
        layouts = [record_of(one, num_tokens=options.tokens) for one in best]
        print(json.dumps({"layouts": layouts, "num_fitting": len(found.fitting), "fell_out": found.reasons()}))
    else:
        print(found_text(found, gpu.name, best, num_shown=options.top))
        print()
        print(estimate_text(best[0], num_tokens=options.tokens))


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
        if key not in _KEYS or not value or (key != "recompute" and not value.isdecimal()):
            faults.append(f"--layout part {part!r} must be one of {', '.join(_KEYS)}, = and a number, as in tp=8,pp=4")
        if key in values:
            faults.append(f"--layout names {key} twice; leave one of them out")
        values[key] = value
    if values.get("recompute", "none") not in ("none", "selective", "full"):
        faults.append(f"--layout recompute ({values['recompute']!r}) must be none, selective or full")
    if faults:
        raise UsageError(faults)
    sizes: dict[str, Any] = {key: int(values.get(key, 1)) for key in ("tp", "pp", "vp", "cp", "ep", "etp")}
    own = Sizes(world=run.sizes.world, **sizes, sequence_parallel=sizes["tp"] > 1)
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
        if path.suffix in (".yaml", ".yml"):
            asked = _of_recipe(path, options)
        elif path.suffix == ".json" or path.is_dir():
            asked = _of_hugging_face(path, options)
        else:
            preset = preset_of(options.config)
            asked = _bare(preset.model, preset.texts, preset.global_batch_size, options)
    except ValueError as error:
        raise UsageError(str(error).splitlines()) from error
    run = asked.run
    if options.fp8 and run.fp8 is None:
        run = replace(run, fp8=Fp8Config())
    if options.recompute is not None:
        run = replace(run, recompute=RecomputeConfig(granularity=options.recompute))
    if run.fp8 is not None and options.gpu and not _gpu_of(options).fp8_tflops:
        raise UsageError([f"GPU {options.gpu!r} has no units for FP8; leave FP8 out, or plan for another"])
    return replace(asked, run=run)


def _bare(model: Model, texts: Texts, batch: int, options: argparse.Namespace) -> Asked:
    """A model alone: how it is trained is what the package does best."""
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
    folder = path if path.is_dir() else path.parent
    raw = read_config(folder)
    model = family_of_file(raw, str(folder / "config.json")).config(raw)
    if options.global_batch_size is None:
        raise ValueError(f"--global-batch-size is needed: {path} does not say it")
    length = min(model.max_sequence_length, _USUAL_LENGTH)
    texts = Texts(sequence=length, decoder_sequence=length if isinstance(model, T5Config) else 0)
    return _bare(model, texts, options.global_batch_size, options)


def _of_recipe(path: Path, options: argparse.Namespace) -> Asked:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    config = _at(data, "model", "config")
    if not isinstance(config, dict):
        raise ValueError(f"{path} has no model.config; give a recipe's file, a preset, or a Hugging Face config.json")
    faults: list[str] = []
    model = made_of(_kind_of(config), config, "model.config", faults)
    arguments = _at(data, "trainer", "strategy", "init_args") or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{path}: trainer.strategy.init_args ({arguments!r}) must be a table of options")
    known = inspect.signature(MegatronStrategy).parameters
    for name in arguments:
        if name not in known:
            nearest = get_close_matches(str(name), known, n=1)
            faults.append(f"{name} is no option of the strategy" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    if (accumulated := _at(data, "trainer", "accumulate_grad_batches") or 1) != 1:
        faults.append(
            f"accumulate_grad_batches ({accumulated!r}) is not planned; give the batch of a step as"
            " data.global_batch_size, or by --global-batch-size without it"
        )
    if parts := _at(data, "model", "frozen"):
        faults.append(f"frozen ({parts!r}) is not planned: all weights would count as trained; take it out to see that")
    pipeline = made_of(PipelineConfig, arguments.get("pipeline") or {}, "pipeline", faults)
    optimizer = made_of(OptimizerConfig, arguments.get("optimizer") or {}, "optimizer", faults)
    recompute = made_of(RecomputeConfig, arguments.get("recompute") or {}, "recompute", faults)
    context = made_of(ContextConfig, arguments.get("context") or {}, "context", faults)
    fp8 = made_of(Fp8Config, arguments["fp8"], "fp8", faults) if arguments.get("fp8") else None
    numbers = {name: arguments.get(name, 1) for name in _SIZES}
    trainer = _at(data, "trainer") or {}
    numbers |= {name: trainer.get(name, 1) for name in ("devices", "num_nodes")}
    numbers |= {name: arguments.get(name, 1) for name in ("num_microbatches", "microbatch_size")}
    batch = options.global_batch_size or _at(data, "data", "global_batch_size")
    length = options.sequence_length or _at(data, "data", "sequence_length")
    numbers |= {"data.global_batch_size": batch, "data.sequence_length": length}
    faults += [
        f"{name} ({value!r}) must be a number of at least 1" for name, value in numbers.items() if not _is_count(value)
    ]
    if faults:
        raise ValueError("\n".join(faults))
    assert model is not None and pipeline is not None and optimizer is not None and recompute is not None
    assert context is not None
    world = options.num_gpus or numbers["devices"] * numbers["num_nodes"]
    sizes = Sizes(
        world=world,
        **{short: numbers[name] for name, short in _SIZES.items()},
        cp_inner=context.inner_of(numbers["context_parallel_size"]),
        pads_uneven=context.uneven == "pad",
        sequence_parallel=bool(arguments.get("sequence_parallel", False)),
        placement=placement_of(pipeline.schedule) if pipeline.schedule != "auto" else "loop",
        stage_layout=pipeline.layout,
    )
    replicas = 0 if sizes.faults() else sizes.dp
    decoder = options.decoder_sequence_length or _at(data, "data", "decoder_sequence_length")
    if isinstance(model, T5Config) and not decoder:
        decoder = model.max_decoder_sequence_length
    run = Run(
        model=model,
        texts=Texts(sequence=length, decoder_sequence=decoder or 0, images=int(isinstance(model, LlavaConfig))),
        sizes=sizes,
        global_batch_size=batch,
        micro_batch_size=numbers["microbatch_size"]
        if "microbatch_size" in arguments
        else max(batch // max(replicas * numbers["num_microbatches"], 1), 1),
        precision=str(trainer.get("precision", "32-true")),
        fp8=fp8,
        recompute=recompute,
        optimizer=optimizer,
        schedule_name=None if pipeline.schedule == "auto" else pipeline.schedule,
        group_size=pipeline.microbatch_group_size,
        context=context,
    )
    return Asked(run=run, has_layout=_at(data, "trainer", "strategy") is not None)


_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}


def _kind_of(config: dict[str, Any]) -> type[GPTConfig | BertConfig | T5Config]:
    """The configuration that alone has a field of the table; a GPT's where there is none."""
    common = {field.name for field in fields(GPTConfig)}
    for kind in (LlavaConfig, T5Config, BertConfig):
        if any(field.name in config for field in fields(kind) if field.name not in common):
            return kind
    return GPTConfig


def _at(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
