"""`lightning-megatron plan` as a user types it, and what it says to mistakes."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.cli.plan_picture import plan_panels
from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.cli.recipe_reader import PRETRAINING
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.mesh import Sizes
from lightning_megatron.metrics.timeline_figure import AreaPanel, Panel
from lightning_megatron.planner.estimate import estimate
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.measured import measured_levels
from lightning_megatron.planner.model_parts import model_parts_of
from lightning_megatron.planner.presets import PRESETS
from lightning_megatron.planner.run import Run
from tests.harness.sample import every_nth

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
GPT_1T = str(CONFIGS / "gpt_1t.yaml")


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 0
    return capsys.readouterr().out


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def record(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    return json.loads(printed(capsys, *args, "--json"))


# Layers that its stages do not divide, of a batch so small that there are few layouts.
UNEVEN = ("llama3_8b", "--gpu", "h100", "--num-gpus", "6", "--global-batch-size", "6", "--memory-gb", "72")


def test_a_search_shows_what_fits_best_first_and_explains_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *UNEVEN, "--top", "3", "--tokens", "1e12")
    assert "layouts fit on h100, fastest first" in text and "fell out" in text
    # Three of the list, the nearest three that fell out, and what is explained.
    assert text.count("mbs=") == 7 and "days for 1e+12 tokens" in text
    assert "causal attention half" in text and "master weights" in text


def test_two_runs_are_printed_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--num-gpus", "8", "--layout", "tp=8,mbs=1", "--global-batch-size", "8")
    both = record(capsys, "llama3_70b", "--compare", "llama3_8b", *args)
    alone = {name: record(capsys, name, *args) for name in ("llama3_8b", "llama3_70b")}
    assert [one.pop("config") for one in both] == list(alone) and both == list(alone.values())
    rows = {
        cells[0]: cells[1:]
        for line in printed(capsys, "llama3_70b", "--compare", "llama3_8b", *args).splitlines()
        if len(cells := re.split(r"  +", line.strip())) > 2
    }
    seconds = [one["step_seconds"] for one in both]
    assert rows["run"] == list(alone) and rows["fits"] == ["yes, of 80 GB", "no, of 80 GB"]
    assert rows["step, s"] == [*(f"{one:.4g}" for one in seconds), f"x {seconds[1] / seconds[0]:.3g}"]
    assert rows["fullest rank, GB"][:2] == [f"{one['memory_bytes'][0]['total'] / 1e9:.2f}" for one in both]


def test_a_comparison_takes_the_layouts_of_recipes_and_says_whose_mistake_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = str(CONFIGS / "toy.yaml")
    both = record(capsys, str(CONFIGS / "bert_toy.yaml"), "--compare", recipe, "--gpu", "h100")
    assert [one["sizes"]["world"] for one in both] == [
        record(capsys, one["config"], "--gpu", "h100", "--layout", "recipe")["sizes"]["world"] for one in both
    ]
    args = ("--compare", "llama3_8b", "--gpu", "h100")
    assert "llama3_8b has no layout of its own" in shown(capsys, recipe, *args, "--num-gpus", "8")
    assert "no_such" in shown(capsys, "no_such.yaml", "--compare", recipe, "--gpu", "h100")
    for option, value in (("--top", "3"), ("--out", "plan.svg")):
        assert f"{option} ({value}) has no effect with --compare" in shown(capsys, recipe, *args, option, value)
    for option in ("--explain", "--explain-time"):
        assert f"{option} (True) has no effect with --compare" in shown(capsys, recipe, *args, option)


def test_mistakes_of_options_are_told_together(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--gpu", "h10", "--num-gpus", "-8", "--memory-gb", "nan", "--layout", "tp=2", "--top", "3", "--out", "a.b")
    text = shown(capsys, "llama3_8b", *wrong)
    for told in ("GPU 'h10' is not", "--num-gpus (-8)", "--memory-gb (nan) must be", "--top (3) is for", "--out (a.b)"):
        assert told in text


def test_a_comparison_takes_options_that_one_of_the_two_has(capsys: pytest.CaptureFixture[str]) -> None:
    t5, bert, gpt = (str(CONFIGS / f"{name}.yaml") for name in ("t5_toy", "bert_toy", "toy"))
    args = ("--gpu", "h100", "--decoder-sequence-length")
    length = record(capsys, t5, "--gpu", "h100", "--layout", "recipe")["notes"]
    both = record(capsys, t5, "--compare", bert, *args, "64")
    assert both[0]["notes"][-1] == "without --decoder-sequence-length, which is for the other run"
    assert both[1]["notes"] == length and both[1]["model"] == "T5"
    alone = record(capsys, t5, *args, "64", "--layout", "recipe")
    assert both[1]["step_seconds"] == alone["step_seconds"]
    assert "--decoder-sequence-length (64) is that of a T5" in shown(capsys, gpt, "--compare", bert, *args, "64")


def test_the_recipe_of_a_trillion_parameters_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    told_of = record(capsys, GPT_1T, "--gpu", "a100", "--layout", "recipe", "--tokens", "450e9")
    assert told_of["parameters"] == pytest.approx(1008e9, rel=0.001)
    assert told_of["sizes"] == {
        "world": 3072,
        "tp": 8,
        "pp": 64,
        "vp": 1,
        "cp": 1,
        "dp": 6,
        "ep": 1,
        "etp": 1,
        "edp": 48,
    }
    assert told_of["fits"] and len(told_of["memory_bytes"]) == 64 and 60 < told_of["days"] < 110
    assert sum(told_of["memory_bytes"][0][kind] for kind in told_of["memory_bytes"][0] if kind != "total") == (
        pytest.approx(told_of["memory_bytes"][0]["total"])
    )


# A plan knows this package's models alone, and not those that pretrain_hf.py trains as they are, nor two in one run.
OWN = [path for path in sorted(CONFIGS.glob("*.yaml")) if not path.stem.startswith(("hf_", "distill_", "dpo_"))]


@pytest.mark.matrix
@pytest.mark.parametrize("path", every_nth(OWN[::-1], 12), ids=lambda path: path.stem)
def test_every_shipped_recipe_with_a_model_is_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = yaml.safe_load(path.read_text())
    args = [str(path), "--gpu", "h100", "--layout", "recipe"]
    if "path" in recipe["model"] and "config" not in recipe["model"]:
        assert "give the model by --model" in shown(capsys, *args)
        models = {"finetune_t5_toy": "t5_11b", "finetune_toy": "gpt2_124m", "packed_toy": "gpt2_124m"}
        args += ["--model", models.get(path.stem, "llama3_8b")]
    planned = record(capsys, *args)
    is_toy_of_11b = path.stem == "finetune_t5_toy"
    assert planned["step_seconds"] > 0
    assert planned["fits"] != is_toy_of_11b, "a recipe that is shipped runs on GPUs of 80 GB"
    kinds = {"bert": "BERT", "t5": "T5", "llava": "LLaVA", "megatron": "BERT"}
    assert planned["model"] == ("T5" if is_toy_of_11b else kinds.get(path.stem.partition("_")[0], "GPT"))
    is_whole = "frozen" not in recipe["model"] and "lora" not in recipe["model"] and planned["model"] != "LLaVA"
    assert (planned["trained_parameters"] == planned["parameters"]) == is_whole


def test_lora_adapters_on_frozen_weights_need_less_and_take_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "tp=2,mbs=1", "--global-batch-size", "16", "--model", "llama3_8b")
    lora = record(capsys, str(CONFIGS / "finetune_llama3_8b_lora.yaml"), *args)
    whole = record(capsys, str(CONFIGS / "finetune_llama3_8b.yaml"), *args)
    # Of each linear what goes in and what comes out; of these two ranks share 6144, 4096, 28672 and 14336.
    assert lora["trained_parameters"] == 32 * 64 * ((4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096))
    assert lora["parameters"] == whole["parameters"] + lora["trained_parameters"]
    assert lora["memory_bytes"][0]["moments"] == 8 * 32 * 64 * (4 * 4096 + (6144 + 4096 + 28672 + 14336) / 2)
    assert lora["step_seconds"] < whole["step_seconds"]
    assert lora["checkpoint_bytes"] == 4 * lora["parameters"] + 8 * lora["trained_parameters"]


def changed(tmp_path: Path, name: str, **changes: Any) -> str:
    """A file of the recipe of that name, with other values where a dotted name leads."""
    recipe = yaml.safe_load((CONFIGS / name).read_text())
    # What takes many operations, which are measured one by one.
    for option, few in (("attention_dropout", 0.0), ("num_layers", 2)):
        if option in recipe["model"].get("config", {}):
            recipe["model"]["config"][option] = few
    for dotted, value in changes.items():
        *path, last = dotted.split(".")
        table = recipe
        for step in path:
            table = table[step]
        table[last] = value
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(recipe))
    return str(tmp_path / "changed.yaml")


def test_an_optimizer_is_planned_by_its_own_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "recipe")

    def planned(name: str, **init: Any) -> Any:
        optimizer = {"optimizer": {"class_path": name, "init_args": {"lr": 0.1, **init}}} if name else {}
        found = record(capsys, changed(tmp_path, "toy.yaml", **optimizer), *args)
        assert not any("not planned" in note for note in found["notes"])
        return found["memory_bytes"][0]["moments"], found["seconds"]["optimizer"]

    adamw, momentum = planned(""), planned("torch.optim.SGD", momentum=0.9)
    assert momentum[0] == pytest.approx(adamw[0] / 2, rel=0.01)
    # Reads and writes of a weight, its gradient and its states: 5 numbers for 7.
    assert momentum[1] == pytest.approx(adamw[1] * 5 / 7, rel=0.01)
    assert planned("torch.optim.SGD")[0] == 0
    assert planned("torch.optim.Adafactor")[0] < adamw[0] / 50
    muon = record(capsys, changed(tmp_path, "toy.yaml", **{"model.optimizer.matrix_optimizer": "muon"}), *args)
    # Matrices have one moment, and are multiplied.
    assert 0.5 * adamw[0] < muon["memory_bytes"][0]["moments"] < 0.8 * adamw[0]
    assert muon["seconds"]["optimizer"] > 1.2 * adamw[1]


def test_an_optimizer_that_cannot_be_planned_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "recipe")
    fused = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1, "fused": True}}
    [note] = record(capsys, changed(tmp_path, "toy.yaml", optimizer=fused), *args)["notes"][-1:]
    assert note.startswith("not planned: optimizer (torch.optim.AdamW), which does not step tensors without numbers (")
    assert note.endswith("): its states count as AdamW's")
    wrong = {"class_path": "torch.optim.SGD", "init_args": {"lr": -1.0}}
    assert "Invalid learning rate: -1.0" in shown(capsys, changed(tmp_path, "toy.yaml", optimizer=wrong), *args)
    unknown = changed(tmp_path, "toy.yaml", optimizer={"class_path": "torch.optim.Nothing"})
    assert "Nothing" in shown(capsys, unknown, *args)
    # It looks at all weights, and a rank has some of them.
    (tmp_path / "whole.py").write_text("import torch\n\nclass Whole(torch.optim.SGD):\n    pass\n")
    cut = {"trainer.strategy.init_args": {"tensor_model_parallel_size": 2}}
    own = changed(tmp_path, "toy.yaml", **cut, optimizer={"class_path": "whole.Whole", "init_args": {"lr": 0.1}})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert "Whole is none of torch's own, and tensor parallelism cuts matrices" in shown(capsys, own, *args)


def test_a_report_begins_with_what_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (("--layout", "recipe"), ("--num-gpus", "2", "--top", "1")):
        lines = printed(capsys, str(CONFIGS / "bert_large.yaml"), "--gpu", "h100", *args).splitlines()
        assert lines[0].startswith("BERT with 336.2 million parameters, samples of 512 tokens, 256 samples a step")
        assert not any("causal" in line for line in lines)
    lines = printed(capsys, str(CONFIGS / "mixtral_8x7b.yaml"), "--gpu", "h100", "--layout", "recipe").splitlines()
    assert lines[0].startswith("GPT with 46.7 billion parameters, of which a token uses 12.88 billion")
    assert lines[1].startswith("taken for a GPT") and "--model-kind" in lines[1]


def test_the_kind_of_a_model_is_asked_for_or_named_or_shown_by_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 30522}
    bare = changed(tmp_path, "bert_large.yaml", **{"model.config": config})
    args = ("--gpu", "h100", "--layout", "recipe")
    assert record(capsys, bare, *args)["model"] == "GPT"
    assert record(capsys, bare, *args, "--model-kind", "bert")["model"] == "BERT"
    named = {"class_path": "lightning_megatron.lightning_modules.BertModule", "init_args": {"config": config}}
    planned = record(capsys, changed(tmp_path, "bert_large.yaml", model=named), *args)
    assert (planned["model"], planned["notes"]) == ("BERT", [])
    by_data = changed(tmp_path, "bert_large.yaml", **{"model.config": config, "data.short_seq_prob": 0.1})
    assert record(capsys, by_data, *args)["model"] == "BERT"


@pytest.mark.parametrize(
    ("value", "full"),
    [
        ("bf16", "bf16-mixed"),
        ("16", "16-mixed"),
        (16, "16-mixed"),
        (32, "32-true"),
        (None, "32-true"),
        (64, "64-true"),
    ],
)
def test_a_precision_is_what_the_trainer_takes_it_for(
    value: Any, full: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(tmp_path, "bert_large.yaml", **{"trainer.precision": value})
    planned = record(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert planned["precision"] == full
    peaks = {"32-true": ("float32 without tensor cores", 67e12), "64-true": ("float64", 67e12)}
    peak = peaks.get(full, ("16 bits", 989.4e12))
    assert (planned["peak_of"], planned["peak_flops_per_second"]) == peak and planned["notes"] == []
    shown = printed(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert f"the peak: dense peak in {peak[0]}, {peak[1] / 1e12:g} TFLOP/s" in shown


def test_numbers_of_eight_bytes_take_twice_the_memory_and_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(precision: str, gpu: str) -> Any:
        file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.precision": precision})
        return record(capsys, file, "--gpu", gpu, "--layout", "mbs=1")

    # A100 multiplies in float64 as fast as in float32, where that has no tensor cores.
    full, double = (planned(precision, "a100") for precision in ("32-true", "64-true"))
    for kind in ("weights", "gradients", "moments"):
        # Tensors are rounded up to the same blocks.
        assert double["memory_bytes"][0][kind] == pytest.approx(2 * full["memory_bytes"][0][kind], rel=1e-3)
    # No kernel of attention has float64: scores are saved.
    assert double["memory_bytes"][0]["activations"] > 2.2 * full["memory_bytes"][0]["activations"]
    assert double["step_seconds"] > 1.2 * full["step_seconds"] and double["peak_of"] == "float64"
    unknown = planned("64-true", "l40s")
    assert unknown["notes"][-1].startswith("times are those of products in float32, and in 64-true they are several")
    assert "has no double_tflops, its peak in float64" in unknown["notes"][-1]


def test_transformer_engine_s_precision_is_planned_where_it_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.precision": "transformer-engine"})
    planned = record(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert (planned["precision"], planned["fp8"]) == ("bf16-true", True)
    assert "no units for FP8" in shown(capsys, file, "--gpu", "a100", "--layout", "recipe")


def test_mxfp8_is_planned_for_gpus_with_its_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"trainer.strategy.init_args.fp8": {"scaling": "mxfp8"}}
    file = changed(tmp_path, "gpt2_124m.yaml", **changes)
    assert record(capsys, file, "--gpu", "b200", "--layout", "recipe")["fp8"] is True
    assert "no units for MXFP8; use scaling 'current'" in shown(capsys, file, "--gpu", "h100", "--layout", "recipe")


def test_fused_layers_without_float8_are_planned_as_no_fp8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = {"engine": "transformer_engine", "scaling": "none"}
    plans = []
    for changes in ({}, {"trainer.strategy.init_args.fp8": fp8}):
        file = changed(tmp_path, "gpt2_124m.yaml", **changes)
        plans.append(record(capsys, file, "--gpu", "a100", "--layout", "recipe"))
    assert plans[0] == plans[1] and plans[0]["fp8"] is False


@pytest.mark.parametrize(("devices", "world"), [("8", 8), ([0, 1, 2, 3], 4), (16, 16)])
def test_devices_are_counted_as_the_trainer_takes_them(
    devices: Any, world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.devices": devices})
    assert record(capsys, file, "--gpu", "h100", "--layout", "mbs=1")["sizes"]["world"] == world


def test_devices_that_the_machine_chooses_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for devices in ("auto", -1):
        file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.devices": devices})
        assert "--num-gpus is needed" in shown(capsys, file, "--gpu", "h100", "--layout", "mbs=1")
        args = ("--gpu", "h100", "--layout", "mbs=1", "--num-gpus", "8")
        assert record(capsys, file, *args)["sizes"]["world"] == 8
    bad = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.devices": "some"})
    assert "trainer.devices ('some')" in shown(capsys, bad, "--gpu", "h100")


def test_accumulated_batches_make_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "recipe")
    # Without a schedule gradients are added where they are.
    direct = ("--gpu", "h100", "--layout", "mbs=64")
    file = changed(tmp_path, "gpt2_124m.yaml")
    one, one_at_once = record(capsys, file, *args), record(capsys, file, *direct)
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.accumulate_grad_batches": 4})
    four = record(capsys, file, *args)
    assert four["accumulate_grad_batches"] == 4
    # The sum of the batches before, in float32, besides what a schedule saves; of what is allocated 3% more is taken.
    more = four["memory_bytes"][0]["total"] - one["memory_bytes"][0]["total"]
    assert more == pytest.approx(1.03 * 4 * one["trained_parameters"], rel=1e-3)
    assert record(capsys, file, *direct)["memory_bytes"] == one_at_once["memory_bytes"]
    assert four["flops"][0]["step_flops"] == 4 * one["flops"][0]["step_flops"]
    assert four["seconds"]["compute"] == pytest.approx(4 * one["seconds"]["compute"])
    assert 3 * one["step_seconds"] < four["step_seconds"] < 4 * one["step_seconds"]
    assert "4 batches a step" in printed(capsys, file, *args)


def test_a_batch_that_the_recipe_s_own_microbatches_do_not_cut_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(
        tmp_path,
        "gpt2_124m.yaml",
        **{"data.global_batch_size": 40, "trainer.strategy.init_args": {"num_microbatches": 3}},
    )
    text = shown(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert "global_batch_size (40) must be a multiple of data-parallel size x num_microbatches" in text
    assert record(capsys, file, "--gpu", "h100", "--layout", "mbs=5")["num_microbatches"] == 1


def test_what_the_strategy_does_beyond_a_plan_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels, pipeline = {"compile_layers": True}, {"mode": "collective"}
    changes = {"dynamic_context": {"max_tokens_per_rank": 2048}, "pipeline": pipeline, "kernels": kernels}
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": changes})
    text = printed(capsys, file, "--gpu", "h100", "--layout", "mbs=1")
    assert "without the recipe's dynamic_context" in text and "not planned: kernels compile_layers (True)" in text
    # That mode is planned.
    assert "not planned: pipeline" not in text


def test_what_a_fit_refuses_of_the_mode_collective_a_plan_refuses_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(pipeline: dict[str, Any], **strategy: Any) -> str:
        arguments = {"pipeline": {"mode": "collective", **pipeline}, **strategy}
        file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": arguments})
        return shown(capsys, file, "--gpu", "h100", "--layout", "recipe")

    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    assert "schedule ('zb_v') of the pipeline is for steps under a schedule" in refused({"schedule": "zb_v"}, **sizes)
    assert 'num_microbatches (4) must be 1 with PipelineConfig(mode="collective")' in refused({}, num_microbatches=4)
    assert "microbatch_size (2) must be 0 with" in refused({}, microbatch_size=2)
    dynamic = refused({}, dynamic_context={"max_tokens_per_rank": 2048})
    assert "and dynamic_context once for each microbatch of its plan" in dynamic


def test_kernels_in_place_of_torchs_own_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(**kernels: Any) -> Any:
        strategy = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "kernels": kernels}
        changes: dict[str, Any] = {"trainer.strategy.init_args": strategy, "trainer.precision": "bf16"}
        file = changed(tmp_path, "gpt2_124m.yaml", **changes)
        return record(capsys, file, "--gpu", "h100", "--layout", "recipe")

    plain, in_chunks, beside = planned(), planned(loss_chunk_tokens=512), planned(num_tp_overlap_chunks=4)
    for one in (plain, in_chunks, beside):
        assert not any("not planned" in note for note in one["notes"])
    assert in_chunks["memory_bytes"][0]["total"] < 0.8 * plain["memory_bytes"][0]["total"]
    executed = [one["flops"][-1]["step_flops"] for one in (plain, in_chunks, beside)]
    # Logits of all tokens are computed once more.
    assert executed[1] - executed[0] == pytest.approx(2 * 512 * 1024 * 768 * 50257, rel=0.01)
    assert executed[2] == executed[0]
    assert in_chunks["step_seconds"] > plain["step_seconds"] > beside["step_seconds"]
    assert planned(attention="flash3")["step_seconds"] < plain["step_seconds"]
    assert planned(symmetric_memory=True)["step_seconds"] < beside["step_seconds"]
    [note] = [note for note in planned(compile_layers=True)["notes"] if "not planned" in note]
    assert note.startswith("not planned: kernels compile_layers (True), which makes neighbouring operations one kernel")


BALANCED_DATA = {"sequence_length": 1024, "global_batch_size": 64}


def dynamic(tmp_path: Path, data: dict[str, Any], **config: Any) -> str:
    strategy = {"dynamic_context": {"max_tokens_per_rank": 2048, **config}}
    return changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": strategy, "data": BALANCED_DATA | data})


def test_documents_that_are_balanced_are_planned_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, options = dynamic(tmp_path, {"packing": "documents"}), ("--gpu", "h100", "--layout", "recipe")
    (tmp_path / "lengths.txt").write_text("100\n300\n\n200\n")
    rows = record(capsys, file, *options)
    short = record(capsys, file, *options, "--document-lengths", str(tmp_path / "lengths.txt"))
    assert rows["num_documents"] == rows["global_batch_size"] and rows["num_tokens"] == short["num_tokens"]
    assert short["num_documents"] > 4 * rows["num_documents"] and "mbs" not in short["layout"]
    assert short["flops"][0]["step_flops"] < rows["flops"][0]["step_flops"]
    assert "each row counts as one document of 1,024 tokens" in rows["notes"][1]
    assert not any("cut" in note for note in short["notes"])
    # Of 64 rows each is one document, but for the last of the batch, of which every second is cut to its row.
    (tmp_path / "lengths.txt").write_text("1024\n9000\n")
    long = record(capsys, file, *options, "--document-lengths", str(tmp_path / "lengths.txt"))
    [cut] = re.findall(r"(\d+) of them were longer than a row and are cut to its 1,024 tokens", long["notes"][2])
    assert long["num_documents"] == 64 and 16 < int(cut) < 48
    text = printed(capsys, file, *options, "--document-lengths", "median=200,sigma=1")
    assert "documents in" in text and "microbatches a rank, packs: " in text
    # What cannot be told is refused before anything is written.
    picture = tmp_path / "plan.svg"
    for option in ("--explain", "--explain-time"):
        text = shown(capsys, file, *options, option, "--out", str(picture))
        assert f"{option} takes microbatches that are alike" in text
    assert not picture.exists()
    # A search, and a layout that is written out, go without, and are those of the recipe that never had it.
    (tmp_path / "plain").mkdir()
    own = {"trainer.strategy.init_args": {}, "data": BALANCED_DATA | {"packing": "documents"}}
    plain = changed(tmp_path / "plain", "gpt2_124m.yaml", **own)
    for request in (("--top", "1"), ("--layout", "mbs=2")):
        even, never = (record(capsys, name, "--gpu", "h100", *request) for name in (file, plain))
        assert even.pop("notes") == [
            *never.pop("notes"),
            "without the recipe's dynamic_context, which is planned on its own layout: --layout recipe",
        ]
        assert even == never
        assert "is for a recipe with dynamic_context on its own layout" in shown(
            capsys, file, "--gpu", "h100", *request, "--document-lengths", "median=200,sigma=1"
        )


@pytest.mark.parametrize(
    ("data", "config", "lengths", "words"),
    [
        ({"packing": "documents"}, {}, "median=200", "--document-lengths (median=200) must be median=TOKENS,sigma="),
        ({"packing": "documents"}, {}, "median=x,sigma=1", "must be median=TOKENS,sigma=NUMBER, or a file of lengths"),
        ({"packing": "documents"}, {}, "median=2,median=3,sigma=1", "must be median=TOKENS,sigma=NUMBER, or a file of"),
        ({"packing": "documents"}, {}, "/", "--document-lengths (/) cannot be read: Is a directory"),
        ({"packing": "documents"}, {}, "x" * 300, "cannot be read: File name too long"),
        ({"packing": "documents"}, {}, "median=0,sigma=-1", "--document-lengths: sigma (-1) must be a finite number"),
        ({}, {}, "median=200,sigma=1", "is for rows of packed documents, and each row of this recipe is one of 1024"),
        ({}, {"max_tokens_per_rank": 16}, None, "sequence_length (1024) must be at most max_tokens_per_rank (16) x"),
        ({}, {"max_group_size": 3}, None, "max_group_size (3) must be a group size of 8 dp x cp ranks"),
    ],
)
def test_documents_that_cannot_be_balanced_are_reported(
    data: dict[str, Any],
    config: dict[str, Any],
    lengths: str | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = () if lengths is None else ("--document-lengths", lengths)
    assert words in shown(capsys, dynamic(tmp_path, data, **config), "--gpu", "h100", "--layout", "recipe", *options)


def test_lengths_of_documents_are_for_dynamic_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--num-gpus", "8", "--layout", "tp=8")
    assert "--document-lengths (a.txt) is for a recipe with dynamic_context" in shown(
        capsys, "llama3_8b", *args, "--document-lengths", "a.txt"
    )
    file = dynamic(tmp_path, {"packing": "documents"})
    for text, words in (
        ("12\n-3\n", "one a line, and has '-3'"),
        ("9" * 5000, "of at most 12 digits"),
        ("", "has none"),
    ):
        (tmp_path / "lengths.txt").write_text(text)
        assert words in shown(
            capsys, file, "--gpu", "h100", "--layout", "recipe", "--document-lengths", str(tmp_path / "lengths.txt")
        )


def test_options_count_before_documents_are_balanced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, args = dynamic(tmp_path, {"packing": "documents"}), ("--gpu", "h100", "--layout", "recipe")
    assert "dynamic_context measures costs by calls of a layer" in shown(capsys, file, *args, "--fp8")
    # Some draws are infinite.
    assert record(capsys, file, *args, "--document-lengths", "median=700,sigma=1000")["num_documents"] > 64


def test_overlapped_forwards_and_backwards_are_planned_as_the_recipe_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = {"expert_model_parallel_size": 2, "num_microbatches": 4}
    own = {}
    for does in (False, True):
        options = strategy | {"pipeline": {"overlap_expert_exchange": does}}
        file = changed(tmp_path, "moe_toy.yaml", **{"trainer.strategy.init_args": options, "trainer.precision": "bf16"})
        own[does] = record(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert own[True]["memory_bytes"][0]["activations"] > own[False]["memory_bytes"][0]["activations"]
    assert own[True]["step_seconds"] < own[False]["step_seconds"]
    assert own[True]["flops"][0]["step_flops"] == own[False]["flops"][0]["step_flops"]
    assert own[True]["layout"] == own[False]["layout"] + ",schedule=recipe"
    args = (file, "--gpu", "h100", "--layout")
    assert "schedule 1f1b, forwards beside backwards" in printed(capsys, *args, "ep=2,mbs=4,schedule=recipe")
    assert "not the recipe's schedule 1f1b, forwards beside backwards but" in printed(capsys, *args, "ep=2,mbs=4")
    assert main(["dry-run", file, "--rank", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_overlapped"]


def test_a_layout_keeps_the_recipe_s_schedule_where_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = {"schedule": "zb_v", "layout": {"balance": "cost"}}
    changes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, "pipeline": pipeline}
    few = {"trainer.devices": 2, "model.config.num_layers": 4, "data.global_batch_size": 16}
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": changes}, **few)
    own = record(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert "schedule=zb_v" in own["layout"] and own["notes"][1:] == []
    again = record(capsys, file, "--gpu", "h100", "--layout", own["layout"])
    assert (again["step_seconds"], again["memory_bytes"], again["notes"]) == (
        own["step_seconds"],
        own["memory_bytes"],
        own["notes"],
    )
    args = ("--gpu", "h100", "--layout", "pp=2,vp=2,mbs=1")
    other = record(capsys, file, *args)
    assert other["notes"][1].startswith("not the recipe's schedule zb_v but 1f1b, or interleaved")
    kept = record(capsys, file, "--gpu", "h100", "--layout", "pp=2,vp=2,mbs=1,schedule=recipe")
    assert len(kept["notes"]) == 1 and kept["step_seconds"] != other["step_seconds"]
    assert "a search tries 1f1b" in printed(capsys, file, "--gpu", "h100", "--top", "1")
    assert "virtual_pipeline_model_parallel_size (2) must be 1 for schedule zb_h1" in shown(
        capsys, file, "--gpu", "h100", "--layout", "pp=2,vp=2,schedule=zb_h1"
    )
    assert "--layout schedule=recipe: gpt2_124m is no recipe and has none" in shown(
        capsys, "gpt2_124m", "--gpu", "h100", "--num-gpus", "2", "--layout", "mbs=1,schedule=recipe"
    )


@pytest.mark.parametrize("pipeline", [{"schedule": "interleaved"}, {"microbatch_group_size": 8}])
def test_a_schedule_of_the_recipe_s_own_is_planned_on_fewer_gpus_than_its_layout(
    pipeline: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 3, "pipeline": pipeline}
    layers = {"model.config.num_layers": 12}
    file = changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": changes}, **layers)
    args = (file, "--gpu", "h100", "--num-gpus", "2")
    planned = record(capsys, *args, "--layout", "tp=2,mbs=1")
    assert planned["sizes"]["tp"] == 2 and "not the recipe's schedule interleaved" in planned["notes"][1]
    assert "a search tries 1f1b" in printed(capsys, *args, "--top", "1")
    assert "pipeline_model_parallel_size (0) must be at least 1" in shown(capsys, *args, "--layout", "pp=0")
    text = shown(capsys, *args, "--layout", "pp=4,vp=3,mbs=1,schedule=zb_h1")
    # Once, though experts would have to divide the world as well.
    assert text.count("world size (2) must be a multiple of") == 1
    assert "virtual_pipeline_model_parallel_size (3) must be 1 for schedule zb_h1" in text


def test_a_decoder_s_length_goes_by_the_rules_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"context_parallel_size": 2, "context": {"uneven": "refuse"}}
    changes = {"position": "learned", "max_decoder_sequence_length": 32}
    file = changed(
        tmp_path,
        "t5_toy.yaml",
        **{f"model.config.{name}": value for name, value in changes.items()},
        **{"data.decoder_sequence_length": 46, "trainer.devices": 2, "trainer.strategy.init_args": strategy},
    )
    text = shown(capsys, file, "--gpu", "h100", "--layout", "recipe")
    assert "decoder_sequence_length (46) must be at most the model's max_decoder_sequence_length (32)" in text
    assert "decoder_sequence_length (46) must be a multiple of 4" in text


def test_packed_documents_are_planned_as_one_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "mbs=4")
    # Attention that keeps to documents lays no weights out to drop some.
    undropped = {"model.config.attention_dropout": 0.0}
    plain = record(capsys, changed(tmp_path, "gpt2_124m.yaml", **undropped), *args)
    for change in ({"data.packing": "documents"}, {"data.separates_documents": True}):
        packed = record(capsys, changed(tmp_path, "gpt2_124m.yaml", **undropped, **change), *args)
        assert packed["flops"] == plain["flops"]
        assert "each row of packed documents counts as one" in packed["notes"][1]
        assert packed["memory_bytes"][0]["activations"] > plain["memory_bytes"][0]["activations"]
    # A T5's batches tell where texts end, packed or not.
    packings = ("none", "documents")
    for how in packings:
        (tmp_path / how).mkdir()
    alone, joined = (changed(tmp_path / how, "finetune_t5_toy.yaml", **{"data.packing": how}) for how in packings)
    alone, joined = (record(capsys, file, *args, "--model", "t5_11b") for file in (alone, joined))
    assert packed["notes"][1] in joined["notes"] and packed["notes"][1] not in alone["notes"]
    assert joined["memory_bytes"] == alone["memory_bytes"]
    changes = {"model.config.moe.dispatcher": "all_gather", "data.packing": "documents"}
    gathers = changed(tmp_path, "moe_toy.yaml", **changes)
    assert "dispatcher 'all_gather' needs as many tokens" in shown(capsys, gathers, "--gpu", "h100", "--layout", "ep=2")
    assert record(capsys, gathers, "--gpu", "h100", "--layout", "ep=2,tp=2")["step_seconds"] > 0
    bert = changed(tmp_path, "bert_toy.yaml", **{"data.packing": "documents"})
    assert "Option 'data.packing' is not accepted" in shown(capsys, bert, *args)


def test_layouts_that_fell_out_are_all_in_the_json_and_the_nearest_in_the_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = (*UNEVEN, "--top", "2")
    found = record(capsys, *args)
    assert len(found["layouts"]) == 2 and sum(found["fell_out"].values()) == len(found["rejected"]) > 10
    assert all(one["layout"].startswith("tp=") and one["why"] for one in found["rejected"])
    times = [f"{one['step_seconds']:.4g}" for one in found["layouts"]]
    assert len(set(times)) == 2
    text = printed(capsys, *args)
    assert text.count("nearest: tp=") == 3 and "GB on pipeline rank" in text


def test_layouts_whose_times_print_alike_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    toy, batch = str(CONFIGS / "moe_toy.yaml"), ("--global-batch-size", "2")
    every = record(capsys, toy, "--gpu", "h100", "--num-gpus", "2", *batch, "--top", "400")
    alike = [layout for one in every["layouts"] for layout in one["alike"]]
    assert alike and not {one["layout"] for one in every["layouts"]}.intersection(alike)
    times = [f"{one['step_seconds']:.4g}" for one in every["layouts"]]
    assert len(set(times)) == len(times)
    assert len(times) + sum(len(one["alike"]) for one in every["layouts"]) == every["num_fitting"]


def test_a_layout_with_stages_by_cost_is_explained_as_the_search_writes_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, *UNEVEN, "--top", "3")["layouts"]
    uneven = next(one for one in found if "stages=cost" in one["layout"])
    assert sum(uneven["layers"]) == 32
    assert record(capsys, *UNEVEN, "--layout", uneven["layout"])["step_seconds"] == uneven["step_seconds"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensor_parallel": 8}, "the nearest is --trainer.strategy.init_args.tensor_model_parallel_size"),
        ({"sequence_parallel": "maybe"}, "init_args.sequence_parallel (maybe) must be true or false"),
        ({"timeout_seconds": "long"}, "init_args.timeout_seconds (long) must be a number"),
        ([1], "must be a table of options"),
        ({"microbatch_size": -1}, "microbatch_size (-1) must be a number of at least 1"),
    ],
)
def test_what_the_strategy_would_not_take_is_reported(
    change: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = yaml.safe_load(Path(GPT_1T).read_text())
    recipe["trainer"]["strategy"]["init_args"] = change
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    assert words in shown(capsys, str(tmp_path / "a.yaml"), "--gpu", "h100", "--layout", "recipe")


_FIT = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"every_n_train_stepz": 3}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data.packing": "foo"},
            ("--data.packing (foo) must be one of 'stream', 'documents'",),
        ),
        ({"data.pth": "x"}, ("Option 'data.pth' is not accepted; the nearest is --data.path",)),
        ({"data.seed": "one"}, ("--data.seed (one) must be a whole number",)),
        ({"trainer.max_steps": "abc"}, ("--trainer.max_steps (abc) must be a whole number",)),
        ({"trainer.stesp": 3}, ("Option 'trainer.stesp' is not accepted",)),
        (
            {"model.config.num_attention_heads": 10**30},
            ("hidden_size (768) must be a multiple of num_attention_heads",),
        ),
        ({"model.config.num_layers": 5000}, ("num_layers (5000) must be at most 4,096, which is far above what is",)),
        (
            {"trainer.devices": 10**400, "trainer.strategy.init_args": {"context_parallel_size": 10**9}},
            ("trainer.devices (of about 398 digits) must be at most 65,536", "context_parallel_size (1000000000) must"),
        ),
        ({"trainer.devices": "9" * 5000}, ("must be a number of at least 1, a list of devices, or auto",)),
        ({"trainer": [1], "data": "x"}, ("trainer ([1]) must be a table of options", "data ('x') must be a table of")),
        (
            {"trainer.strategy": "ddp"},
            ("trainer.strategy ('ddp') must be MegatronStrategy to be planned; give class_",),
        ),
        (
            {"trainer.strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"}},
            ("trainer.strategy ('lightning.pytorch.strategies.DDPStrategy') must be MegatronStrategy to be planned",),
        ),
        (
            {"trainer.strategy": {"class_path": "MegatronStrategy", "tensor_model_parallel_size": 2}},
            (
                "--trainer.strategy",
                "{'class_path': 'MegatronStrategy', 'tensor_model_parallel_size': 2}",
            ),
        ),
        ({"trainer.strategy": "auto"}, ("has no layout of its own",)),
        ({"trainer.callbacks": [_FIT]}, ("Option 'every_n_train_stepz' is not accepted",)),
        ({"trainer.logger": 3}, ("--trainer.logger (3) must be", "the class_path of a Logger")),
        ({"throughput": {"every": 1}}, ("Option 'throughput.every' is not accepted",)),
        ({"thruput": {"every_n_steps": 1}}, ("'thruput.every_n_steps' is not accepted; the nearest is --throughput",)),
        ({"print_text": [2]}, ("print_text ([2]) must be a table of options",)),
        (
            {"model.optimizer": {"lrr": 3}},
            ("optimizer.lrr' is not accepted; the nearest is --model.optimizer.lr",),
        ),
        ({"model.optimizer": 5}, ("model.optimizer (5) must be a table of options",)),
        ({"model.optimizer": {"lr": float("nan")}}, ("model.optimizer: lr (nan) must be at least 0, and finite",)),
        ({"model.optimizer": {"lr": "x"}}, ("--model.optimizer.lr (x) must be a number",)),
        ({"model.path": "here"}, ("Option 'model.path' is not accepted",)),
        ({"data.blend": [{"weight": "a"}]}, ("--data.blend: weight (a) must be a number",)),
        (
            {"trainer.strategy.init_args": {"optimizer": {"kind": "sharded"}}},
            ("trainer.strategy.init_args.optimizer.kind (sharded) must be one of 'replicated',",),
        ),
    ],
)
def test_what_fit_would_not_take_is_reported(
    changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = changed(tmp_path, "gpt2_124m.yaml", **changes)
    text = shown(capsys, file, "--gpu", "h100", "--layout", "recipe")
    for word in words:
        assert word in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("bert_toy.yaml", {"sequence_length": 4}, "sequence_length (4) must be at least 5: 3 special tokens and 2 of"),
        ("bert_toy.yaml", {"sequence_length": 4, "model.config.add_binary_head": False}, ""),
        ("t5_toy.yaml", {"sequence_length": 2}, "sequence_length (2) must be at least 3: a sentinel"),
        ("t5_toy.yaml", {"decoder_sequence_length": 9}, "decoder_sequence_length (9) must be at least 22: of 127"),
        ("t5_toy.yaml", {"decoder_sequence_length": 9, "mask_prob": "2e-2"}, ""),
        ("llava_toy.yaml", {"sequence_length": 16}, "sequence_length (16) must be above the 16 tokens that an image"),
        ("llava_toy.yaml", {"sequence_length": 17}, ""),
    ],
)
def test_samples_that_are_too_short_to_be_made_are_reported(
    name: str, data: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {option if "." in option else f"data.{option}": value for option, value in data.items()}
    file = changed(tmp_path, name, **changes)
    args = (file, "--gpu", "h100", "--layout", "recipe")
    if words:
        assert words in shown(capsys, *args)
        assert main(["dry-run", file]) == 2 and words in capsys.readouterr().err
    else:
        assert record(capsys, *args)["step_seconds"] > 0


def test_what_fit_takes_is_planned_though_it_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"trainer.strategy": {"class_path": "lightning_megatron.MegatronStrategy"}}
    plain = record(capsys, changed(tmp_path, "gpt2_124m.yaml", **changes), "--gpu", "h100", "--layout", "recipe")
    own = {
        # The class is next to the user's script.
        "trainer.callbacks": [{"class_path": "my_callbacks.Mine", "init_args": {"a": 1}}],
        "trainer.strategy": "megatron",
        "trainer.max_time": "00:12:00:00",
        "mine": {"a": 1},
        "model.optimizer.lr": "3e-4",
    }
    file = changed(tmp_path, "gpt2_124m.yaml", **own)
    assert record(capsys, file, "--gpu", "h100", "--layout", "recipe") == plain


def test_rows_of_a_microbatch_say_how_many_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--gpu", "h100", "--layout", "recipe")
    wanted, found = (
        record(capsys, changed(tmp_path, "gpt2_124m.yaml", **{"trainer.strategy.init_args": given}), *args)
        for given in ({"num_microbatches": 8}, {"microbatch_size": 8})
    )
    assert wanted["micro_batch_size"] == 8 and found["step_seconds"] == wanted["step_seconds"]
    # A batch of one microbatch is under a schedule too, which keeps the sum of the batches before it by itself.
    changes = {"trainer.accumulate_grad_batches": 2, "trainer.strategy.init_args": {"num_microbatches": 1}}
    direct = record(capsys, changed(tmp_path, "gpt2_124m.yaml", **changes), *args)
    changes["trainer.strategy.init_args"] = {"microbatch_size": direct["micro_batch_size"]}
    aside = record(capsys, changed(tmp_path, "gpt2_124m.yaml", **changes), *args)
    more = aside["memory_bytes"][0]["total"] - direct["memory_bytes"][0]["total"]
    assert aside["num_microbatches"] == 1 and more == pytest.approx(1.03 * 4 * direct["parameters"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "-5"), "--tokens (-5.0) must be a number above 0"),
        (("--tokens", "0"), "--tokens (0.0) must be a number above 0"),
        (("--memory-gb", "inf"), "--memory-gb (inf) must be a number above 0"),
        (("--layout", "tp=2,tp=4"), "names tp twice"),
        (("--layout", "tp=²"), "must be one of"),
        (("--layout", "tp=8,pp=64,schedule=2f2b"), "--layout schedule ('2f2b') must be one of gpipe, 1f1b"),
        (
            ("--layout", "tp=8,pp=64,recompute=none", "--recompute", "full"),
            "--recompute (full) and recompute=none in --layout do not agree",
        ),
        (("--layout", f"tp={'9' * 5000}"), "--layout tp (999999999999...) must be below 1,000,000"),
        (("--layout", "tp=8,pp=1000000"), "--layout pp (1000000) must be below 1,000,000"),
        (("--layout", "tp=8,pp=64,vp=257"), "_pipeline_model_parallel_size (16448) must be at most 16,384"),
        (("--num-gpus", "9" * 400), "--num-gpus (of about 398 digits) must be at most 1,000,000,000,000"),
        (
            ("--layout", "mbs=1", "--global-batch-size", "400000000"),
            "num_microbatches (130208) must be at most 100,000",
        ),
        (("--layout", "recipe", "--out", "/proc/a.svg"), "cannot be written"),
    ],
)
def test_values_that_say_nothing_are_reported(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in shown(capsys, GPT_1T, "--gpu", "a100-80gb", *options)


@pytest.mark.matrix
@pytest.mark.parametrize("name", every_nth(sorted(PRESETS, reverse=True), 8))
def test_every_preset_is_planned(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    planned = record(capsys, name, "--gpu", "b300", "--num-gpus", "128", "--layout", "tp=4,pp=2,mbs=1")
    assert planned["tokens_per_second"] > 0


@pytest.mark.parametrize("name", sorted(set(PRESETS) & {path.stem for path in CONFIGS.glob("*.yaml")}))
def test_a_preset_is_the_model_of_the_recipe_of_its_name(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["model"]["config"]
    preset = PRESETS[name]
    for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        assert getattr(preset.model, field) == config[field]
    known = {
        "gpt2_124m": 124e6,
        "gpt3_175b": 174.6e9,
        "gpt_1t": 1008e9,
        "mixtral_8x7b": 46.7e9,
        "mixtral_8x22b": 140.6e9,
        "qwen3_30b_a3b": 30.5e9,
        "bert_large": 336.2e6,
        "t5_11b": 11.307e9,
    }
    assert model_parts_of(preset.model, preset.lengths).parameters() == pytest.approx(known[name], rel=0.005)


def test_a_hugging_face_config_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 16}))
    file = tmp_path / "llama.json"
    file.write_text(json.dumps(config))
    args = (str(file), "--gpu", "h100", "--num-gpus", "8", "--layout", "tp=4,mbs=1")
    assert "--global-batch-size is needed" in shown(capsys, *args)
    both = shown(capsys, str(file), "--gpu", "h100")
    assert "--global-batch-size is needed" in both and "--num-gpus is needed" in both
    wrong = tmp_path / "wrong.json"
    for fields, words in (
        (
            {"hidden_act": "foo", "num_attention_heads": "x"},
            f"error: {wrong} of model_type 'llama' cannot be used: num_attention_heads ('x') must be of the kind of "
            "32; hidden_act ('foo') must be one of",
        ),
        (
            {"num_key_value_heads": "x", "rope_theta": [1], "rope_scaling": {"rope_type": "yarn", "factor": "x"}},
            f"error: {wrong} of model_type 'llama' cannot be used: num_key_value_heads ('x') must be of the kind of 0; "
            "rope_theta ([1]) must be a number above 0; rope setting factor ('x') must be a number",
        ),
        ({"model_type": ["llama"]}, f"error: model_type (['llama']) in {wrong} must be one of 'bert'"),
    ):
        wrong.write_text(json.dumps(config | fields))
        assert shown(capsys, str(wrong), *args[1:]).startswith(words)
    planned = record(capsys, *args, "--global-batch-size", "64")
    assert planned["parameters"] == pytest.approx(8.03e9, rel=0.001)
    shallow = record(capsys, str(tmp_path), *args[1:], "--global-batch-size", "64")
    assert shallow["parameters"] == pytest.approx(4.54e9, rel=0.001)
    tuned = (str(CONFIGS / "finetune_llama3_8b.yaml"), "--gpu", "h100", "--layout", "recipe", "--model", str(file))
    assert record(capsys, *tuned)["parameters"] == planned["parameters"]


def test_fp8_and_recomputation_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("llama3_8b", "--gpu", "h100", "--num-gpus", "16", "--layout", "tp=4,mbs=1")
    plain = record(capsys, *args)
    assert record(capsys, *args, "--fp8")["step_seconds"] < plain["step_seconds"]
    again = record(capsys, *args, "--recompute", "full")
    assert again["step_seconds"] > plain["step_seconds"]
    assert again["memory_bytes"][0]["activations"] < plain["memory_bytes"][0]["activations"]


def test_a_picture_has_a_bar_for_every_kind_on_every_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    args = (
        "gpt2_124m",
        "--gpu",
        "h100",
        "--num-gpus",
        "8",
        "--layout",
        "tp=2,pp=4,mbs=1",
        "--global-batch-size",
        "16",
    )
    printed(capsys, *args, "--out", str(file))
    root = ElementTree.parse(file).getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"weights", "master weights", "activations", "overhead", "forward", "idle", "GB", "seconds"} <= {*texts}
    planned = record(capsys, *args)["memory_bytes"]
    assert {f"{memory['total'] / 1e9:.1f} GB" for memory in planned} <= {*texts}
    assert texts.count("rank 3") == 2


def test_a_plan_s_bars_are_as_long_as_its_memory() -> None:
    preset = PRESETS["llama3_8b"]
    sizes = Sizes(world=16, tp=2, pp=4)
    run = Run(model=preset.model, lengths=preset.lengths, sizes=sizes, global_batch_size=16)
    found = estimate(run, gpu_of("h100"))
    memory, over_time, step = plan_panels(found, measured_levels(run, found.fullest))
    assert isinstance(memory, Panel) and isinstance(step, Panel) and isinstance(over_time, AreaPanel)
    assert memory.limit == over_time.limit == 80 and len(memory.rows) == len(step.rows) == 4
    for row, own in zip(memory.rows, found.memory, strict=True):
        lengths = {bar.entry: (bar.end - bar.start) * 1e9 for bar in row.bars}
        assert lengths == pytest.approx({kind.replace("_", " "): value for kind, value in own.by_kind().items()})
        assert [bar.start for bar in row.bars[1:]] == [bar.end for bar in row.bars[:-1]]
        assert row.bars[-1].end * 1e9 == pytest.approx(own.total)
    # The fullest rank, over time, holds the most where it was measured to, and four microbatches between computes.
    assert found.fullest == 0 and list(over_time.moments) == sorted(over_time.moments)
    by_kind = {area.entry: [height * 1e9 for height in area.heights] for area in over_time.areas}
    sums = list(map(sum, zip(*by_kind.values(), strict=True)))
    fullest = {kind.replace("_", " "): value for kind, value in found.memory[0].by_kind().items()}
    assert max(sums) == pytest.approx(found.memory[0].total)
    workspaces = fullest["buffers"] - by_kind["buffers"][sums.index(max(sums))]
    at_peak = {kind: heights[sums.index(max(sums))] for kind, heights in by_kind.items()}
    # Workspaces are no tensors, and are there all the time.
    moved = {"buffers": at_peak["buffers"] + workspaces, "overhead": at_peak["overhead"] - workspaces}
    assert at_peak | moved == pytest.approx(fullest) and workspaces == pytest.approx(0.13e9)
    assert (
        min(by_kind["activations"]) < 0.1 * fullest["activations"]
        and max(by_kind["activations"]) >= fullest["activations"]
    )
    assert over_time.moments[-1] == pytest.approx(found.step_seconds - found.time.other, rel=0.05)


def test_a_gpu_of_one_s_own_is_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("memory_gb: 192\nmemory_tb_per_second: 5.3\nhalf_tflops: 1307\nnvlink_gb_per_second: 448\n")
    args = ("--gpu", str(file), "--num-gpus", "8")
    planned = record(capsys, "llama3_8b", *args, "--layout", "tp=2,mbs=1")
    assert planned["gpu"] == "mine"
    # Searches over two GPUs are short, and shortest for one layout.
    args = ("--gpu", str(file), "--num-gpus", "2", "--top", "1")
    full = changed(tmp_path, "bert_large.yaml", **{"trainer.precision": "32-true"})
    assert [note for note in record(capsys, full, *args)["notes"] if "'mine' has no full_tflops" in note]
    assert "over the dense peak in 16 bits, 1,307 TFLOP/s" in printed(capsys, full, *args)
    file.write_text(f"{file.read_text()}full_tflops: 163.4\n")
    assert record(capsys, full, *args)["notes"] == []
    older = ("--gpu", "v100-32gb", "--num-gpus", "2", "--top", "1")
    assert "'v100-32gb' has no units for bfloat16" in record(capsys, "gpt2_124m", *older)["notes"][0]
    assert record(capsys, full, *older)["notes"] == []
    assert "over the dense peak in float32 without tensor cores, 163.4 TFLOP/s" in printed(capsys, full, *args)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("llama3_8b", "--gpu", "h1000", "--num-gpus", "8"), ("'h1000'", "did you mean h100", "gb200")),
        (("llama3_9b", "--gpu", "h100", "--num-gpus", "8"), ("'llama3_9b'", "llama3_8b", "mixtral_8x7b")),
        (
            ("llama3_8b", "--gpu", "h100", "--num-gpus", "16", "--global-batch-size", "7", "--layout", "tp=2,mbs=2"),
            ("global_batch_size (7)", "use 16"),
        ),
        (("bert_large", "--gpu", "h100", "--num-gpus", "31", "--global-batch-size", "9"), ("global_batch_size (9)",)),
        (("llama3_8b", "--gpu", "h100"), ("--num-gpus is needed",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "tp=2,qp=3"), ("'qp=3'", "tp, pp")),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "recipe"), ("no layout of its own",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "9", "--layout", "tp=3,mbs=1"), ("num_attention_heads (32)",)),
        (("llama3_8b", "--gpu", "a100", "--num-gpus", "8", "--fp8"), ("no units for FP8",)),
        (("none.yaml", "--gpu", "h100"), ("none.yaml cannot be read",)),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--out", "plan.gif"), ("--out", ".svg, .png, .pdf")),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "0"), ("--num-gpus (0)",)),
        (
            ("llama3_8b", "--gpu", "h1000", "--num-gpus", "0", "--memory-gb", "-1", "--top", "0", "--out", "plan.gif"),
            ("--num-gpus (0)", "--memory-gb (-1.0)", "--top (0)", "--out", "'h1000'"),
        ),
        (
            ("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--decoder-sequence-length", "64"),
            ("--decoder-sequence-length (64)", "T5", "GPT"),
        ),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--model", "gpt_1t"), ("--model (gpt_1t) is for a recipe",)),
        ((GPT_1T, "--gpu", "h100", "--model", "llama3_8b"), ("--model (llama3_8b)", "model.config")),
        (("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "stages=even"), ("'even'", "layers, cost")),
        (("", "--gpu", "h100"), ("CONFIG is empty; give a recipe's YAML file, a preset",)),
        ((GPT_1T, "--gpu", "h100", "--layout", "recipe", "--top", "3"), ("--top (3) is for a search, and --layout",)),
        (
            ("llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--layout", "ep=2,mbs=1"),
            ("expert_model_parallel_size (2) cuts experts, and the model has none; use 1",),
        ),
        (("bert_large", "--gpu", "h100", "--num-gpus", "8", "--sequence-length", "4"), ("(4) must be at least 5:",)),
        (("t5_11b", "--gpu", "h100", "--num-gpus", "8", "--sequence-length", "2"), ("(2) must be at least 3:",)),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(
    args: tuple[str, ...], says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *args)
    assert all(word in text for word in says), text
    assert text.count("\n") == 1


def test_the_memory_that_would_do_does(capsys: pytest.CaptureFixture[str]) -> None:
    request = ("gpt2_124m", "--gpu", "h100", "--num-gpus", "1")
    text = shown(capsys, *request, "--memory-gb", "2.5")
    [(gigabytes, num_gpus)] = re.findall(r"([\d.]+) GB a GPU would do, or (\d+) GPUs of this kind", text)
    assert "fits in 2.5 GB" in text and int(num_gpus) > 1 and text.count("\n") == 1
    assert "fits         yes" in printed(capsys, *request, "--memory-gb", gigabytes)


def test_the_batch_that_would_do_is_the_next_that_all_gpus_share(capsys: pytest.CaptureFixture[str]) -> None:
    for num_gpus, would_do in ((31, 31), (1_000_000_007, 1_000_000_007)):
        text = shown(capsys, "bert_large", "--gpu", "h100", "--num-gpus", str(num_gpus), "--global-batch-size", "9")
        assert f"give --global-batch-size {would_do}," in text
    text = shown(capsys, "bert_large", "--gpu", "h100", "--num-gpus", "31", "--global-batch-size", "100")
    assert "give --global-batch-size 124," in text


def test_who_waits_at_a_terminal_is_told_what_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}
    for is_terminal in (True, False):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        cache = str(tmp_path / str(is_terminal))
        assert (
            main(["plan", "bert_large", "--gpu", "h100", "--num-gpus", "2", "--layout", "tp=2", "--cache", cache]) == 0
        )
        told[is_terminal] = capsys.readouterr().err
    assert "measuring tp=2," in told[True] and "measuring" not in told[False]


def test_without_a_pipeline_there_is_no_bubble(capsys: pytest.CaptureFixture[str]) -> None:
    request = ("llama3_8b", "--gpu", "h100", "--num-gpus", "16")
    for tp in (2, 4):
        text = printed(capsys, *request, "--layout", f"tp={tp},pp=1")
        assert re.search(r"^ *bubble +0 s +0\.0%", text, flags=re.MULTILINE), text


def test_a_recipe_is_read_as_fit_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # LightningCLI warns where a process has arguments of its own.
    monkeypatch.setattr("sys.argv", ["recipe.py"])
    for changes in (
        {"model.config.hiden_size": 8},
        {"data.global_batch_size": "many"},
        {"trainer.strategy.init_args.optimizer.kind": "sharded"},
    ):
        file = changed(tmp_path, "gpt_1t.yaml", **changes)
        module, data, links, callbacks, _ = PRETRAINING["gpt"]
        with pytest.raises(UsageError) as fit:
            RecipeCLI(module, data, links=links, callbacks=callbacks, args=["fit", "--config", file])
        assert shown(capsys, file, "--gpu", "h100") == f"error: {fit.value}\n"


def test_a_key_that_stands_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(GPT_1T).read_text()
    (tmp_path / "twice.yaml").write_text(text.replace("    num_layers:", "    num_layers: 3\n    num_layers:", 1))
    assert "num_layers is named twice; leave one of them out" in shown(
        capsys, str(tmp_path / "twice.yaml"), "--gpu", "h100"
    )
