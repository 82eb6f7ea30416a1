"""The shipped configurations of T5s parse, fit their ranks, and are the models that they are named after."""

from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.lightning_modules import T5DataModule, T5Module
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Mesh, Sizes, StageLayout
from lightning_megatron.models import T5Model
from lightning_megatron.models.t5_cost import model_parameters
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer.callbacks import ThroughputMonitor

CONFIGS = Path(__file__).resolve().parents[2] / "recipes" / "configs"
ALL = sorted(path.name for path in CONFIGS.glob("t5_*.yaml"))


class Parsed(RecipeCLI):
    """Stops before there is a Trainer, whose devices this machine has not."""

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None

    def _run_subcommand(self, subcommand: str) -> None:
        pass


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_t5.py"])
    # The command line sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def parse(name: str, *options: str) -> Parsed:
    return Parsed(
        T5Module,
        T5DataModule,
        links={"model.config.vocab_size": "data.vocab_size"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText},
        args=["fit", "--config", str(CONFIGS / name), *options],
    )


def sizes_of(parsed: Parsed) -> Sizes:
    trainer = parsed.config["fit"]["trainer"]
    options = trainer["strategy"]["init_args"]
    layout = options["pipeline"]["layout"] if options["pipeline"] else {}
    return Sizes(
        world=trainer["devices"] * trainer["num_nodes"],
        tp=options["tensor_model_parallel_size"],
        pp=options["pipeline_model_parallel_size"],
        vp=options["virtual_pipeline_model_parallel_size"],
        sequence_parallel=options["sequence_parallel"],
        stage_layout=StageLayout(**layout),
    )


@pytest.mark.parametrize("name", ALL)
def test_a_shipped_configuration_has_no_fault(name: str) -> None:
    parsed = parse(name)
    sizes, data = sizes_of(parsed), parsed.datamodule
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        model=parsed.model.config,
        global_batch_size=data.global_batch_size,
        sequence_length=data.sequence_length,
    )
    assert cross_config.faults(facts) == []
    assert data.faults() == []
    assert data.config.vocab_size == parsed.model.config.vocab_size
    assert data.sequence_length == parsed.model.config.max_sequence_length
    assert data.decoder_sequence_length == parsed.model.config.max_decoder_sequence_length


@pytest.mark.parametrize(
    ("name", "parameters", "world", "dp"),
    [
        ("t5_toy.yaml", 4.20e6, 2, 1),
        # The released weights, counted; the unused tables of cross attention in the first files left out.
        ("t5_small.yaml", 60_506_624, 8, 8),
        ("t5_base.yaml", 222_903_552, 8, 8),
        ("t5_large.yaml", 737_668_096, 32, 32),
        ("t5_3b.yaml", 2_851_598_336, 64, 32),
        ("t5_11b.yaml", 11_307_321_344, 128, 8),
        ("t5_v1_1_xl.yaml", 2_849_757_184, 64, 16),
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, parameters: float, world: int, dp: int) -> None:
    parsed = parse(name)
    counted = model_parameters(parsed.model.config)
    assert counted == (parameters if isinstance(parameters, int) else pytest.approx(parameters, rel=5e-3))
    sizes = sizes_of(parsed)
    assert (sizes.world, sizes.dp) == (world, dp)


def test_stages_by_cost_put_more_layers_of_the_decoder_on_a_rank_than_of_the_encoder() -> None:
    parsed = parse("t5_v1_1_xl.yaml")
    small = {"num_layers": 24, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    options = [f"--model.config.{name}={value}" for name, value in small.items()]
    config = parse("t5_v1_1_xl.yaml", *options, "--model.config.head_dim=8", "--model.config.ffn_hidden_size=80").model
    model = T5Model(config.config, mesh=Mesh.imagine(0, sizes_of(parsed)))
    # The encoder reads four times as many tokens.
    assert "decoder.layers.0" in model.parts_of(1) and "encoder.layers.20" in model.parts_of(1)
