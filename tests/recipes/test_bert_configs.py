"""The shipped configurations of BERT parse, fit their ranks, and are the models that they are named after."""

import pytest

from lightning_megatron.cli.recipe import RecipeCLI
from lightning_megatron.lightning_modules import BertDataModule, BertModule
from lightning_megatron.mesh import Mesh
from lightning_megatron.models.bert_cost import bert_parameters
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer.callbacks import ThroughputMonitor
from tests.recipes.test_configs import CONFIGS, Parsed, sizes_of

NAMES = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.stem.startswith(("bert_", "megatron_bert_")))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain_bert.py"])
    # The command line sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def parse(name: str, *options: str) -> RecipeCLI:
    return Parsed(
        BertModule,
        BertDataModule,
        links={"model.config.vocab_size": "data.vocab_size", "model.config.add_binary_head": "data.sentence_order"},
        callbacks={"throughput": ThroughputMonitor},
        args=["fit", "--config", str(CONFIGS / name), *options],
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_has_no_fault(name: str) -> None:
    parsed = parse(name)
    sizes = sizes_of(parsed)  # type: ignore[arg-type]
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        model=parsed.model.config,
        global_batch_size=parsed.datamodule.global_batch_size,
        sequence_length=parsed.datamodule.sequence_length,
    )
    assert cross_config.faults(facts) == []
    assert parsed.datamodule.faults() == []
    assert parsed.datamodule.sequence_length == parsed.model.config.max_sequence_length
    assert Mesh.imagine(sizes.world - 1, sizes).dp.size == sizes.dp


@pytest.mark.parametrize(
    ("name", "parameters", "world", "dp"),
    [
        ("bert_toy.yaml", 0.96e6, 2, 1),
        ("bert_base.yaml", 110_106_428, 8, 8),  # the released weights with both heads, counted
        ("bert_large.yaml", 336_226_108, 16, 16),  # the released weights with both heads, counted
        ("megatron_bert_3.9b.yaml", 3.9e9, 128, 16),  # arXiv 1909.08053, table of BERT models
    ],
)
def test_a_model_has_the_size_of_its_name(name: str, parameters: float, world: int, dp: int) -> None:
    parsed = parse(name)
    counted = bert_parameters(parsed.model.config)
    assert counted == parameters if isinstance(parameters, int) else counted == pytest.approx(parameters, rel=0.01)
    sizes = sizes_of(parsed)  # type: ignore[arg-type]
    assert (sizes.world, sizes.dp) == (world, dp)


def test_every_configuration_is_counted() -> None:
    assert NAMES == ["bert_base.yaml", "bert_large.yaml", "bert_toy.yaml", "megatron_bert_3.9b.yaml"]


def test_one_option_takes_the_order_out_of_the_model_and_of_the_data() -> None:
    assert parse("bert_toy.yaml").datamodule.config.sentence_order
    assert not parse("bert_toy.yaml", "--model.config.add_binary_head=false").datamodule.config.sentence_order
