"""`lightning-megatron plan` of a model of transformers, as it is: what it says is what its dry runs measured."""

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig, PreTrainedConfig

from lightning_megatron.cli import plan_module
from lightning_megatron.cli.main import main
from lightning_megatron.cli.module_run import causal_module, causal_whole
from lightning_megatron.cli.plan_file import model_of_folder
from lightning_megatron.mesh import Sizes
from lightning_megatron.optim.config import OptimizerConfig
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured
from lightning_megatron.planner.model_parts import SequenceLengths
from lightning_megatron.planner.run import Run, RunSettings
from lightning_megatron.planner.search import few_candidates
from tests.cli import test_dry_module
from tests.cli.test_dry_module import RECIPE

# Enough layers for two chunks on each of two ranks.
SMALL = {**test_dry_module.SMALL, "num_hidden_layers": 4}
LLAMA = LlamaConfig(**SMALL, tie_word_embeddings=False)
EXPERTS = MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2)
WIDE = {"hidden_size": 1024, "head_dim": 256, "intermediate_size": 2752, "max_position_embeddings": 2048}
GPT2 = GPT2Config(vocab_size=512, n_embd=64, n_layer=4, n_head=4, n_positions=128)
H100 = gpu_of("h100")
KINDS = ("weights", "gradients", "master weights", "moments")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return folder_of(LLAMA, tmp_path)


def folder_of(config: PreTrainedConfig, path: Path) -> str:
    """A folder with a configuration and nothing else."""
    config.save_pretrained(path)
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], folder: str, layout: str, *args: str) -> Any:
    assert main(["plan", RECIPE, "--model", folder, "--gpu", "h100", "--layout", layout, "--json", *args]) == 0
    return json.loads(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], folder: str, *args: str) -> str:
    assert main(["plan", RECIPE, "--model", folder, "--gpu", "h100", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    [line] = (line for line in captured.err.splitlines() if line.startswith("error: "))
    return line


@pytest.mark.parametrize("layout", ["recipe", "pp=2,mbs=2", "tp=2,pp=2,recompute=full"])
def test_memory_and_flops_are_those_of_a_dry_run(layout: str, llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, llama, layout)
    assert main(["dry-run", RECIPE, "--model", llama, "--layout", layout, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert len(found["memory_bytes"]) == len(ranks) == 2 and found["layers"] == [2, 2]
    for memory, one in zip(found["memory_bytes"], ranks, strict=True):
        by_kind = {kind: memory[kind.replace(" ", "_")] for kind in KINDS}
        assert by_kind == {kind: one["peak_by_kind"].get(kind, 0) for kind in KINDS}
        # Workspaces.
        assert sum(memory[kind] for kind in memory if kind not in ("total", "overhead")) == one["peak_bytes"] + 0.13e9
    [flops] = found["flops"]
    assert flops["convention"] == "executed by this package"
    assert flops["step_flops"] == sum(sum(one["flops"].values()) for one in ranks) * 2


@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "pp": 2}], ids=["alone", "tp2", "tp2 pp2"])
def test_flops_and_states_are_those_of_the_packages_model_of_its_sizes(sizes: dict[str, int], llama: str) -> None:
    settings = RunSettings(
        lengths=SequenceLengths(sequence=64),
        sizes=Sizes(world=4, sequence_parallel="tp" in sizes, **sizes),
        global_batch_size=8,
        optimizer=OptimizerConfig(kind="distributed"),
    )
    own = Run(
        **{field.name: getattr(settings, field.name) for field in fields(settings)}, model=model_of_folder(Path(llama))
    )
    found = measured(settings, causal_module(causal_whole({"path": llama, "from_scratch": True}), settings))
    known = measured(own)
    assert found.flops == known.flops and found.ranks[0].trained == known.ranks[0].trained
    for one, other in zip(found.ranks, known.ranks, strict=True):
        assert one.num_layers == other.num_layers
        for work, of_own in zip(one.passes, other.passes, strict=True):
            assert work.counts["products"] == of_own.counts["products"]
            assert work.counts["attention"] == of_own.counts["attention"]
            # Norms, rotary embeddings and gates are in kernels of their own.
            assert work.counts["moved bytes"] > of_own.counts["moved bytes"]


def test_time_grows_with_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Small layers take as long as the host takes to launch them.
    folder = folder_of(LlamaConfig(**{**SMALL, **WIDE}), tmp_path)

    def seconds(layout: str, *args: str) -> float:
        options = ("--sequence-length", "1024", *args)
        return float(planned(capsys, folder, layout, *options)["seconds"]["compute"])

    plain = seconds("pp=2")
    # Of three products of a linear the forward's runs twice.
    assert 1.2 < seconds("pp=2,recompute=full") / plain < 4 / 3
    assert 2 < seconds("pp=2", "--sequence-length", "2048") / plain < 2.2
    assert seconds("pp=2", "--global-batch-size", "16") == pytest.approx(2 * plain)
    assert 1.5 < seconds("pp=2", "--num-gpus", "2") / seconds("tp=2,pp=2") < 2


def test_a_report_tells_the_model_and_what_was_measured(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", RECIPE, "--model", llama, "--gpu", "h100", "--layout", "recipe", "--tokens", "1e6"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].startswith(
        "LlamaForCausalLM with 0.2545 million parameters, samples of 64 tokens, 8 samples a step"
    )
    assert "HFU " in captured.out and "MFU" not in captured.out and "model FLOPs" not in captured.out
    assert "executed by this package" in captured.out and "days for 1e+06 tokens" in captured.out
    assert "layers of model that are cut" not in captured.err
    record = planned(capsys, llama, "recipe")
    assert record["model"] == "LlamaForCausalLM" and record["checkpoint_bytes"] == 12 * record["parameters"]
    assert record["trained_parameters"] == record["parameters"] and record["fits"]
    parts = record["seconds"]
    whole = sum(parts["exposed"].values()) + sum(parts[name] for name in parts if name != "exposed")
    assert record["step_seconds"] == pytest.approx(whole)


def test_the_time_of_a_step_is_told_by_its_own_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Small layers take as long as the host takes to launch them.
    folder = folder_of(LlamaConfig(**{**SMALL, **WIDE}), tmp_path)
    record = planned(capsys, folder, "tp=2,pp=2", "--explain-time")
    modules = {one["module"]: one for one in record["seconds_by_module"]}
    layer = "model.model.layers.*"
    # Of two layers and eight samples, forward and twice backward.
    assert modules[f"{layer}.mlp.gate_proj"]["flops"] == 2 * 8 * 3 * 2 * 64 * 1024 * 2752 / 2
    assert modules[f"{layer}.self_attn"]["backward_seconds"] > modules[f"{layer}.self_attn"]["forward_seconds"] > 0
    # Its own kernels take all of the compute, and what is outside of modules takes next to none.
    compute = sum(one["forward_seconds"] + one["backward_seconds"] for one in modules.values())
    assert compute == pytest.approx(record["seconds"]["compute"])
    assert sum(modules[""][name] for name in ("forward_seconds", "backward_seconds")) < 0.05 * compute
    exposed = sum(one["exposed_seconds"].get("tp", 0) for one in modules.values())
    assert exposed == pytest.approx(record["seconds"]["exposed"]["tp"])
    args = ("--gpu", "h100", "--num-gpus", "4", "--top", "1", "--explain-time")
    assert main(["plan", RECIPE, "--model", folder, *args]) == 0
    assert f"  {layer}.mlp.gate_proj" in capsys.readouterr().out


def test_experts_wait_for_their_routing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(EXPERTS, tmp_path)
    alone, spread = (planned(capsys, folder, layout) for layout in ("mbs=2", "ep=4,mbs=2"))
    routing = 4 * 2 * fitted().routing_seconds
    assert alone["seconds"]["exposed"]["routing"] == pytest.approx(routing) and "ep" not in alone["seconds"]["exposed"]
    assert spread["seconds"]["exposed"]["ep"] > 0.01 * routing


def test_a_layout_is_measured_once_for_a_configuration(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = planned(capsys, llama, "pp=2", "--cache", str(tmp_path / "cache"))
    runs: list[Any] = []
    monkeypatch.setattr(plan_module, "measured", lambda run, trained: runs.append(run) or measured(run, trained))
    again = partial(planned, capsys, llama, "pp=2", "--cache", str(tmp_path / "cache"))
    assert again() == found and not runs
    folder_of(LlamaConfig(**{**SMALL, "num_hidden_layers": 6}), Path(llama))
    assert again()["layers"] == [3, 3] and len(runs) == 1


def test_a_search_measures_what_it_shows_and_tells_what_the_model_refuses(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = ("--num-gpus", "2", "--global-batch-size", "2")
    args = ["plan", RECIPE, "--gpu", "h100", *two, "--top", "2", "--json"]
    assert main([*args, "--model", llama]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "LlamaForCausalLM" and found["num_fitting"] == 6 and not found["rejected"]
    seconds = [one["step_seconds"] for one in found["layouts"]]
    assert len(seconds) == 2 and seconds == sorted(seconds)
    for one in found["layouts"]:
        again = planned(capsys, llama, one["layout"], *two)
        # Of one layout alone it is told what its time hangs on.
        assert again.pop("notes") == [] and again.pop("step_with_constant_a_tenth_higher")
        assert again.items() <= one.items()
    # Linears of a GPT-2 are none of torch's.
    folder = folder_of(GPT2, tmp_path / "gpt2")
    assert main([*args, "--model", folder]) == 0
    found = json.loads(capsys.readouterr().out)
    [(why, number)] = found["fell_out"].items()
    assert "tensor_model_parallel_size (2) cuts nothing" in why and number == 2
    assert {one["layout"].partition(",")[0] for one in found["layouts"]} == {"tp=1"}


def test_a_search_shares_experts_sequences_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = RunSettings(
        lengths=SequenceLengths(sequence=16384), sizes=Sizes(world=4), global_batch_size=4, precision="32-true"
    )
    found = {}
    for name, config in (("experts", EXPERTS), ("llama", LLAMA)):
        folder = folder_of(config, tmp_path / name)
        size = causal_module(causal_whole({"path": folder, "from_scratch": True}), settings).size()
        tried = list(few_candidates(settings, H100, size))
        found[name] = {axis: {getattr(run.sizes, axis) for run in tried} for axis in ("tp", "cp", "pp", "vp", "ep")}
        assert all(run.sizes.ep == 1 or run.sizes.etp == run.sizes.tp for run in tried)
        assert all(run.sizes.vp == 1 or run.sizes.pp * run.sizes.vp <= 4 for run in tried)
    assert found["llama"] == {"tp": {1, 2, 4}, "cp": {1, 2, 4}, "pp": {1, 2, 4}, "vp": {1, 2}, "ep": {1}}
    assert found["experts"] == found["llama"] | {"ep": {1, 2, 4}}
    args = ("--num-gpus", "2", "--global-batch-size", "2", "--gpu", "h100", "--top", "9", "--json")
    assert main(["plan", RECIPE, "--model", str(tmp_path / "experts"), *args]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    # Two layouts may take equally long.
    [(layout, seconds)] = (
        (text, one["step_seconds"]) for one in layouts for text in (one["layout"], *one["alike"]) if "ep=2" in text
    )
    again = planned(capsys, str(tmp_path / "experts"), layout, *args[:4])
    assert again["step_seconds"] == pytest.approx(seconds, rel=1e-3)
    assert again["published_over_predicted"]["has_experts"]


@pytest.mark.parametrize(
    ("config", "args", "words"),
    [
        (LLAMA, ("--layout", "pp=8", "--num-gpus", "8"), "cannot be pipelined over 8 stages"),
        (GPT2, ("--layout", "tp=2"), "tensor_model_parallel_size (2) cuts nothing of CausalModule"),
        (LLAMA, ("--layout", "mbs=2,recompute=full"), "recompute granularity ('full') needs a model of parts"),
        (LLAMA, ("--layout", "pp=2,mbs=3"), "global_batch_size (8)"),
        (LLAMA, ("--layout", "recipe", "--document-lengths", "median=7,sigma=1"), "leave out dynamic_context"),
        (
            LLAMA,
            ("--memory-gb", "0.1", "--num-gpus", "2", "--global-batch-size", "2"),
            "no layout on 2 x h100 fits in 0.1 GB; 1.",
        ),
        (None, ("--layout", "recipe"), "has no configuration that this version of transformers reads"),
    ],
)
def test_what_cannot_be_planned_is_told(
    config: PreTrainedConfig | None,
    args: tuple[str, ...],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert words in told(capsys, str(tmp_path) if config is None else folder_of(config, tmp_path), *args)
