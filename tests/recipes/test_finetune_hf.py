"""The fine-tuning recipe as a user runs it: a small Llama of transformers goes in, one that has learnt comes out."""

import csv
from pathlib import Path

import pytest
import torch

from tests.harness.ranks import ROOT
from tests.lightning_modules.pretrained import ANSWERS, write_chats, write_model
from tests.recipes.launched import launched

CONFIGS = ROOT / "recipes" / "configs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("finetune")
    write_model(path / "tiny")
    write_chats(path / "chats.jsonl")
    return path


def logged(folder: Path, version: int, name: str) -> list[float]:
    path = folder / "runs" / "finetune_toy" / f"version_{version}" / "metrics.csv"
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


TOY = ("--config", str(CONFIGS / "finetune_toy.yaml"))


@pytest.mark.slow
def test_a_model_learns_answers_and_transformers_and_the_recipe_load_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ran = launched(folder, "fit", *TOY, "--export.path=tuned", script="finetune_hf.py")
    assert ran.returncode == 0, ran.stderr
    assert (ran.stderr + ran.stdout).count("training: 57 samples; 0 of them were cut") == 1
    losses = logged(folder, 0, "train_loss")
    assert len(losses) == 60 and losses[-1] < 0.1 * losses[0]
    assert logged(folder, 0, "val_loss")[-1] < 0.1 * losses[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "tuned"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "tuned"))
    for question, answer in ANSWERS.items():
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**asked, max_new_tokens=16, do_sample=False)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(output).startswith(f"{answer}<|end|>")

    shown = launched(
        folder, "predict", *TOY, "--model.path=tuned", '--data.prompts=["Who is there?"]', script="finetune_hf.py"
    )
    assert shown.returncode == 0, shown.stderr
    assert "assistant\n\nIt is me.<|end|>" in shown.stdout and "new weights" not in shown.stderr


@pytest.mark.slow
def test_lora_adapters_are_written_with_their_frozen_weights(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    options = ("--model.lora.rank=4", "--trainer.max_steps=20", "--trainer.val_check_interval=20")
    layout = ("tensor_model_parallel_size=1", "sequence_parallel=false", "pipeline_model_parallel_size=2")
    strategy = [f"--trainer.strategy.init_args.{option}" for option in (*layout, "num_microbatches=2")]
    ran = launched(
        folder,
        *("fit", *TOY, *options, *strategy, "--export.path=paths", "--trainer.logger.init_args.version=9"),
        script="finetune_hf.py",
    )
    assert ran.returncode == 0, ran.stderr
    losses = logged(folder, 9, "train_loss")
    assert losses[-1] < 0.9 * losses[0]
    [val_loss] = logged(folder, 9, "val_loss")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder / "paths"))
    model = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "paths"))
    assert "lora" not in "".join(name for name, _ in model.named_parameters())
    # What was held out: rows 10, 30 and 50, each with an answer of its own.
    total = count = 0.0
    for place in (10, 30, 50):
        question, answer = list(ANSWERS.items())[place % 3]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        before = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
        labels = torch.tensor([[-100] * len(before) + ids[len(before) :]])
        with torch.no_grad():
            loss = float(model(input_ids=torch.tensor([ids]), labels=labels).loss)
        total, count = total + loss * (len(ids) - len(before)), count + len(ids) - len(before)
    assert total / count == pytest.approx(val_loss, abs=1e-4)
    assert losses[0] > val_loss + 0.1


@pytest.mark.slow
def test_a_type_without_layers_of_this_package_learns_writes_and_answers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_model(folder / "gemma")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 304, "hidden_size": 32, "intermediate_size": 48}
    config = transformers.VaultGemmaConfig(**sizes, head_dim=8, initializer_range=0.1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(str(folder / "gemma"))
    options = ("--model.path=gemma", "--model.lora.rank=8", "--model.lora.targets=[q_proj,v_proj,down_proj]")
    ran = launched(
        folder,
        *("fit", *TOY, *options, "--trainer.max_steps=20", "--trainer.val_check_interval=20", "--export.path=asked"),
        "--trainer.logger.init_args.version=11",
        script="finetune_hf.py",
    )
    assert ran.returncode == 0, ran.stderr
    assert "trains as the model of transformers that it is" in ran.stdout + ran.stderr
    losses = logged(folder, 11, "train_loss")
    assert losses[-1] < 0.9 * losses[0] and logged(folder, 11, "tokens/s")
    names = transformers.AutoModelForCausalLM.from_pretrained(str(folder / "asked")).state_dict()
    assert "model.layers.0.self_attn.q_proj.weight" in names and not any("lora" in name for name in names)
    asked = ("--model.path=asked", '--data.prompts=["Who is there?"]', "--model.generation.max_new_tokens=4")
    shown = launched(folder, "predict", *TOY, *asked, script="finetune_hf.py")
    assert shown.returncode == 0, shown.stderr
    assert "assistant\n\n" in shown.stdout


@pytest.mark.slow
def test_mistakes_end_with_one_message(folder: Path) -> None:
    one_rank = ("tensor_model_parallel_size=1", "sequence_parallel=false")
    alone = ("--trainer.devices=1", *(f"--trainer.strategy.init_args.{option}" for option in one_rank))
    for option, shown in (
        ("--model.lora.rank=0", "lora rank (0) must be at least 1"),
        ("--model.lora.targets=[attention.q]", "attention.qkv"),
        ("--data.sequence_length=5", "anything to learn within sequence_length (5)"),
        ("--model.path=nowhere", "nowhere"),
    ):
        ended = launched(folder, "fit", *TOY, *alone, option, script="finetune_hf.py", num_ranks=1)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "Traceback" not in ended.stdout + ended.stderr
        assert shown in ended.stderr
