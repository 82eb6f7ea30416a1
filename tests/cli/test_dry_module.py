"""A dry run of a model of transformers, as it is, against real ranks that train it and against torch's own counts."""

import json
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    JetMoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from lightning_megatron.cli.dry_module import META, DryModule, WholeModule
from lightning_megatron.cli.main import main
from lightning_megatron.cli.module_run import causal_module, causal_whole
from lightning_megatron.cli.planned_optimizer import recipe_optimizer
from lightning_megatron.lightning_modules import AdamWConfig, CausalModule
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner import memory_tracker
from lightning_megatron.planner.dry_run import DryRun, DryRuns, dry_run, global_rank
from lightning_megatron.planner.memory_tracker import OTHERS, MemoryTracker
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.output_shapes import OutputShapes
from lightning_megatron.planner.run import RunSettings
from lightning_megatron.planner.step_work import PLAIN_ADAMW, MakeOptimizer
from lightning_megatron.precision.fp8 import Fp8Config
from lightning_megatron.transformer.lora import LoraConfig
from lightning_megatron.transformer.recompute import RecomputeConfig
from tests.harness.ranks import run_on_ranks
from tests.harness.sample import every_nth
from tests.trainer.layouts import Layout, make_trainer

RECIPE = str(Path(__file__).resolve().parents[2] / "recipes" / "configs" / "hf_toy.yaml")
TOKENS, ROWS, NUM_MICROBATCHES = 64, 2, 2
DISTRIBUTED = OptimizerConfig(kind="distributed")
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
QWEN = Qwen3Config(**SMALL, tie_word_embeddings=True)
# Two chunks on each of two ranks.
CHUNKED = Qwen3Config(**{**SMALL, "num_hidden_layers": 4}, tie_word_embeddings=True)
GROUPED = Qwen3Config(**{**SMALL, "num_key_value_heads": 2})
WINDOWS = Gemma2Config(**SMALL, sliding_window=16, attn_implementation="sdpa")
# Every expert gets every token, so that a dry run, which shares them evenly, is right of numbers too.
EXPERTS = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=4)
JETMOE = JetMoeConfig(
    vocab_size=512, hidden_size=64, num_hidden_layers=2, num_key_value_heads=2, kv_channels=16, intermediate_size=32
)
ALONE = ("--layout", "pp=1", "--world-size", "1")
GPT2 = GPT2Config(
    vocab_size=512,
    n_embd=64,
    n_layer=2,
    n_head=4,
    n_positions=128,
    bos_token_id=0,
    eos_token_id=0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
)


def folder_of(config: PreTrainedConfig, path: Path) -> str:
    """A folder with a configuration and nothing else."""
    config.save_pretrained(path)
    return str(path)


def run_of(layout: Layout, precision: str = "32-true", **changes: Any) -> RunSettings:
    sizes = Sizes(
        world=layout.world, tp=layout.tp, pp=layout.pp, vp=layout.vp, ep=layout.ep, sequence_parallel=layout.sp
    )
    return RunSettings(
        lengths=SequenceLengths(sequence=TOKENS),
        sizes=sizes,
        global_batch_size=sizes.dp * NUM_MICROBATCHES * ROWS,
        micro_batch_size=ROWS,
        precision=precision,
        optimizer=layout.optimizer,
        is_collective=layout.collective,
        **changes,
    )


@lru_cache(maxsize=4)
def module_of(folder: str, run: RunSettings, lora: LoraConfig | None) -> DryModule:
    """What all ranks of a run share."""
    return causal_module(causal_whole({"path": folder, "lora": lora}), run)


def found_by(folder: str, run: RunSettings, rank: int = 0, lora: LoraConfig | None = None) -> DryRun:
    return dry_run(run, rank, full_model=module_of(folder, run, lora))


class Held(L.Callback):
    """Measures what a rank holds in its second and third step, by kind, and the lower of their peaks."""

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.tracker, self.bytes_by_kind, self.peaks = MemoryTracker(torch.device("cpu")), dict[str, int](), list[int]()
        self.tracker.__enter__()
        self.name(trainer)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.name(trainer)
            self.tracker.take_peak()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.peaks.append(sum(self.tracker.take_peak().values()))
        self.bytes_by_kind = {kind: sum(sizes.values()) for kind, sizes in self.kinds(trainer).items()}

    @property
    def peak_bytes(self) -> int:
        # A thread of gloo now and then lets go of what it has sent later than the step does.
        return min(self.peaks[1:])

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.tracker.__exit__(None, None, None)

    def name(self, trainer: L.Trainer) -> None:
        for kind, tensors in self.tensors(trainer).items():
            self.tracker.name(kind, iter(tensors))

    def kinds(self, trainer: L.Trainer) -> dict[str, dict[int, int]]:
        """Bytes of storages by kind, none of them twice, rounded up as by CUDA's allocator."""
        seen: set[int] = set()
        found: dict[str, dict[int, int]] = {}
        for kind, tensors in self.tensors(trainer).items():
            storages = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
            found[kind] = {key: -(-size // 512) * 512 for key, size in storages.items() if key not in seen}
            seen |= storages.keys()
        return found

    def tensors(self, trainer: L.Trainer) -> dict[str, list[Tensor]]:
        gradients = trainer.strategy._run.dp_comm.gradients  # type: ignore[attr-defined]
        [optimizer] = trainer.optimizers
        # Beside a GPU the host has the number of the step.
        state = [one for values in optimizer.state.values() for one in values.values() if one.dim()]
        return {
            "weights": [param.parameter.data for param in gradients.params],
            "gradients": [bucket.gradient for bucket in gradients.buckets],
            "master weights": [shard.tensor.data for shard in gradients.param_shards],
            "moments": state,
        }


class Products(OutputShapes):
    """Counts products of 8 bits."""

    num_fp8 = 0

    def output_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        Products.num_fp8 += func.overloadpacket is torch.ops.aten._scaled_mm
        return super().output_of(func, args, kwargs)


def trained(
    folder: str, layout: Layout, precision: str, lora: LoraConfig | None, make_optimizer: MakeOptimizer = PLAIN_ADAMW
) -> tuple[int, dict[str, int], int]:
    """Global rank, and what it held once moments were there: by kind, and at its peak."""
    torch.manual_seed(0)
    # Adapters are of a model with weights.
    held, module = Held(), CausalModule(folder, from_scratch=lora is None, lora=lora)
    module.configure_optimizers = lambda: make_optimizer(module)  # type: ignore[method-assign]
    rows = ROWS * NUM_MICROBATCHES
    ids = torch.randint(0, 512, (3 * rows, TOKENS), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"tokens": x, "labels": x, "loss_mask": torch.ones(TOKENS)} for x in ids], batch_size=rows)
    trainer = make_trainer(
        layout, max_epochs=1, precision=precision, callbacks=[held], limit_val_batches=0, gradient_clip_val=1.0
    )
    trainer.fit(module, loader, loader)
    return trainer.strategy.global_rank, held.bytes_by_kind, held.peak_bytes  # type: ignore[attr-defined]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("config", "layout", "precision", "lora"),
    every_nth(
        [
            (QWEN, Layout(world=2, tp=2, sp=True, microbatches=NUM_MICROBATCHES), "32-true", None),
            (QWEN, Layout(world=2, pp=2, microbatches=NUM_MICROBATCHES), "32-true", None),
            (QWEN, Layout(world=2, microbatches=NUM_MICROBATCHES, optimizer=DISTRIBUTED), "bf16-mixed", None),
            # In the dtype of its file a weight on a CPU is a part of the file.
            (
                QWEN,
                Layout(world=2, microbatches=NUM_MICROBATCHES, optimizer=DISTRIBUTED),
                "bf16-true",
                LoraConfig(rank=4),
            ),
            (QWEN, Layout(world=2, pp=2, microbatches=NUM_MICROBATCHES, collective=True), "32-true", None),
            (EXPERTS, Layout(world=2, ep=2, microbatches=NUM_MICROBATCHES), "32-true", None),
            (EXPERTS, Layout(world=2, tp=2, microbatches=NUM_MICROBATCHES), "32-true", None),
            (EXPERTS, Layout(world=2, pp=2, microbatches=NUM_MICROBATCHES), "32-true", None),
        ],
        2,
    ),
)
def test_a_rank_holds_the_bytes_of_a_real_one(
    config: PreTrainedConfig, layout: Layout, precision: str, lora: LoraConfig | None, tmp_path: Path
) -> None:
    folder = folder_of(config, tmp_path)
    if lora is not None:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    run = run_of(layout, precision)
    for rank, by_kind, peak_bytes in run_on_ranks(2, trained, folder, layout, precision, lora, init=False):
        dry = found_by(folder, run, rank, lora)
        kinds = {kind: size for kind, size in dry.peak_by_kind.items() if kind != OTHERS}
        assert kinds == {kind: size for kind, size in by_kind.items() if size}
        # The numbers of the optimizer's step, one for each weight, are on the host beside a GPU.
        assert dry.peak_bytes == pytest.approx(peak_bytes, rel=0.02)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chosen", "layout"),
    every_nth(
        [
            ("torch.optim.Adafactor", Layout(world=2, tp=2, microbatches=NUM_MICROBATCHES)),
            (
                {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}},
                Layout(world=2, microbatches=NUM_MICROBATCHES, optimizer=DISTRIBUTED),
            ),
            ("lightning_megatron.optim.muon.Muon", Layout(world=2, tp=2, microbatches=NUM_MICROBATCHES)),
            (
                "lightning_megatron.optim.muon.Muon",
                Layout(world=2, microbatches=NUM_MICROBATCHES, optimizer=DISTRIBUTED),
            ),
            (
                {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
                Layout(world=2, pp=2, microbatches=NUM_MICROBATCHES),
            ),
        ],
        2,
    ),
)
def test_a_rank_holds_the_states_of_its_real_optimizer(chosen: Any, layout: Layout, tmp_path: Path) -> None:
    folder, make = folder_of(QWEN, tmp_path), recipe_optimizer(AdamWConfig(), chosen)
    run = run_of(layout, make_optimizer=make)
    for rank, by_kind, _ in run_on_ranks(2, trained, folder, layout, "32-true", None, make, init=False):
        dry = found_by(folder, run, rank)
        kinds = {kind: size for kind, size in dry.peak_by_kind.items() if kind != OTHERS}
        assert kinds == {kind: size for kind, size in by_kind.items() if size}
        # AdamW has two moments of each weight that a rank steps.
        assert kinds.get("moments", 0) < 1.5 * kinds["gradients"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("config", "precision", "fp8"),
    every_nth(
        [
            (QWEN, "32-true", None),
            (GPT2, "32-true", None),
            (WINDOWS, "32-true", None),
            (EXPERTS, "32-true", None),
            (GPT2, "bf16-mixed", None),
            (WINDOWS, "bf16-mixed", None),
            # In 32 bits GPUs have no kernel for groups, and CPUs do.
            (GROUPED, "bf16-mixed", None),
            (GROUPED, "bf16-true", None),
            (QWEN, "bf16-mixed", Fp8Config()),
            (QWEN, "bf16-true", Fp8Config(scaling="delayed")),
            (EXPERTS, "32-true", Fp8Config(scaling="mxfp8")),
        ],
        2,
    ),
)
def test_tensors_without_numbers_take_the_memory_of_real_ones(
    config: PreTrainedConfig, precision: str, fp8: Fp8Config | None, tmp_path: Path
) -> None:
    folder, run = folder_of(config, tmp_path), run_of(Layout(optimizer=DISTRIBUTED), precision, fp8=fp8)
    module = module_of(folder, run, None)
    drawn = DryModule(WholeModule(partial(CausalModule, folder, from_scratch=True), None), module.batch, run)
    dry = dry_run(run, 0, full_model=module)
    real = dry_run(run, 0, full_model=drawn, device=torch.device("cpu"))
    # Beside a GPU the host has the number of each weight's step.
    on_host = 512 * sum(1 for _ in module.build(Mesh.single(), META).parameters())
    assert dry.peak_bytes == pytest.approx(real.peak_bytes - on_host, rel=0.001)
    assert dry.flops == real.flops


def flops_of_torch(config: PreTrainedConfig, attention: str) -> float:
    """FLOPs of a step of the plain model by torch's counter, which knows nothing of fused attention on a CPU."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        for _ in range(NUM_MICROBATCHES):
            model(input_ids=ids, labels=ids).loss.backward()
    return float(counter.get_total_flops())


@pytest.mark.matrix
def test_ranks_multiply_what_the_plain_model_does(tmp_path: Path) -> None:
    products, with_scores = (flops_of_torch(QWEN, attention) for attention in ("sdpa", "eager"))
    folder = folder_of(QWEN, tmp_path)
    layouts = (Layout(world=2, tp=2, sp=True), Layout(world=4, tp=2, pp=2), Layout(world=2, pp=2), Layout())
    for layout in every_nth(layouts, 2):
        ranks = [found_by(folder, run_of(layout), rank) for rank in range(layout.world)]
        assert sum(one.flops["products"] for one in ranks) == products > 0
        # A causal query needs half of the pairs.
        assert sum(one.flops["attention"] for one in ranks) == (with_scores - products) / 2 > 0


LAYERS: dict[str, PreTrainedConfig] = {
    "Llama": LlamaConfig(**{**SMALL, "num_hidden_layers": 8}),
    "Qwen3-MoE": Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 8}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    # Windows of 16 tokens in two layers of three.
    "Gemma 3": Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 24},
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 8,
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "layout", every_nth([Layout(), Layout(world=4, tp=2, pp=2, sp=True), Layout(world=4, pp=2, vp=2)], 2)
)
def test_few_layers_stand_for_all(name: str, layout: Layout, tmp_path: Path) -> None:
    folder, run = folder_of(LAYERS[name], tmp_path), run_of(layout, "bf16-mixed")
    assert len(set(causal_whole({"path": folder}).layer_kinds.values())) == (2 if name == "Gemma 3" else 1)
    require_few_like_all(folder, run)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "recompute"),
    every_nth(
        [
            (Layout(world=4, tp=2, pp=2, sp=True), RecomputeConfig(granularity="full")),
            (Layout(world=2, pp=2), RecomputeConfig(offload=True)),
            (Layout(world=4, tp=2, pp=2), RecomputeConfig(granularity="full")),
            (Layout(world=4, pp=2, vp=2), RecomputeConfig(granularity="full")),
        ],
        2,
    ),
)
def test_few_recomputed_layers_stand_for_all(layout: Layout, recompute: RecomputeConfig, tmp_path: Path) -> None:
    run = run_of(layout, "bf16-mixed", recompute=recompute)
    # The memory of long rows peaks in a backward.
    long = replace(run, lengths=SequenceLengths(sequence=1024))
    require_few_like_all(folder_of(LAYERS["Llama"], tmp_path), long)


def require_few_like_all(folder: str, run: RunSettings) -> None:
    whole, found = causal_whole({"path": folder}), {}
    kinds = whole.layer_kinds
    for is_shallow in (True, False):
        # Where nobody knows what layers are, all run.
        whole.__dict__["layer_kinds"] = kinds if is_shallow else {}
        runs = DryRuns(run, causal_module(whole, run))
        found[is_shallow] = [runs.of(global_rank(run, rank, 0)) for rank in range(run.sizes.pp)]
        assert not runs.are_deep
    for few, all_ in zip(found[True], found[False], strict=True):
        assert few.peak_bytes == pytest.approx(all_.peak_bytes, rel=0.001)
        assert few.flops == all_.flops and few.messages == all_.messages


def test_recomputed_layers_take_less_and_multiply_more(tmp_path: Path) -> None:
    folder = folder_of(QWEN, tmp_path)
    layout = Layout(world=2, pp=2)
    plain, again = (
        found_by(folder, run_of(layout, "bf16-mixed", recompute=RecomputeConfig(granularity=kind)), 1)
        for kind in ("none", "full")
    )
    assert again.peak_bytes < plain.peak_bytes
    # Of three products of a linear the forward's runs twice, but for that of a layer's last linear.
    assert 5 / 4 < again.flops["products"] / plain.flops["products"] < 4 / 3


def test_schedules_run_it(tmp_path: Path) -> None:
    folder, flops = folder_of(CHUNKED, tmp_path), []
    for schedule, vp in (("1f1b", 1), ("zb_h1", 1), ("interleaved", 2)):
        run = run_of(Layout(world=2, pp=2, vp=vp), schedule_name=schedule)
        flops.append([found_by(folder, run, rank).flops for rank in range(2)])
    assert flops[0] == flops[1] == flops[2]


def test_a_plan_in_a_recipe_is_one_of_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(Path(RECIPE).read_text())
    held, folder, file = [], folder_of(QWEN, tmp_path), tmp_path / "recipe.yaml"
    for plan in ({}, {"styles": {"model.model.layers.*.mlp.up_proj": "replicate"}}):
        recipe["trainer"]["strategy"]["init_args"]["plan"] = plan
        file.write_text(yaml.safe_dump(recipe))
        assert main(["dry-run", str(file), "--model", folder, "--rank", "0", "--json"]) == 0
        held.append(json.loads(capsys.readouterr().out)["ranks"][0]["parameters"])
    # A layer keeps the halves of three linears that other ranks have without the plan.
    assert held[1] - held[0] == 3 * 64 * 160 / 2
    recipe["trainer"]["strategy"]["init_args"]["plan"] = {"layers": ["model.model.no"]}
    file.write_text(yaml.safe_dump(recipe))
    assert main(["dry-run", str(file), "--model", folder]) == 2
    assert "plan layers ('model.model.no') is no module of CausalModule" in capsys.readouterr().err


def test_linears_of_layers_multiply_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(QWEN, tmp_path)
    monkeypatch.setattr(memory_tracker, "OutputShapes", Products)
    for layout, num_layers in ((Layout(), 2), (Layout(world=2, tp=2), 2), (Layout(world=2, pp=2), 1)):
        plain = found_by(folder, run_of(layout, "bf16-mixed"))
        monkeypatch.setattr(Products, "num_fp8", 0)
        fp8 = found_by(folder, run_of(layout, "bf16-mixed", fp8=Fp8Config()))
        assert fp8.flops == plain.flops
        # Each of a layer's 7 linears multiplies twice in the backward. Some microbatches run before those that count.
        num_runs, others = divmod(Products.num_fp8, 3 * 7 * num_layers)
        assert num_runs >= NUM_MICROBATCHES and not others


def test_an_engine_of_the_packages_own_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = yaml.safe_load(Path(RECIPE).read_text()), tmp_path / "recipe.yaml"
    recipe["trainer"]["precision"] = "transformer-engine"
    file.write_text(yaml.safe_dump(recipe))
    assert main(["dry-run", str(file), "--model", folder_of(QWEN, tmp_path)]) == 2
    assert "fp8 engine 'transformer_engine' runs layers of this package's models" in capsys.readouterr().err


def test_adapters_of_a_recipe_are_those_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, folder, file = yaml.safe_load(Path(RECIPE).read_text()), folder_of(QWEN, tmp_path), tmp_path / "recipe.yaml"
    args = ["dry-run", str(file), "--model", folder, *ALONE]

    def told(**model: Any) -> str:
        file.write_text(yaml.safe_dump({**recipe, "model": model}))
        assert main(args) == 2
        return capsys.readouterr().err

    file.write_text(yaml.safe_dump({**recipe, "model": {"from_scratch": False, "lora": {"rank": 4}}}))
    assert main([*args, "--json"]) == 0
    [rank] = json.loads(capsys.readouterr().out)["ranks"]
    # Two moments of 2 layers in 4 bytes: of each linear A has 4 rows and B 4 columns.
    assert rank["peak_by_kind"]["moments"] == 2 * 2 * 4 * 4 * (4 * (64 + 64) + 3 * (64 + 160))
    assert "lora freezes the model's weights, and from_scratch draws" in told(from_scratch=True, lora={"rank": 4})
    assert "lora target 'v_pro' is no module of a Qwen3ForCausalLM" in told(
        from_scratch=False, lora={"targets": ["v_pro"]}
    )
    recipe["data"]["packing"] = "documents"
    assert "the masks of rows of several documents follow from their numbers" in told(from_scratch=True)


def test_a_recipe_runs_dry_from_a_configuration_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(QWEN, tmp_path)
    assert main(["dry-run", RECIPE, "--model", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sizes"]["tp"] == found["sizes"]["pp"] == 2
    whole = sum(one.numel() for one in AutoModelForCausalLM.from_config(QWEN).parameters())
    first, last = found["ranks"]
    # The tied table, cut over tp, is on both stages.
    assert first["parameters"] + last["parameters"] > whole / 2
    assert {one["kind"] for one in first["messages"]} >= {"send", "all-gather", "reduce-scatter"}


def test_a_step_of_all_microbatches_hands_logits_to_all_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, file = yaml.safe_load(Path(RECIPE).read_text()), tmp_path / "recipe.yaml"
    recipe["trainer"]["strategy"]["init_args"]["pipeline"] = {"mode": "collective"}
    file.write_text(yaml.safe_dump(recipe))
    args = ["dry-run", str(file), "--model", folder_of(QWEN, tmp_path), "--json"]
    assert main(args) == 0
    found = json.loads(capsys.readouterr().out)
    # Each stage of a call of all rows has the logits of 8 / 2 rows of 64 tokens, and its loss.
    for rank in found["ranks"]:
        [sent] = (one for one in rank["messages"] if (one["axis"], one["kind"]) == ("pp", "broadcast"))
        assert sent["number"] >= 2 and sent["tensor_bytes"] > 4 * 64 * 512 * 4
    assert not any("not planned" in note for note in found["notes"])
    # On another layout it is the recipe's only where that says so.
    assert main([*args, "--layout", "pp=2,schedule=recipe", "--world-size", "2"]) == 0
    assert "broadcast" in capsys.readouterr().out
    assert main([*args, "--layout", "pp=2", "--world-size", "2"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert "all microbatches in one call" in plain["notes"][0] and "broadcast" not in json.dumps(plain["ranks"])


def test_what_an_unchanged_model_holds_is_told_by_its_own_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--model", folder_of(QWEN, tmp_path), "--rank", "0", "--explain"]
    assert main(["dry-run", RECIPE, *args, "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["ranks"]
    assert sum(tensors["num_bytes"] for tensors in one["held_at_peak"]) == one["peak_bytes"]
    lines = {tensors["line"].partition(":")[0] for tensors in one["held_at_peak"] if ".layers.*" in tensors["module"]}
    assert "transformers/models/qwen3/modeling_qwen3.py" in lines


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        (GPT2, (), "tensor_model_parallel_size (2) cuts nothing of CausalModule"),
        (QWEN, ("--layout", "pp=4,vp=2", "--world-size", "4"), "cannot be pipelined over 8 stages"),
        (Qwen3Config(**{**SMALL, "hidden_size": 72}), ("--fp8", *ALONE), "must have multiples of 16 both ways for fp8"),
        (QWEN, ("--recompute", "selective"), "recompute part 'core_attention' cannot act"),
        (QWEN, ("--recompute", "full", "--layout", "mbs=2"), "recompute granularity ('full') needs a model of parts"),
        (Qwen3Config(**SMALL, hidden_act="no"), (), "the model cannot be made on the meta device: KeyError: 'no'"),
        (GPT2, (*ALONE, "--sequence-length", "130"), "rows of a batch (130 tokens) are longer than the 128 positions"),
        (JETMOE, ALONE, "the model does not run on tensors without numbers: RuntimeError: split_with_sizes expects"),
        (None, (), "has no configuration that this version of transformers reads"),
    ],
)
def test_what_does_not_run_dry_is_told(
    config: PreTrainedConfig | None,
    args: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(tmp_path) if config is None else folder_of(config, tmp_path)
    assert main(["dry-run", RECIPE, "--model", folder, *args]) == 2
    assert words in capsys.readouterr().err
