"""Published training runs as runs of the planner: `tests/planner/published_runs.json`, row by row.

A row states sizes and a layout; the rest of its system (kernels, overlap of messages) follows from its source, and is
written down here once for each source. `run_of` gives the reason where a row cannot be planned.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_megatron.mesh import Sizes, StageLayout
from lightning_megatron.models import BertConfig, GPTConfig, T5Config
from lightning_megatron.moe.config import MoEConfig, RouterConfig
from lightning_megatron.optim.config import GradientDtype, OptimizerConfig
from lightning_megatron.planner.flops import (
    BY_PARAMETERS,
    HARDWARE_ALL_PAIRS,
    MODEL,
    MODEL_ALL_PAIRS,
    Convention,
)
from lightning_megatron.planner.framework_profile import (
    FULLY_SHARDED,
    MEGATRON,
    SHARDED_BETWEEN_PASSES,
    FrameworkProfile,
    Hiding,
)
from lightning_megatron.planner.hardware import Gpu, gpu_of
from lightning_megatron.planner.model_parts import Model, ModelParts, SequenceLengths, model_parts_of
from lightning_megatron.planner.run import Run
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.latent_config import LatentConfig
from lightning_megatron.transformer.recompute import RecomputeConfig

ROWS = Path(__file__).resolve().parents[1] / "tests" / "planner" / "published_runs.json"
LATER_ROWS = ROWS.with_name("later_runs.json")
Row = Mapping[str, Any]

GPUS = {
    "A100-80GB": "a100-80gb",
    "A100": "a100-80gb",
    "A100-40GB": "a100-40gb",
    "H100": "h100",
    "H100-96GB-HBM2e-500W": "h100-96gb-500w",
    "H200": "h200",
    "H800": "h800",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
    "V100-32GB": "v100-32gb",
}

_LLAMA = {"activation": "swiglu", "normalization": "rmsnorm", "position": "rotary", "add_bias_linear": False}
_NEMOTRON = {"activation": "relu", "position": "rotary", "rotary_fraction": 0.5, "add_bias_linear": False}
_BARE = {"position": "learned", "add_bias_linear": False}
_GPT: dict[str, Any] = {"activation": "gelu_tanh"}
_DEEPSEEK = LatentConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

# What a model is, by the beginning of its name; sizes are those of the row.
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("MPT", _BARE),
    ("Llama", {**_LLAMA, "tie_embeddings": False}),
    ("LLaMA", {**_LLAMA, "tie_embeddings": False}),
    ("Nemotron", {**_NEMOTRON, "tie_embeddings": False}),
    ("Mixtral", {**_LLAMA, "tie_embeddings": False}),
    ("Grok1", {**_LLAMA, "tie_embeddings": False}),
    ("Qwen3", {**_LLAMA, "tie_embeddings": False, "qk_norm": True, "head_dim": 128}),
    ("Qwen2-57B", {**_LLAMA, "tie_embeddings": False, "add_qkv_bias": True}),
    ("DeepSeek-V3", {**_LLAMA, "tie_embeddings": False, "latent": _DEEPSEEK}),
    ("GPT-OSS", {**_LLAMA, "tie_embeddings": False, "add_bias_linear": True, "head_dim": 64, "sliding_window": 128}),
    ("GPT", _GPT),
    ("MT-NLG", _GPT),
    ("OPT", _GPT),
    ("BLOOM", {**_GPT, "position": "none"}),
)


# Experts, chosen ones, their width (0: that of the row) and that of the shared expert.
_EXPERTS = {
    "Mixtral-8x7B": (8, 2, 0, 0),
    "Mixtral-8x22B": (8, 2, 0, 0),
    "Grok1-314B": (8, 2, 0, 0),
    "Qwen3-30B-A3B": (128, 8, 768, 0),
    "Qwen3-235B-A22B": (128, 8, 1536, 0),
    "Qwen2-57B-A14B": (64, 8, 2560, 20480),
    "GPT-OSS-120B": (128, 4, 2880, 0),
    "DeepSeek-V3": (256, 8, 2048, 2048),
}

_SMALL, _LARGE = "Qwen3-30B-A3B", "Qwen3-235B-A22B"
# Layers of DeepSeek-V3 before the first with experts.
_FIRST_DENSE = 3

_CANNOT_BUILD = {
    "Nemotron-H": "layers of Mamba; the package has no such layer",
    "Nemotron_3": "layers of Mamba; the package has no such layer",
    "Llama4": "layers whose experts' sizes the row does not state",
    "PaLM": "attention and feed-forward side by side; the package has no such layer",
}


TITAN = replace(FULLY_SHARDED, name="torchtitan", attention="second")
COMPILED = replace(TITAN, name="torchtitan, compiled", is_fused=True)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A row as the planner sees it."""

    run: Run
    gpu: Gpu


@lru_cache(maxsize=1)
def rows() -> tuple[dict[str, Any], ...]:
    """All published rows, in order."""
    return tuple(json.loads(ROWS.read_text(encoding="utf-8")))


@lru_cache(maxsize=1)
def later_rows() -> tuple[dict[str, Any], ...]:
    """Rows of a release that came after all of those that state a step time. Constants were never fitted on them; one
    formula, that stages wait for the slowest hop, was added after a first look at them.

    All of its rows but those in four bits and those of DeepSeek-V3, which the package has not.
    """
    return tuple(json.loads(LATER_ROWS.read_text(encoding="utf-8")))


def stated_recompute(row: Row) -> RecomputeConfig:
    """The recomputation that a row states."""
    return _recompute(str(row.get("recompute") or ""), is_old=True)


# By which convention a source counts, by the beginning of its name.
_CONVENTIONS = (
    ("arXiv:2104.04473", HARDWARE_ALL_PAIRS),
    ("Megatron-LM README 2020", HARDWARE_ALL_PAIRS),
    ("MT-NLG", HARDWARE_ALL_PAIRS),
    ("arXiv:2205.05198", MODEL_ALL_PAIRS),
    ("Megatron-LM README", MODEL_ALL_PAIRS),
    ("Megatron-LM examples", MODEL_ALL_PAIRS),
    ("Nemotron-4", MODEL_ALL_PAIRS),
    ("NVIDIA/NeMo", MODEL_ALL_PAIRS),
    ("NeMo-Framework-Launcher", MODEL_ALL_PAIRS),
    ("Llama 3 paper", MODEL),
    ("Megatron-Bridge", MODEL),
    ("llm-foundry", BY_PARAMETERS),
)


def convention_of(row: Row, field: str) -> Convention | None:
    """The convention by which a row's source counts FLOPs; None: not known."""
    source = str(row["source"])
    if source.startswith("DGXC"):
        return MODEL if "grok" in source else MODEL_ALL_PAIRS
    found = next((convention for beginning, convention in _CONVENTIONS if source.startswith(beginning)), None)
    if field == "hfu" and found is not None:
        return replace(found, counts_recompute=True)
    return found


def source_error(row: Row, field: str) -> str:
    """Reason why a row's number in a field is wrong, or follows a convention of its own; empty: none."""
    source, name = str(row["source"]), str(row["model"])
    is_speed = field in ("tflops_per_gpu", "mfu", "hfu")
    if "nemotron/" in source and is_speed:
        return "counts as many key heads as query heads; the model has 8 groups"
    if "pre-26.06" in str(row.get("flops_def")) and is_speed:
        return "counts two matrices where a gated network has three, and no window"
    if source.startswith("arXiv:2205.05198") and field == "hfu" and "selective" in str(row.get("recompute")):
        return "counts attention that is recomputed twice: s/3h in its formula, where once more is 2s/9h"
    if "LDDL table" in source and name == "BERT-110m" and is_speed:
        return "its own formula on its own time gives 18.6 and 19.1 TFLOP/s where it prints 18.28 and 18.9"
    if row.get("task") in ("SFT", "LoRA") and is_speed:
        return "packed conversations whose lengths are not stated, and for LoRA no gradients of most weights"
    if name == "DeepSeek-V3" and "MTP layer" in str(row.get("flops_def")) and is_speed:
        return "counts a layer that predicts one token further, and its logits"
    return ""


def step_seconds(row: Row) -> float | None:
    """The step time of a row: measured, or derived from a throughput whose convention is known."""
    for name in ("iter_time_s", "iter_time_s_derived", "iter_time_s_derived_causal"):
        if row.get(name):
            return float(row[name])
    return None


def frugal(row: Row, run: Run) -> Run:
    """The run with the choices that need the least memory, where the row does not state them.

    Rows of Megatron Core since 2023 do not say in which numbers gradients are summed, nor how FP8 weights are held.
    """
    if not row.get("recompute"):
        run = replace(run, recompute=RecomputeConfig(granularity="full"))
    if run.framework.name.startswith("Megatron Core") and _year(str(row["source"])) >= 2023:
        run = replace(run, fp8=None, optimizer=replace(run.optimizer, grad_dtype="bfloat16"))
    return run


def why_memory_is_unknown(row: Row) -> str:
    """Memory savings in the run of a row that the planner does not know; empty: none."""
    if not row.get("mbs"):
        return "the row does not state the samples of a microbatch"
    if "LoRA" in str(row.get("task")):
        return "most weights are frozen, and have neither gradients nor moments"
    if row["model"] == "DeepSeek-V3":
        return "the closed form of activations is not that of multi-head latent attention"
    if row.get("fsdp") == "ZeRO-3":
        return "weights are gathered one matrix at a time, and saved inputs may lie on the host"
    if "op-level" in str(row.get("recompute")):
        return "recomputation by single operations, which the package does not have"
    if row["model"] == "Nemotron4-15B" and int(row["tp"]) == 1:
        return "15.6 billion weights and gradients in 16 bits are 62.6 GB before any state: it must have cut them"
    return ""


def why_untimed(row: Row) -> str:
    """Facts that the step time depends on and a row does not state; empty: none."""
    source = str(row["source"])
    if row["kind"] == "golden":
        return "a functional test in deterministic mode"
    if not row.get("mbs"):
        return "the row does not state the samples of a microbatch"
    if "Nemotron-4 340B technical report" in source or "2407.21783" in source:
        return "the row does not state how many stages are on a rank, and there were several"
    if "torchtitan" in source and int(row["pp"]) > 1:
        return "the row states the samples of a replica and not those of a microbatch"
    if "may predate" in str(row.get("note")):
        return "the layout is from a file that is younger than the times, which are a third more than it can take"
    if "LDDL table" in source:
        return "a comparison of data loaders: it waits for data, or has shorter sequences than it states"
    if "LoRA" in str(row.get("task")):
        return "most weights are frozen, and have no gradients"
    if row.get("schedule") == "ZB-2p":
        return "schedule ZB-2p, which the package does not have"
    return ""


def model_of(row: Row) -> ModelParts | str:
    """The model of a row, or why it cannot be built."""
    name = str(row["model"])
    for beginning, reason in _CANNOT_BUILD.items():
        if name.startswith(beginning):
            return reason
    if missing := [key for key in ("seq", "layers", "hidden", "heads") if not row.get(key)]:
        return f"the row does not state {', '.join(missing)}"
    try:
        model = _model(row, name, is_materialised=_materialises_weights(str(row["source"])))
    except ValueError as error:
        return str(error)
    return model_parts_of(
        model, SequenceLengths(sequence=int(row["seq"]), decoder_sequence=int(row.get("seq_dec") or 0))
    )


def run_of(row: Row) -> Planned | str:
    """The row as a run on its GPUs, or why it is none."""
    name = str(row["model"])
    for beginning, reason in _CANNOT_BUILD.items():
        if name.startswith(beginning):
            return reason
    if row["kind"] == "golden":
        return _golden(row)
    if row.get("gpu_type") not in GPUS:
        return f"GPU {row.get('gpu_type')} is not known"
    missing = [key for key in ("gpus", "tp", "pp", "gbs", "seq", "layers", "hidden", "heads") if not row.get(key)]
    if missing:
        return f"the row does not state {', '.join(missing)}"
    try:
        return _planned(row, name)
    except ValueError as error:
        return str(error)


def _planned(row: Row, name: str) -> Planned | str:
    source, year = str(row["source"]), _year(str(row["source"]))
    is_old = year <= 2022
    model = _model(row, name, is_materialised=_materialises_weights(source))
    tp, pp, vp, cp = int(row["tp"]), int(row["pp"]), int(row.get("vp") or 1), int(row.get("cp") or 1)
    if row.get("schedule") == "1F1B-I" and vp == 1:
        # Its stages are single layers; the embedding and the head take the place of one each.
        vp = (int(row["layers"]) + 2) // pp
    etp = int(row.get("etp") or (1 if year >= 2025 else tp if row.get("ep") and "grok1" not in source else 1))
    world = int(row["gpus"])
    recompute = str(row.get("recompute") or "")
    framework = _software(row)
    sizes = Sizes(
        world=world,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=int(row.get("ep") or 1),
        etp=etp,
        vp=vp if pp > 1 else 1,
        sequence_parallel=tp > 1 and "no SP" not in recompute and not year <= 2021 and "T5" not in name,
        stage_layout=_stage_layout(int(row["layers"]), pp, vp),
    )
    if faults := sizes.faults():
        return faults[0]
    batch, micro = int(row["gbs"]), int(row.get("mbs") or 1)
    if "torchtitan" in source and pp > 1:
        # The rows state the samples of a data-parallel rank.
        micro = 1
    if batch % (sizes.dp * micro):
        return f"its batch ({batch}) is no multiple of {sizes.dp} replicas x {micro} samples"
    is_fp8 = "fp8" in str(row.get("precision")).lower() or "float8" in str(row.get("precision")).lower()
    run = Run(
        model=model,
        lengths=SequenceLengths(sequence=int(row["seq"]), decoder_sequence=int(row.get("seq_dec") or 0)),
        sizes=sizes,
        global_batch_size=batch,
        micro_batch_size=micro,
        precision="16-mixed" if row.get("precision") == "fp16" else "bf16-mixed",
        fp8=Fp8Config() if is_fp8 else None,
        recompute=_recompute(recompute, is_old),
        optimizer=OptimizerConfig(
            kind="distributed" if year >= 2022 and framework.name == MEGATRON.name else "replicated",
            grad_dtype=_grad_dtype(source),
            overlap_grad_reduce=year >= 2023 or "README 2020" in source,
            overlap_param_gather=year >= 2023 and framework.name == MEGATRON.name,
        ),
        schedule_name=_schedule(str(row.get("schedule") or ""), vp),
        framework=framework,
    )
    return Planned(run=_with_expert_settings(run, row), gpu=gpu_of(GPUS[str(row["gpu_type"])]))


def _model(row: Row, name: str, *, is_materialised: bool) -> Model:
    sizes: dict[str, Any] = {
        "num_layers": int(row["layers"]),
        "hidden_size": int(row["hidden"]),
        "num_attention_heads": int(row["heads"]),
        "num_query_groups": int(row.get("kv_heads") or 0),
        "ffn_hidden_size": int(row.get("ffn") or 0),
        "vocab_size": int(row.get("vocab") or 51200),
        "max_sequence_length": int(row["seq"]),
    }
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1} if is_materialised else {}
    if name.startswith("BERT"):
        return BertConfig(
            **sizes, norm_placement="pre", embedding_norm=False, attention_dropout=0.1, hidden_dropout=0.1
        )
    if "T5" in name:
        return T5Config(
            **sizes,
            activation="geglu_tanh",
            head_dim=64,
            position="learned",
            normalization="layernorm",
            add_bias_linear=True,
            max_decoder_sequence_length=int(row["seq_dec"]),
            attention_dropout=0.1,
            hidden_dropout=0.1,
        )
    kind = next((fields for beginning, fields in _KINDS if name.startswith(beginning)), None)
    if kind is None:
        raise ValueError(f"the architecture of {name} is not known here")
    experts = next((numbers for known, numbers in _EXPERTS.items() if name == known), None)
    if experts is not None:
        number, chosen, width, shared = experts
        kind = kind | {
            "moe": MoEConfig(
                router=RouterConfig(num_experts=number, top_k=chosen),
                ffn_hidden_size=width,
                shared_expert_intermediate_size=shared,
                layers=tuple(range(_FIRST_DENSE, int(row["layers"]))) if name == "DeepSeek-V3" else (),
            )
        }
    if "model_table" in str(row["source"]) or "README strong scaling" in str(row["source"]):
        kind = {**_GPT, "position": "rotary", "tie_embeddings": False}
    if name.startswith("GPT-OSS"):
        kind = kind | {"full_attention_layers": tuple(range(1, int(row["layers"]), 2))}
    return GPTConfig(**{**sizes, **kind, **dropout})


def has_bridge_experts(row: Row) -> bool:
    """Whether a row is of a model with experts in Megatron-Bridge."""
    return "Megatron-Bridge" in str(row["source"]) and row["model"] in _EXPERTS


def _with_expert_settings(run: Run, row: Row) -> Run:
    """The run with the settings for experts that the release had, which the rows do not state: how tokens are
    dispatched, and whether that overlaps compute.

    Source: NVIDIA-NeMo/Megatron-Bridge, scripts/performance/configs at v0.2.0 and v0.3.0 (moe_flex_dispatcher_backend,
    cuda_graph_scope, moe_a2a_overlap); rows before say whether tokens are dropped.
    """
    if not has_bridge_experts(row):
        return run
    name, gpu = str(row["model"]), str(row["gpu_type"])
    drops = "tokendrop" in str(row.get("note"))
    # Hybrid EP is for GPUs that NVLink joins over nodes, and for one model on B300.
    is_hybrid = not drops and name != "GPT-OSS-120B" and (gpu in ("GB200", "GB300") or (gpu, name) == ("B300", _SMALL))
    overlaps = not drops and name != "GPT-OSS-120B" and (gpu == "H100" or (gpu, name) == ("B300", _LARGE))
    framework = replace(run.framework, captures_routing=is_hybrid, launches_experts=not (drops or is_hybrid))
    return replace(run, framework=framework, is_overlapped=overlaps)


def _stage_layout(layers: int, pp: int, vp: int) -> StageLayout:
    """Layout of stages: where they do not divide the layers, embedding and head count as layers, as published."""
    stages = pp * vp
    if layers % stages == 0 or stages == 1:
        return StageLayout()
    return StageLayout(counts_embedding=True, counts_head=True)


def _recompute(text: str, is_old: bool) -> RecomputeConfig:
    if text.startswith("full"):
        return RecomputeConfig(granularity="full")
    if is_old and "selective" in text:
        return RecomputeConfig(granularity="selective", parts=("core_attention",))
    return RecomputeConfig()


def _software(row: Row) -> FrameworkProfile:
    fsdp, precision = str(row.get("fsdp") or ""), str(row.get("precision"))
    if fsdp == "SHARD_GRAD_OP":
        return replace(SHARDED_BETWEEN_PASSES, logit_bytes=2)
    if fsdp == "True" or (fsdp.isdigit() and int(fsdp) > 1):
        return replace(_megatron(row), name="Megatron Core, fully sharded", shards_weights="always")
    if fsdp == "FSDP2":
        recomputes = (
            ""
            if "op-level" not in str(row.get("recompute"))
            else "products"
            if "float8" in precision
            else "second products"
        )
        titan = COMPILED if "compile" in precision else TITAN
        is_async = "AsyncTP" in str(row.get("note"))
        return replace(titan, recomputes=recomputes, hides_tensor="forward" if is_async else "nowhere")
    if fsdp == "FULL_SHARD":
        # Its loss overwrites the logits, in 16 bits.
        return replace(FULLY_SHARDED, logit_bytes=2)
    if fsdp == "ZeRO-3":
        return FULLY_SHARDED
    # Its gates are bounded; the other models of this list have gates without bounds.
    return replace(_megatron(row), bounds_gates=str(row["model"]).startswith("GPT-OSS"))


# Sources that reduced gradients in 16 bits: Megatron-LM before it had them in float32 (2021), llm-foundry
# (mixed precision PURE), and the recipes of NeMo, Megatron-Bridge and Megatron-LM (`grad_reduce_in_fp32=False`).
_NARROW_GRADIENTS = ("README 2020", "llm-foundry", "DGXC", "NVIDIA/NeMo", "Megatron-Bridge", "Megatron-LM examples")


def _grad_dtype(source: str) -> GradientDtype:
    return "bfloat16" if any(name in source for name in _NARROW_GRADIENTS) else "float32"


def _megatron(row: Row) -> FrameworkProfile:
    """Profile of Megatron in a row: the products that hide messages of tp, and DeepSpeed's messages between stages."""
    source = str(row["source"])
    year = _year(source)
    hides: Hiding = "nowhere" if year <= 2021 else "backward" if year == 2022 else "everywhere"
    return replace(MEGATRON, hides_tensor=hides, splits_hops="MT-NLG" not in source)


def _schedule(text: str, vp: int) -> Any:
    return {"ZB-1p": "zb_h1", "1F1B": "1f1b" if vp == 1 else None}.get(text)


_YEARS = (
    ("1909.08053", 2019),
    ("README 2020", 2020),
    ("2104.04473", 2021),
    ("2201.11990", 2021),
    ("2205.05198", 2022),
    ("2205.01068", 2022),
    ("2211.05100", 2022),
    ("2302.13971", 2023),
    ("NeMo-Framework-Launcher", 2022),
    ("25.11", 2025),
    ("25.09", 2025),
    ("v25", 2025),
    ("v26", 2026),
    ("26.02 NeMo", 2026),
    ("main:", 2026),
)


def _year(source: str) -> int:
    return next((year for beginning, year in _YEARS if beginning in source), 2024)


def _materialises_weights(source: str) -> bool:
    """Whether attention materialised its weights: before it had a kernel, and where the stated memory shows it."""
    return _year(source) <= 2022 or "2401.10241" in source


def _golden(row: Row) -> Planned | str:
    """A row of Megatron's own tests, which state every option."""
    args: Mapping[str, str] = row["args"]

    def has(name: str) -> bool:
        return args.get(name) == "true"

    for option, reason in (
        ("multi-latent-attention", "multi-latent attention"),
        ("use-megatron-fsdp", "fully sharded"),
        ("fine-grained-activation-offloading", "activations on the host"),
        ("hybrid-override-pattern", "layers of Mamba"),
        ("hybrid-layer-pattern", "layers of Mamba"),
        ("is-hybrid-model", "layers of Mamba"),
        ("num-distributed-optimizer-instances", "several optimizers in one job"),
        ("overlap-moe-expert-parallel-comm", "experts' messages behind another microbatch, with buffers of its own"),
    ):
        if option in args:
            return f"{reason}; the package has no such thing"
    kind = str(row["model"]).partition("/")[0]
    if kind in ("hybrid", "nemotron", "mimo", "multimodal-llava"):
        return f"the row does not state all sizes of its {kind} model"
    if "defer_embedding" in str(row["model"]):
        return "gradients of the embedding deferred to the end of the step; the package has no such thing"
    layers, hidden, heads = int(row["layers"]), int(row["hidden"]), int(row["heads"])
    sequence, tp, pp = int(row["seq"]), int(row["tp"]), int(row["pp"])
    vp = int(args.get("num-virtual-stages-per-pipeline-rank", row.get("vp") or 1))
    # Megatron's own rule where a gated network has no width given.
    width = hidden * 4 * 2 // 3 // 64 * 64 if has("swiglu") else 4 * hidden
    is_unfused = args.get("attention-backend") in ("unfused", "local") or args.get("transformer-impl") == "local"
    cp, ep = int(row.get("cp") or 1), int(row.get("ep") or 1)
    etp = int(args.get("expert-tensor-parallel-size", tp if "num-experts" in args else 1))
    sizes = Sizes(
        # Where it is not stated: the fewest that the sizes ask for, and no less than a node.
        world=int(row.get("gpus") or math.lcm(8, pp * cp * tp, pp * ep * etp)),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vp=vp if pp > 1 else 1,
        sequence_parallel=has("sequence-parallel") and tp > 1,
        stage_layout=_golden_layout(args),
    )
    if faults := sizes.faults():
        return faults[0]
    vocabulary = {"bert": 28996, "t5": 28996 + 128, "mixtral": 32000}.get(kind, 50257)
    if "15b" in str(row["model"]):
        vocabulary = 256000
    vocabulary = int(args.get("vocab-size", vocabulary))
    fields: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": int(args.get("num-query-groups", 0)),
        "head_dim": int(args.get("kv-channels", 0)),
        "ffn_hidden_size": int(args.get("ffn-hidden-size", width)),
        "vocab_size": vocabulary,
        "vocab_multiple": int(args.get("make-vocab-size-divisible-by", 128)),
        "max_sequence_length": int(args.get("max-position-embeddings", sequence)),
        "hidden_dropout": 0.1,
        # A fused kernel materialises nothing.
        "attention_dropout": 0.1 if is_unfused else 0.0,
        "activation": "swiglu" if has("swiglu") else "relu" if has("squared-relu") else "gelu_tanh",
        "normalization": "rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm",
        "add_bias_linear": not has("disable-bias-linear"),
        "tie_embeddings": not has("untie-embeddings-and-output-weights"),
    }
    lengths = SequenceLengths(sequence=sequence)
    model: Model
    if kind == "bert":
        model = BertConfig(**fields, norm_placement="pre", embedding_norm=False)
    elif kind == "t5":
        lengths = SequenceLengths(sequence=sequence, decoder_sequence=int(args["decoder-seq-length"]))
        model = T5Config(**fields, position="learned", max_decoder_sequence_length=int(args["decoder-seq-length"]))
    else:
        fields["position"] = "rotary" if args.get("position-embedding-type") == "rope" else "learned"
        if "num-experts" in args:
            top_k = int(args.get("moe-router-topk", 2))
            fields["moe"] = MoEConfig(
                router=RouterConfig(num_experts=int(args["num-experts"]), top_k=top_k, norm_topk_prob=top_k > 1)
            )
        model = GPTConfig(**fields)
    batch, micro = int(row["gbs"]), int(row["mbs"])
    if batch % (sizes.dp * micro):
        return f"its batch ({batch}) is no multiple of {sizes.dp} replicas x {micro} samples"
    run = Run(
        model=model,
        lengths=lengths,
        sizes=sizes,
        global_batch_size=batch,
        micro_batch_size=micro,
        precision="16-mixed" if has("fp16") else "bf16-mixed",
        optimizer=OptimizerConfig(
            kind="distributed" if has("use-distributed-optimizer") else "replicated",
            overlap_grad_reduce=has("overlap-grad-reduce"),
            overlap_param_gather=has("overlap-param-gather") and has("use-distributed-optimizer"),
        ),
        # Megatron Core takes no group that is smaller than the stages.
        group_size=group if vp > 1 and pp > 1 and pp < (group := batch // (sizes.dp * micro)) < 2 * pp else 0,
        framework=MEGATRON,
    )
    return Planned(run=run, gpu=gpu_of(GPUS.get(str(row.get("gpu_type")), "a100-80gb")))


def _golden_layout(args: Mapping[str, str]) -> StageLayout:
    if "pipeline-model-parallel-layout" in args:
        return StageLayout(text=args["pipeline-model-parallel-layout"])
    return StageLayout(
        num_layers_in_first_stage=int(args.get("decoder-first-pipeline-num-layers", 0)),
        num_layers_in_last_stage=int(args.get("decoder-last-pipeline-num-layers", 0)),
        counts_embedding="account-for-embedding-in-pipeline-split" in args,
        counts_head="account-for-loss-in-pipeline-split" in args,
    )
