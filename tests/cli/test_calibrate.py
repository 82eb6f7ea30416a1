"""`lightning-megatron calibrate`: a GPU's file that fits measured steps, and plans that take it."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_megatron.cli.main import main
from lightning_megatron.cli.plan_layout import explained
from lightning_megatron.cli.plan_run import read_run
from lightning_megatron.metrics.step_timeline import OPTIMIZER, ActivitySpan, RankSpans, chrome_trace
from lightning_megatron.pipeline.registry import order_of
from lightning_megatron.pipeline.schedule import Kind
from lightning_megatron.planner.constants import fitted
from lightning_megatron.planner.hardware import gpu_of
from lightning_megatron.planner.run import Run
from lightning_megatron.planner.step_time import StepTime, step_time

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
OTHER = str(CONFIGS / "gpt2_124m.yaml")
H100 = gpu_of("h100")
TRUE = replace(fitted(), hopper_share=0.6, link_share=0.5)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe with two chunks on each of two pipeline ranks, of a model whose steps are not all of the host's time."""
    changed = yaml.safe_load(Path(OTHER).read_text())
    changed["model"]["config"] |= {"attention_dropout": 0.0, "hidden_size": 4096, "num_attention_heads": 32}
    sizes = {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}
    changed["trainer"]["strategy"]["init_args"] |= {f"{name}_model_parallel_size": n for name, n in sizes.items()}
    path = tmp_path_factory.mktemp("recipe") / "config.yaml"
    path.write_text(yaml.safe_dump(changed))
    return str(path)


@pytest.fixture(scope="module")
def run(recipe: str) -> Run:
    options = argparse.Namespace(
        **dict.fromkeys(
            ("model", "model_kind", "num_gpus", "global_batch_size", "sequence_length", "decoder_sequence_length")
        ),
        config=recipe,
        layout="recipe",
        fp8=False,
        recompute=None,
        world_option="",
    )
    return explained(read_run(options), options)


def timeline_of(run: Run, time: StepTime) -> dict[str, Any]:
    """The trace that ranks would write whose passes take so long; another process is a prediction."""
    ranks = []
    for pp_rank, actions in enumerate(order_of(run.schedule)):
        now, spans = 0.1, []
        for action in actions:
            seconds = time.passes[pp_rank][action.kind is not Kind.FORWARD].own / run.sizes.vp
            spans.append(ActivitySpan(action, 0, now, now + seconds))
            now += seconds
        stages = tuple(sorted({action.stage for action in actions}))
        spans.append(ActivitySpan(OPTIMIZER, 0, time.total - time.optimizer, time.total))
        spans.append(ActivitySpan("data", 0, 0.0, 0.05))
        ranks.append(RankSpans(pp_rank, pp_rank, stages, tuple(spans), True))
    predicted = [[ActivitySpan(OPTIMIZER, 0, 0.0, 1e3)] for _ in ranks]
    return chrome_trace(ranks, [("predicted by the planner", predicted)], {})


@pytest.fixture(scope="module")
def timeline(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "step_5.json"
    path.write_text(json.dumps(timeline_of(run, step_time(run, H100, TRUE))))
    return path


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["calibrate", *args]) == 2
    return capsys.readouterr().err


def test_a_plan_with_the_calibrated_file_takes_as_long_as_the_measured_step(
    recipe: str, run: Run, timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "ours.yaml")
    args = ["calibrate", recipe, str(timeline), "--gpu", "h100", "--out", file]
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [step], true = found["steps"], step_time(run, H100, TRUE)
    assert step["measured"]["step"] == pytest.approx(true.total)
    assert step["measured"]["forwards"] == pytest.approx(
        [run.schedule.microbatches * forward.own for forward, _ in true.passes]
    )
    assert step["predicted_before"]["step"] < 0.9 * true.total
    assert found["constants"]["hopper_share"]["after"] == pytest.approx(0.6, rel=0.05)
    assert "ampere_share" not in found["constants"]
    plans = []
    for gpu in ("h100", file):
        assert main(["plan", recipe, "--gpu", gpu, "--layout", "recipe", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[1]["step_seconds"] == pytest.approx(true.total, rel=0.01)
    assert plans[0]["step_seconds"] == pytest.approx(step["predicted_before"]["step"])
    assert plans[1]["memory_bytes"] == plans[0]["memory_bytes"]
    # What published runs took over their plans says nothing of other constants.
    assert plans[0]["published_over_predicted"] and plans[1]["published_over_predicted"] is None
    # A file is calibrated further.
    args[4:] = [file, "--out", str(tmp_path / "again.yaml")]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "again.yaml" in text and "hopper_fp8_share" not in text
    assert main(["plan", recipe, "--gpu", file, "--layout", "recipe"]) == 0
    assert "the constants of the GPU's own file" in capsys.readouterr().out


def test_mistakes_are_told_with_the_way_out(
    recipe: str, run: Run, timeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "ours.yaml")
    rest = ("--gpu", "h100", "--out", out)
    assert f"{recipe} is alone" in shown(capsys, recipe, *rest)
    assert "must end in .yaml" in shown(capsys, recipe, str(timeline), "--gpu", "h100", "--out", "ours.json")
    assert "has 4 stages, and the recipe has 1" in shown(capsys, OTHER, str(timeline), *rest)
    wrong = tmp_path / "step_1.json"
    wrong.write_text('{"traceEvents": []}')
    assert "is no timeline of a step" in shown(capsys, recipe, str(wrong), *rest)
    assert not Path(out).exists()
    text = shown(capsys, recipe, str(timeline), recipe, "--gpu", "h10", "--out", recipe)
    assert "is alone" in text and "is a file that is read" in text and "GPU 'h10'" in text


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("{no_such: 0.5}", "without 'no_such'; constants are ampere_share"),
        ("{hopper_share: 1.5}", "a number above 0 and at most 1 for hopper_share"),
        ("{step_seconds: soon}", "a number above 0 for step_seconds"),
        ("[1]", "a table of constants"),
    ],
)
def test_constants_of_a_gpu_s_file_are_checked(table: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text(f"memory_gb: 80\nmemory_tb_per_second: 3.35\nhalf_tflops: 989\nconstants: {table}\n")
    with pytest.raises(ValueError, match=says):
        gpu_of(str(file))
