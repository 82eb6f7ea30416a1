"""`lightning-megatron dry-run` as a user types it, and what it says to mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
GPT_1T = str(CONFIGS / "gpt_1t.yaml")
SMALL = ("gpt2_124m", "--world-size", "8", "--layout", "tp=4,pp=2", "--sequence-length", "512")


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["dry-run", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def record(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["dry-run", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_preset_runs_dry_and_shows_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *SMALL, "--global-batch-size", "4"]) == 0
    text = capsys.readouterr().out
    assert "rank 4, stage 0" in text and "rank 0, stage 1" in text
    assert (
        "peak memory" in text
        and "master weights" in text
        and "all-gather" in text
        and "executed by this package" in text
    )


def test_one_rank_as_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    # Without a tied table stages send each other nothing else.
    found = record(capsys, "llama3_8b", *SMALL[1:], "--global-batch-size", "4", "--rank", "1")
    [one] = found["ranks"]
    assert one["rank"] == 1 and one["stages"] == [1] and found["sizes"]["pp"] == 2
    assert sum(one["peak_by_kind"].values()) == one["peak_bytes"]
    sends = {m["kind"]: m["number"] for m in one["messages"] if m["axis"] == "pp"}
    # The gradient of each microbatch's input.
    assert sends == {"send": 4}


def test_what_is_held_at_the_peak_is_told_by_module_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    args = (*SMALL, "--global-batch-size", "4", "--rank", "0")
    [one] = record(capsys, *args, "--explain")["ranks"]
    assert sum(tensors["num_bytes"] for tensors in one["held_at_peak"]) == one["peak_bytes"]
    assert "held_at_peak" not in record(capsys, *args)["ranks"][0]
    assert main(["dry-run", *args, "--explain"]) == 0
    text = capsys.readouterr().out
    largest = next(tensors for tensors in one["held_at_peak"] if tensors["kind"] == "activations and others")
    shape = " x ".join(map(str, largest["shape"]))
    assert f"{largest['num_tensors']:,} of [{shape}] {largest['dtype']}" in text
    assert f"{largest['line']}\n" in text and ".py:" in largest["line"]


def test_a_plan_tells_what_its_fullest_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    preset, _, world, *layout = SMALL
    args = (preset, "--gpu", "h100", "--num-gpus", world, *layout, "--global-batch-size", "4", "--explain")
    assert main(["plan", *args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranks = record(capsys, *SMALL, "--global-batch-size", "4", "--explain")["ranks"]
    one = max(ranks, key=lambda rank: rank["peak_bytes"])
    assert found["held_at_peak"] == one["held_at_peak"]
    assert main(["plan", *args]) == 0
    text = capsys.readouterr().out
    [fullest] = one["stages"]
    largest = next(tensors for tensors in one["held_at_peak"] if tensors["kind"] == "activations and others")
    assert f"on rank {fullest} of the pipeline:" in text and f"{largest['line']}\n" in text


def test_a_plan_shows_what_all_ranks_execute(capsys: pytest.CaptureFixture[str]) -> None:
    preset, _, world, *layout = SMALL
    found = record(capsys, *SMALL, "--global-batch-size", "4")
    done = 4 * sum(sum(one["flops"].values()) for one in found["ranks"])
    args = ["plan", preset, "--gpu", "h100", "--num-gpus", world, *layout, "--global-batch-size", "4"]
    assert main([*args, "--json"]) == 0
    by_name = {one["convention"]: one["step_flops"] for one in json.loads(capsys.readouterr().out)["flops"]}
    assert by_name[found["flops_convention"]] == pytest.approx(done, rel=1e-6)
    assert main(args) == 0
    assert f"{done / 8 / 1e12:,.4g} TFLOP a step on each GPU in the mean" in capsys.readouterr().out


def test_full_recomputation_keeps_less_and_multiplies_more(capsys: pytest.CaptureFixture[str]) -> None:
    # Of two samples a microbatch activations make the peak, not the optimizer's step.
    args = (*SMALL, "--layout", "tp=4,pp=2,mbs=2", "--global-batch-size", "8", "--rank", "4")
    [plain], [again] = (
        record(capsys, *args, "--sequence-length", "1024", *more)["ranks"] for more in ((), ("--recompute", "full"))
    )
    assert again["peak_bytes"] < plain["peak_bytes"]
    assert sum(again["flops"].values()) > 1.2 * sum(plain["flops"].values())


def recipe_with(tmp_path: Path, **trainer: Any) -> str:
    """The toy recipe on two ranks, with these options of the Trainer, and `strategy` of the strategy."""
    recipe = yaml.safe_load((CONFIGS / "toy.yaml").read_text())
    recipe["trainer"] |= {"devices": 2, **trainer}
    if "strategy" in trainer:
        name = "lightning_megatron.MegatronStrategy"
        recipe["trainer"]["strategy"] = {"class_path": name, "init_args": trainer["strategy"]}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    return str(tmp_path / "a.yaml")


def test_accumulated_batches_are_one_step_with_one_sum_of_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = record(capsys, recipe_with(tmp_path, strategy={"num_microbatches": 2}))
    five = record(
        capsys, recipe_with(tmp_path, strategy={"num_microbatches": 2}, accumulate_grad_batches=5), "--rank", "0"
    )
    assert five["accumulate_grad_batches"] == 5
    [first], [all_five] = one["ranks"], five["ranks"]
    assert all_five["flops"] == {kind: 5 * flops for kind, flops in first["flops"].items()}
    assert all_five["messages"] == first["messages"] and first["messages"]
    more = all_five["peak_bytes"] - first["peak_bytes"]
    assert more == pytest.approx(4 * first["parameters"], rel=0.05)


def test_transformer_engine_is_dry_run_where_it_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Toys have no sides of 16 for FP8.
    recipe = yaml.safe_load((CONFIGS / "gpt2_124m.yaml").read_text())
    recipe["trainer"] |= {"precision": "transformer-engine", "devices": 2}
    recipe["model"]["config"]["num_layers"] = 2
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(recipe))
    args = (str(tmp_path / "a.yaml"), "--global-batch-size", "8", "--layout", "tp=2,mbs=4")
    found = record(capsys, *args, "--sequence-length", "256")
    assert "fp8 engine 'transformer_engine' runs dry as engine 'torch'" in found["notes"][-1]
    assert found["ranks"][0]["peak_bytes"] > 0


def test_documents_that_are_balanced_run_dry_on_the_fullest_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(
        recipe_with(
            tmp_path,
            devices=4,
            strategy={"pipeline_model_parallel_size": 2, "dynamic_context": {"max_tokens_per_rank": 256}},
        )
    )
    recipe = yaml.safe_load(file.read_text())
    recipe["data"]["packing"] = "documents"
    file.write_text(yaml.safe_dump(recipe))
    found = record(capsys, str(file), "--document-lengths", "median=60,sigma=1")
    assert found["num_tokens"] == 32 * 128 and found["num_documents"] > 32
    assert sum(found["packs_by_group_size"].values()) <= 2 * found["num_microbatches"]
    assert [one["stages"] for one in found["ranks"]] == [[0], [1]]
    assert all(one["microbatches_run"] == found["num_microbatches"] for one in found["ranks"])
    args = (str(file), "--document-lengths", "median=60,sigma=1", "--explain")
    assert "--explain takes microbatches that are alike, and those of dynamic_context differ" in shown(capsys, *args)
    words = ("drawn by seed 0 of median=60,sigma=1", "longer than a row", "planned to cost on h100")
    assert all(word in note for word, note in zip(words, found["notes"][1:], strict=True))
    # On another layout, without.
    even = record(capsys, str(file), "--layout", "pp=2,mbs=4")
    assert "without the recipe's dynamic_context" in even["notes"][-1] and even["micro_batch_size"] == 4


def test_what_a_dry_run_leaves_out_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = recipe_with(tmp_path, strategy={"kernels": {"compile_layers": True}})
    assert "not planned: kernels compile_layers (True)" in record(capsys, file, "--rank", "0")["notes"][-1]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"pipeline": {"overlap_expert_exchange": True}}, "overlap_expert_exchange hides the dispatch of tokens"),
        ({"num_microbatches": 3}, "must be a multiple of data-parallel size x num_microbatches"),
    ],
)
def test_what_is_not_run_dry_is_reported_with_the_way_out(
    strategy: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in shown(capsys, recipe_with(tmp_path, strategy=strategy))


@pytest.mark.slow
def test_a_stage_of_a_trillion_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    [one] = record(capsys, GPT_1T, "--world-size", "3072", "--rank", "0")["ranks"]
    assert one["stages"] == [63] and one["parameters"] == pytest.approx(2.13e9, rel=0.01)
    # 6 bytes of weights and gradients, 12 of master weights and moments over dp 6.
    held = sum(size for kind, size in one["peak_by_kind"].items() if kind != "activations and others")
    assert held == pytest.approx(8 * one["parameters"], rel=0.001)
    # One of each kind of microbatches that do the same.
    assert one["microbatches_run"] == 3


@pytest.mark.parametrize(
    ("args", "fault"),
    [
        ((GPT_1T, "--rank", "3072"), "--rank (3072) must be from 0 to world size - 1 (3071)"),
        ((GPT_1T, "--rank", "-1"), "--rank (-1) must be from 0 to"),
        ((GPT_1T, "--world-size", "3000"), "world size (3000) must be a multiple of"),
        ((GPT_1T, "--world-size", "0"), "--world-size (0) must be at least 1"),
        ((GPT_1T, "--layout", "tp=x"), "--layout part 'tp=x' must be one of"),
        (("llama3_8b",), "--world-size is needed"),
        (("nosuch",), "'nosuch' is no file, folder, preset or recipe; presets are gpt2_124m"),
        (("gpt2_125m",), "lightning-megatron recipes lists the recipes; did you mean gpt2_124m"),
        (("",), "CONFIG is empty; give a recipe's YAML file, a preset, or a Hugging Face config.json"),
        (
            ("llama3_8b", "--world-size", "1000001", "--layout", "mbs=1", "--global-batch-size", "1000001"),
            "world size (1000001) must be at most 1,000,000",
        ),
        (("llama3_8b", "--world-size", "8"), "llama3_8b has no layout of its own"),
        (("llama3_80b", "--world-size", "8", "--layout", "tp=8"), "llama3_80b"),
        (("gone.yaml",), "gone.yaml cannot be read"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], fault: str) -> None:
    message = shown(capsys, *args)
    assert fault in message and message.count("\n") == 1
