"""The shipped configurations parse, fit their ranks, and are the models that they are named after."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.lightning_modules import GPTDataModule, GPTModule
from lightning_megatron.mesh import Mesh, Sizes
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.callbacks import MemoryMonitor, StepTimeline, ThroughputMonitor
from lightning_megatron.transformer import cost

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"


class Parsed(RecipeCLI):
    """Stops before there is a Trainer, whose devices this machine has not."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py"])
    # The command line sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def parse(name: str, *options: str) -> Parsed:
    return Parsed(
        GPTModule,
        GPTDataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor},
        args=["fit", "--config", str(CONFIGS / name), *options],
    )


def sizes_of(parsed: Parsed) -> Sizes:
    trainer = parsed.config["fit"]["trainer"]
    options = trainer["strategy"]["init_args"]
    return Sizes(
        world=trainer["devices"] * trainer["num_nodes"],
        tp=options["tensor_model_parallel_size"],
        pp=options["pipeline_model_parallel_size"],
        cp=options["context_parallel_size"],
        ep=options["expert_model_parallel_size"],
        etp=options["expert_tensor_parallel_size"],
        vp=options["virtual_pipeline_model_parallel_size"],
        sequence_parallel=options["sequence_parallel"],
    )


def test_a_file_may_ask_for_any_callback(tmp_path: Path) -> None:
    asked = tmp_path / "callbacks.yaml"
    asked.write_text(
        "trainer:\n  callbacks:\n"
        "    - class_path: lightning_megatron.trainer.callbacks.MemoryMonitor\n"
        "    - class_path: lightning_megatron.trainer.callbacks.StepTimeline\n"
        "      init_args: {step: 20, folder: out}\n"
        "throughput: {every_n_batches: 7}\n"
    )
    memory, timeline = parse("toy.yaml", "--config", str(asked)).config_init["fit"]["trainer"]["callbacks"]
    assert isinstance(memory, MemoryMonitor) and isinstance(timeline, StepTimeline)
    assert (timeline.step, timeline.folder) == (20, "out")


# The others are those of other recipes.
OTHERS = ("bert_", "finetune_", "llava_", "megatron_bert_", "t5_")
PRETRAINING = sorted(path for path in CONFIGS.glob("*.yaml") if not path.stem.startswith(OTHERS))


@pytest.mark.parametrize("path", PRETRAINING, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_no_fault(path: Path) -> None:
    parsed = parse(path.name)
    sizes = sizes_of(parsed)
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        model=parsed.model.config,
        global_batch_size=parsed.datamodule.global_batch_size,
        sequence_length=parsed.datamodule.sequence_length,
    )
    assert cross_config.faults(facts) == []
    assert parsed.datamodule.faults() == []
    assert parsed.datamodule.config.vocab_size == parsed.model.config.vocab_size
    assert Mesh.imagine(sizes.world - 1, sizes).dp.size == sizes.dp


@pytest.mark.parametrize(
    ("name", "parameters", "world", "dp"),
    [
        ("toy.yaml", 3.7e6, 2, 1),
        ("gpt2_124m.yaml", 124_439_808, 8, 8),  # the released weights, counted
        ("gpt3_175b.yaml", 174.6e9, 1024, 8),  # arXiv 2104.04473, table 2
        ("gpt_1t.yaml", 1008.0e9, 3072, 6),  # arXiv 2104.04473, table 1
        ("llama3_405b_128k.yaml", 405.85e9, 16384, 8),  # the released weights, and arXiv 2407.21783, table 4
        ("moe_toy.yaml", 5.5e6, 2, 2),
        ("mixtral_8x7b.yaml", 46_702_792_704, 64, 16),  # the released weights, counted
        ("mixtral_8x22b.yaml", 140_620_634_112, 128, 8),  # the released weights, counted
        ("qwen3_30b_a3b.yaml", 30_532_122_624, 16, 8),  # the released weights, counted
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, parameters: float, world: int, dp: int) -> None:
    parsed = parse(name)
    counted = cost.model_parameters(parsed.model.config)
    if isinstance(parameters, int):
        assert counted == parameters
    else:
        assert counted == pytest.approx(parameters, rel=1e-2 if "toy" in name else 5e-4)
    sizes = sizes_of(parsed)
    assert (sizes.world, sizes.dp) == (world, dp)


@pytest.mark.parametrize(
    ("name", "active", "edp"),
    [
        ("mixtral_8x7b.yaml", 12.9e9, 2),  # arXiv 2401.04088, section 3
        ("mixtral_8x22b.yaml", 39e9, 2),  # as its makers call it
        ("qwen3_30b_a3b.yaml", 3.3e9, 1),  # arXiv 2505.09388, section 1
        ("moe_toy.yaml", 3.94e6, 1),
    ],
)
def test_a_token_uses_as_many_parameters_as_the_name_says(name: str, active: float, edp: int) -> None:
    parsed = parse(name)
    assert cost.active_parameters(parsed.model.config) == pytest.approx(active, rel=0.02)
    assert sizes_of(parsed).edp == edp


def test_experts_come_from_the_file_and_from_the_command_line() -> None:
    moe = parse(
        "moe_toy.yaml", "--model.config.moe.router.num_experts=8", "--model.config.moe.layer_freq=1"
    ).model.config.moe
    assert moe is not None and (moe.router.num_experts, moe.layer_freq) == (8, 1)
    assert (moe.router.top_k, moe.router.aux_losses) == (2, (AuxLoss(coefficient=0.01),))
    options = ["--model.config.moe.router.num_experts=4", "--model.config.moe.capacity.factor=1.5"]
    options += ["--model.config.moe.router.aux_losses=[{scope: global, coefficient: 0.02}]"]
    # A file without experts takes them, too.
    moe = parse("toy.yaml", *options).model.config.moe
    assert moe is not None and moe.capacity == ExpertCapacity(factor=1.5)
    assert moe.router.aux_losses == (AuxLoss(scope="global", coefficient=0.02),)
    assert parse("toy.yaml").model.config.moe is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["router.top_k=5", "router.jitter=2"], ["top_k (5) must be at most num_experts (4)", "jitter (2.0) must be"]),
        (["capacity.factor=0.01"], ["capacity factor (0.01) for sequences of 128 tokens", "must be at least 1"]),
        (
            ["layer_freq=0", "shared_expert_gate=true"],
            ["moe layer_freq (0) must be at least 1", "needs a shared expert"],
        ),
    ],
    ids=["router", "capacity", "layers"],
)
def test_experts_that_cannot_be_are_faults_told_together(options: list[str], told: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse("moe_toy.yaml", *(f"--model.config.moe.{option}" for option in options))
    assert all(text in str(raised.value) for text in told)


def test_the_count_is_that_of_the_published_formula() -> None:
    config = parse("gpt_1t.yaml").model.config
    # ArXiv 2104.04473, equation 2; it leaves out the last norm.
    layers, hidden = config.num_layers, config.hidden_size
    published = 12 * layers * hidden**2 + 13 * layers * hidden
    published += (config.vocab_size + config.max_sequence_length) * hidden
    assert cost.model_parameters(config) - published == 2 * hidden


def test_documents_are_a_stream_unless_asked_for_and_kept_apart_by_two_options() -> None:
    [stream, *packed] = [
        parse("toy.yaml", *options).datamodule
        for options in ([], ["--data.packing=documents"], ["--data.packing=documents", "--data.long_documents=drop"])
    ]
    assert stream.config.packing == "stream"
    found = [(data.config.packing, data.config.long_documents) for data in packed]
    assert found == [
        ("documents", "split"),
        ("documents", "drop"),
    ]


def test_an_option_on_the_command_line_wins_over_the_file() -> None:
    assert parse("toy.yaml", "--model.config.num_layers", "6").model.config.num_layers == 6
