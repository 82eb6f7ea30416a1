"""The shipped configurations of fine-tuning parse, fit their ranks, and train what they say."""

from pathlib import Path

import pytest

from lightning_megatron import hf
from lightning_megatron.lightning_modules import ChatDataModule, T5ChatDataModule, T5FinetuneModule
from lightning_megatron.lightning_modules.export import ExportPretrained
from lightning_megatron.lightning_modules.finetune import FinetuneModule
from lightning_megatron.lightning_modules.print_text import PrintText
from lightning_megatron.mesh import Sizes
from lightning_megatron.models import GPTConfig, T5Config
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer.callbacks import ThroughputMonitor
from lightning_megatron.transformer import cost
from tests.recipes.test_configs import CONFIGS, Parsed

# Grattafiori et al., arXiv 2407.21783, table 3.
LLAMA3_8B = GPTConfig(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    max_sequence_length=8192,
    activation="swiglu",
    normalization="rmsnorm",
    add_bias_linear=False,
    position="rotary",
    rotary_base=500000.0,
    tie_embeddings=False,
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["finetune_hf.py"])
    monkeypatch.setattr(hf, "config_from_pretrained", lambda path, **options: LLAMA3_8B)
    # The command line sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def parse(name: str, *options: str) -> Parsed:
    return Parsed(
        FinetuneModule,
        ChatDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "export": ExportPretrained},
        args=["fit", "--config", str(CONFIGS / name), *options],
    )


OF_GPT = sorted(path for path in CONFIGS.glob("finetune_*.yaml") if not path.stem.startswith("finetune_t5"))


@pytest.mark.parametrize("path", OF_GPT, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_no_fault(path: Path) -> None:
    parsed = parse(path.name)
    trainer = parsed.config["fit"]["trainer"]
    options = trainer["strategy"]["init_args"]
    facts = cross_config.Facts(
        sizes=Sizes(
            world=trainer["devices"] * trainer["num_nodes"],
            tp=options["tensor_model_parallel_size"],
            pp=options["pipeline_model_parallel_size"],
            sequence_parallel=options["sequence_parallel"],
        ),
        num_microbatches=options["num_microbatches"],
        model=parsed.model.config,
        global_batch_size=parsed.datamodule.global_batch_size,
        sequence_length=parsed.datamodule.sequence_length,
    )
    assert cross_config.faults(facts) == []
    assert parsed.datamodule.config.tokenizer == parsed.model.path
    assert (parsed.model.lora is not None) == path.stem.endswith("_lora")


def test_the_model_has_the_size_of_its_name() -> None:
    assert cost.model_parameters(LLAMA3_8B) == 8_030_261_248  # the released weights, counted


def test_paths_can_be_asked_for_on_the_command_line() -> None:
    lora = parse("finetune_toy.yaml", "--model.lora.rank=4", '--model.lora.targets=["mlp.up"]').model.lora
    assert (lora.rank, lora.targets) == (4, ("mlp.up",))


def test_chats_are_packed_where_that_is_asked_for() -> None:
    assert parse("finetune_toy.yaml").datamodule.config.packing == "none"
    assert parse("finetune_toy.yaml", "--data.packing=documents").datamodule.config.packing == "documents"


def test_the_toy_of_a_t5_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hf,
        "config_from_pretrained",
        lambda path: T5Config(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=9),
    )
    parsed = Parsed(
        T5FinetuneModule,
        T5ChatDataModule,
        links={"model.path": "data.tokenizer"},
        callbacks={"throughput": ThroughputMonitor, "print_text": PrintText, "export": ExportPretrained},
        args=["fit", "--config", str(CONFIGS / "finetune_t5_toy.yaml")],
    )
    assert parsed.datamodule.decoder_sequence_length == 32 and parsed.datamodule.config.tokenizer == "tiny"
