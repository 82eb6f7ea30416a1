"""The shipped configurations parse, fit their ranks, and are the models that they are named after."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron import hf
from lightning_megatron.cli.usage import UsageError
from lightning_megatron.lightning_modules import StreamingConfig
from lightning_megatron.mesh import Mesh
from lightning_megatron.models import BertConfig, GPTConfig, LlavaConfig, T5Config, T5Model
from lightning_megatron.models.bert_cost import bert_parameters
from lightning_megatron.models.llava import LlavaModel
from lightning_megatron.models.t5_cost import model_parameters as t5_parameters
from lightning_megatron.moe.capacity import ExpertCapacity
from lightning_megatron.moe.config import AuxLoss
from lightning_megatron.rules import cross_config
from lightning_megatron.trainer import ConfigurationError
from lightning_megatron.trainer.callbacks import MemoryMonitor, StepTimeline
from lightning_megatron.transformer import cost
from tests.lightning_modules.pretrained import write_model
from tests.recipes.parsed import CONFIGS, parse, script_of, sizes_of

SCRIPTS_OF_ANY_MODEL = ("pretrain_hf.py", "dpo_hf.py", "distill_hf.py")
# Configurations of models in a folder that have a family.
FINETUNED = ("finetune_", "packed_")
# Options that are folders of models.
FOLDERS_OF = {"distill_hf.py": ("model.path", "model.teacher")}
# The models of these are any of transformers, in a folder.
UNCHANGED = sorted(path.name for path in CONFIGS.glob("*.yaml") if script_of(path.name).name in SCRIPTS_OF_ANY_MODEL)
ALL = sorted(path.name for path in CONFIGS.glob("*.yaml") if path.name not in UNCHANGED)
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
SMALL_T5 = T5Config(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=9)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["recipe.py"])
    # Fine-tuning reads the model's configuration from a folder, which is not here; that of a T5 cannot be upcycled.
    monkeypatch.setattr(
        hf, "config_from_pretrained", lambda path, **options: LLAMA3_8B if "upcycle" in options else SMALL_T5
    )
    # The command line sets these; monkeypatch takes them back.
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


def count(config: Any) -> int:
    """Parameters of a model."""
    if isinstance(config, LlavaConfig):
        with torch.device("meta"):
            return sum(p.numel() for p in LlavaModel(config, mesh=Mesh.single()).parameters())
    if isinstance(config, BertConfig):
        return bert_parameters(config)
    return t5_parameters(config) if isinstance(config, T5Config) else cost.model_parameters(config)


@pytest.mark.parametrize("name", ALL)
def test_a_shipped_configuration_has_no_fault(name: str) -> None:
    parsed = parse(name)
    sizes, data, config = sizes_of(parsed), parsed.datamodule, parsed.model.config
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        model=config,
        global_batch_size=data.global_batch_size,
        sequence_length=data.sequence_length,
    )
    assert cross_config.faults(facts) == []
    assert Mesh.imagine(sizes.world - 1, sizes).dp.size == sizes.dp
    if name.startswith(FINETUNED):
        # Its tokenizer and its table lie where the user has them.
        assert data.config.tokenizer == parsed.model.path
        return
    # Other faults of a LLaVA's data, and of a blend's, are files that this machine has not.
    absent = ("tokenizer (", "path (", "image_folder (") if isinstance(config, LlavaConfig) else ("source ",)
    assert [fault for fault in data.faults() if not fault.startswith(absent)] == []
    assert data.config.vocab_size == config.vocab_size
    assert data.sequence_length <= config.max_sequence_length


@pytest.mark.parametrize("name", UNCHANGED)
def test_a_configuration_of_any_model_has_no_fault(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    folders = [f"--{option}={tmp_path / 'model'}" for option in FOLDERS_OF.get(script_of(name).name, ("model.path",))]
    parsed = parse(name, *folders)
    sizes, data = sizes_of(parsed), parsed.datamodule
    facts = cross_config.Facts(
        sizes=sizes,
        num_microbatches=parsed.config["fit"]["trainer"]["strategy"]["init_args"]["num_microbatches"],
        global_batch_size=data.global_batch_size,
        sequence_length=data.sequence_length,
    )
    assert cross_config.faults(facts) == [] and Mesh.imagine(sizes.world - 1, sizes).dp.size == sizes.dp
    assert data.config.tokenizer == parsed.model.path
    # Its table lies where the user has it.
    assert [fault for fault in data.faults() if "path (" not in fault] == []


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(("bert_", "megatron_bert_", "t5_"))])
def test_samples_fill_the_positions_of_the_model(name: str) -> None:
    parsed = parse(name)
    data, config = parsed.datamodule, parsed.model.config
    assert data.sequence_length == config.max_sequence_length
    if isinstance(config, T5Config):
        assert data.decoder_sequence_length == config.max_decoder_sequence_length


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith("llava_")])
def test_images_of_the_data_are_those_of_the_model(name: str) -> None:
    parsed = parse(name)
    assert parsed.datamodule.features_per_image == parsed.model.config.features_per_image
    assert parsed.datamodule.config.image_token == parsed.model.config.image_token


# Parameters, processes and data-parallel ranks.
SIZES: dict[str, tuple[Any, int, int]] = {
    "toy.yaml": (pytest.approx(3.7e6, rel=1e-2), 2, 1),
    "gpt_muon.yaml": (pytest.approx(3.7e6, rel=1e-2), 2, 1),
    "gpt2_124m.yaml": (124_439_808, 8, 8),  # the released weights, counted
    "gpt3_175b.yaml": (pytest.approx(174.6e9, rel=5e-4), 1024, 8),  # arXiv 2104.04473, table 2
    "gpt_1t.yaml": (pytest.approx(1008.0e9, rel=5e-4), 3072, 6),  # arXiv 2104.04473, table 1
    # The released weights, and arXiv 2407.21783, table 4.
    "llama3_405b_128k.yaml": (pytest.approx(405.85e9, rel=5e-4), 16384, 8),
    "moe_toy.yaml": (pytest.approx(5.5e6, rel=1e-2), 2, 2),
    "blend_toy.yaml": (pytest.approx(0.48e6, rel=1e-2), 2, 1),
    "mixtral_8x7b.yaml": (46_702_792_704, 64, 16),  # the released weights, counted
    "mixtral_8x22b.yaml": (140_620_634_112, 128, 8),  # the released weights, counted
    "qwen3_30b_a3b.yaml": (30_532_122_624, 16, 8),  # the released weights, counted
    "deepseek_toy.yaml": (3_451_712, 2, 2),
    "deepseek_v3.yaml": (671_026_404_352, 2048, 128),  # the released weights, counted, but for the experts' biases
    "bert_toy.yaml": (pytest.approx(0.96e6, rel=0.01), 2, 1),
    "bert_base.yaml": (110_106_428, 8, 8),  # the released weights with both heads, counted
    "bert_large.yaml": (336_226_108, 16, 16),  # the released weights with both heads, counted
    "megatron_bert_3.9b.yaml": (pytest.approx(3.9e9, rel=0.01), 128, 16),  # arXiv 1909.08053, table of BERT models
    "t5_toy.yaml": (pytest.approx(4.20e6, rel=5e-3), 2, 1),
    # The released weights, counted; the unused tables of cross attention in the first files left out.
    "t5_small.yaml": (60_506_624, 8, 8),
    "t5_base.yaml": (222_903_552, 8, 8),
    "t5_large.yaml": (737_668_096, 32, 32),
    "t5_3b.yaml": (2_851_598_336, 64, 32),
    "t5_11b.yaml": (11_307_321_344, 128, 8),
    "t5_v1_1_xl.yaml": (2_849_757_184, 64, 16),
    # Tower, projector and language model summed by hand.
    "llava_toy.yaml": (1_205_344, 2, 2),
    "llava_1_5_7b_pretrain.yaml": (7_063_427_072, 8, 4),
    "llava_1_5_7b.yaml": (7_063_427_072, 8, 2),
    "llava_1_5_13b.yaml": (13_351_494_656, 16, 4),
}


@pytest.mark.parametrize("name", [name for name in ALL if not name.startswith(FINETUNED)])
def test_a_model_has_the_size_of_its_name(name: str) -> None:
    parameters, world, dp = SIZES[name]
    parsed = parse(name)
    assert count(parsed.model.config) == parameters
    sizes = sizes_of(parsed)
    assert (sizes.world, sizes.dp) == (world, dp)


def test_the_model_that_fine_tuning_is_planned_for_has_its_size() -> None:
    assert cost.model_parameters(LLAMA3_8B) == 8_030_261_248  # the released weights, counted


@pytest.mark.parametrize(
    ("name", "active", "edp"),
    [
        ("mixtral_8x7b.yaml", 12.9e9, 2),  # arXiv 2401.04088, section 3
        ("mixtral_8x22b.yaml", 39e9, 2),  # as its makers call it
        ("qwen3_30b_a3b.yaml", 3.3e9, 1),  # arXiv 2505.09388, section 1
        ("moe_toy.yaml", 3.94e6, 1),
        ("deepseek_v3.yaml", 37e9, 2),  # arXiv 2412.19437, section 1
        ("deepseek_toy.yaml", 2.57e6, 1),
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
    ("options", "shown"),
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
def test_experts_that_cannot_be_are_faults_reported_together(options: list[str], shown: list[str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse("moe_toy.yaml", *(f"--model.config.moe.{option}" for option in options))
    assert all(text in str(raised.value) for text in shown)


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


def test_one_entry_of_a_list_is_changed_by_its_class(tmp_path: Path) -> None:
    options = ("--trainer.callbacks.ModelCheckpoint.every_n_train_steps=50", "--trainer.logger.CSVLogger.name", "other")
    trainer = parse("toy.yaml", *options).config_init["fit"]["trainer"]
    bar, checkpoint = trainer["callbacks"]
    assert (bar.refresh_rate, checkpoint._every_n_train_steps, trainer["logger"].name) == (5, 50, "other")
    # In a layer of its own, and beside other ways to change a list.
    layer = tmp_path / "layer.yaml"
    layer.write_text("trainer: {callbacks: [{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 7}}]}")
    more = ("--config", str(layer), "--trainer.callbacks+=LearningRateMonitor")
    found = parse("toy.yaml", *more, "--trainer.callbacks.ModelCheckpoint.verbose=true").config_init["fit"]["trainer"]
    checkpoint, monitor = found["callbacks"]
    assert (checkpoint._every_n_train_steps, checkpoint.verbose) == (7, True)
    assert type(monitor).__name__ == "LearningRateMonitor"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["callbacks.LearningRateMonitor.log_momentum=true", "logger.WandbLogger.name=a"], "there are 0"),
        (["callbacks.ModelCheckpoint.every_n_train_stepz=50"], "'every_n_train_stepz' is not accepted"),
        (["callbacks.ModelCheckpoint.every_n_train_steps=abc"], "must be a whole number"),
        (["callbacks.ModelCheckpoint.save_top_k"], "needs a value"),
    ],
)
def test_an_entry_that_cannot_be_changed_is_told(options: list[str], shown: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse("toy.yaml", *(f"--trainer.{option}" for option in options))
    assert shown in str(raised.value) and str(raised.value).count(f"--trainer.{options[0].partition('=')[0]}") >= 1


@pytest.mark.parametrize(
    ("logger", "package"), [("TensorBoardLogger", "tensorboard"), ("WandbLogger", "wandb"), ("MLFlowLogger", "mlflow")]
)
def test_loggers_are_taken_where_they_are_installed(logger: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    options = (f"--trainer.logger+={logger}", f"--trainer.logger.save_dir={tmp_path}")
    first, second = parse("toy.yaml", *options).config_init["fit"]["trainer"]["logger"]
    assert (type(first).__name__, type(second).__name__) == ("CSVLogger", logger)


def test_streaming_takes_true_for_its_defaults() -> None:
    for options, wanted in (
        ((), None),
        (("--data.streaming=false",), None),
        (("--data.streaming", "true"), StreamingConfig()),
        (("--data.streaming.window_documents=9",), StreamingConfig(window_documents=9)),
    ):
        assert parse("toy.yaml", *options).datamodule.config.stream == wanted


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("llava_toy.yaml", []),
        ("llava_1_5_7b_pretrain.yaml", ["vision", "language"]),
        ("llava_1_5_7b.yaml", ["vision"]),
        ("llava_1_5_13b.yaml", ["vision"]),
    ],
)
def test_each_stage_of_llava_freezes_its_parts(name: str, frozen: list[str]) -> None:
    assert parse(name).model.frozen == frozen


def test_one_option_takes_the_order_out_of_the_model_and_of_the_data() -> None:
    assert parse("bert_toy.yaml").datamodule.config.sentence_order
    assert not parse("bert_toy.yaml", "--model.config.add_binary_head=false").datamodule.config.sentence_order


def test_stages_by_cost_put_more_layers_of_the_decoder_on_a_rank_than_of_the_encoder() -> None:
    parsed = parse("t5_v1_1_xl.yaml")
    small = {"num_layers": 24, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64}
    options = [f"--model.config.{name}={value}" for name, value in small.items()]
    config = parse("t5_v1_1_xl.yaml", *options, "--model.config.head_dim=8", "--model.config.ffn_hidden_size=80").model
    model = T5Model(config.config, mesh=Mesh.imagine(0, sizes_of(parsed)))
    # The encoder reads four times as many tokens.
    assert "decoder.layers.0" in model.parts_of(1) and "encoder.layers.20" in model.parts_of(1)


def test_adapters_come_from_the_file_and_from_the_command_line() -> None:
    lora = parse("finetune_toy.yaml", "--model.lora.rank=4", '--model.lora.targets=["mlp.up"]').model.lora
    assert (lora.rank, lora.targets) == (4, ("mlp.up",))
    for name in ("finetune_toy.yaml", "finetune_llama3_8b.yaml", "finetune_llama3_8b_lora.yaml"):
        assert (parse(name).model.lora is not None) == name.endswith("_lora.yaml")


def test_chats_are_packed_where_requested() -> None:
    assert parse("finetune_toy.yaml").datamodule.config.packing == "none"
    assert parse("finetune_toy.yaml", "--data.packing=documents").datamodule.config.packing == "documents"


def test_the_toy_of_a_t5_reads_the_model_s_tokenizer() -> None:
    data = parse("finetune_t5_toy.yaml").datamodule
    assert data.decoder_sequence_length == 32 and data.config.tokenizer == "tiny"
