"""Dry runs and plans of a user's own module, and of recipes that fine-tune types of models without a family here."""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM, Qwen3Config, VaultGemmaConfig

from lightning_megatron.cli.main import main
from tests.any_module.model_families import config_of
from tests.cli.test_dry_module import QWEN, RECIPE, SMALL, folder_of

FINETUNE = Path(RECIPE).with_name("finetune_toy.yaml")
GEMMA = VaultGemmaConfig(**SMALL)
# A Qwen3, trained as the recipe's module does. What it prints is no part of a report.
MODULE = """\
    import lightning as L
    import torch
    from torch.utils.data import DataLoader
    from transformers import AutoConfig, AutoModelForCausalLM

    from lightning_megatron.hf import load_unchanged, new_unchanged


    class Mine(L.LightningModule):
        def __init__(self):
            super().__init__()
            print("made")
            self.model = None

        def configure_model(self):
            print("configured")
            if self.model is None:
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({folder!r}))

        def training_step(self, batch, batch_idx):
            print("trained")
            loss = self.model(input_ids=batch["tokens"], labels=batch["labels"], use_cache=False).loss
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())


    class WithData(Mine):
        def train_dataloader(self):
            return data()


    def data():
        print("read")
        row = torch.zeros(64, dtype=torch.int64)
        return DataLoader([{{"tokens": row, "labels": row}}] * 32, batch_size=8)


    class Loads(WithData):
        def configure_model(self):
            if self.model is None:
                self.model = load_unchanged({folder!r})


    class Draws(WithData):
        def configure_model(self):
            if self.model is None:
                self.model = new_unchanged({folder!r})


    class Fails(WithData):
        def training_step(self, batch, batch_idx):
            raise KeyError("no such key")


    class Chain(WithData):
        def configure_model(self):
            if self.model is None:
                parts = [torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(4)]
                self.model = torch.nn.Sequential(torch.nn.Embedding(64, 32), *parts, torch.nn.Linear(32, 64))

        def training_step(self, batch, batch_idx):
            logits = self.model(batch["tokens"]).flatten(0, 1)
            return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())


    class Steps(WithData):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            number = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=number)]


    class Asks(WithData):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.trainer.datamodule.rate)


    class Empty(Mine):
        def train_dataloader(self):
            return []
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(textwrap.dedent(MODULE).format(folder=folder_of(QWEN, tmp_path)))
    return str(file)


def record_of(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    captured = capsys.readouterr()
    assert "layers of model that are cut" not in captured.err and "GPU available" not in captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize("layout", ["pp=1,mbs=2", "tp=2,pp=2,mbs=2"])
def test_a_module_of_the_users_runs_dry_as_the_causal_module_of_its_network(
    layout: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--layout", layout, "--world-size", "4", "--global-batch-size", "16")
    own = record_of(capsys, "dry-run", f"{module}:WithData", *options)
    wanted = record_of(capsys, "dry-run", RECIPE, "--model", str(Path(module).parent), *options)
    for found, recipe in zip(own["ranks"], wanted["ranks"], strict=True):
        assert found["parameters"] == recipe["parameters"] and found["flops"] == recipe["flops"]
    # The toy recipe all-reduces gradients.
    [note] = own["notes"]
    assert note.startswith("the strategy's optimizer is OptimizerConfig(kind='distributed', overlap_grad_reduce=True")
    by_function = record_of(capsys, "dry-run", f"{module}:Mine", "--data", f"{module}:data", *options)
    assert by_function == own


def test_configure_optimizers_makes_the_states(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--layout", "tp=2,mbs=2", "--world-size", "2", "--global-batch-size", "8", "--rank", "0")
    steps, adamw, asks = (
        record_of(capsys, "dry-run", f"{module}:{name}", *options) for name in ("Steps", "WithData", "Asks")
    )
    peaks = [one["ranks"][0]["peak_by_kind"] for one in (steps, adamw, asks)]
    assert "moments" not in peaks[0] and peaks[1]["moments"] > 0 and peaks[2] == peaks[1]
    assert len(steps["notes"]) == 1
    assert asks["notes"][1].startswith("not planned: configure_optimizers, which does not step tensors without numbers")
    assert "has no attribute 'rate'" in asks["notes"][1] and asks["notes"][1].endswith("states are those of AdamW")


@pytest.mark.parametrize("name", ["Loads", "Draws"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_models_without_values_run_dry_on_layouts_that_cut_them(
    name: str, kind: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = config_of(kind), Path(module).parent
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    options = ("--world-size", "4", "--global-batch-size", "4", "--rank", "0")
    layouts = ("pp=1", "tp=2", "pp=2,tp=2") if kind == "llama" else ("pp=1", "ep=2", "pp=2,tp=2")
    held = []
    for layout in layouts:
        found = record_of(capsys, "dry-run", f"{module}:{name}", *options, "--layout", layout)
        held.append(found["ranks"][0]["parameters"])
    assert held[0] > held[1] > held[2]
    both = [
        record_of(capsys, "dry-run", f"{module}:{name}", *options, "--layout", "tp=2", "--precision", precision)
        for precision in ("32-true", "bf16-mixed")
    ]
    weights = [one["ranks"][0]["peak_by_kind"]["weights"] for one in both]
    assert weights[0] > 1.5 * weights[1]


def test_layouts_of_a_module_of_the_users_are_found(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--gpu", "h100", "--num-gpus", "2", "--global-batch-size", "4")
    found = record_of(capsys, "plan", f"{module}:WithData", *machine, "--top", "3")
    assert found["model"] == "Qwen3ForCausalLM" and len(found["layouts"]) == 3 and not found["rejected"]
    [best, *_] = found["layouts"]
    again = record_of(capsys, "plan", f"{module}:WithData", *machine, "--layout", best["layout"])
    assert again["step_seconds"] == best["step_seconds"] and again["memory_bytes"] == best["memory_bytes"]


def test_links_of_a_chain_are_layers_that_stages_and_chunks_share(
    module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("plan", f"{module}:Chain", "--gpu", "h100", "--num-gpus", "2", "--global-batch-size", "4")
    whole, cut = (record_of(capsys, *args, "--layout", layout) for layout in ("mbs=1", "pp=2"))
    assert whole["layers"] == [6] and cut["layers"] == [3, 3]
    # Each is launched by the host, however few ranks there are: twice as many links, and half as many microbatches.
    assert whole["seconds"]["compute"] == pytest.approx(cut["seconds"]["compute"])
    found = record_of(capsys, *args, "--top", "9")
    assert any("vp=3" in text for one in found["layouts"] for text in (one["layout"], *one["alike"]))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("{}:WithData",), "--global-batch-size is needed"),
        (("{}:WithData",), "--world-size is needed"),
        (("{}:Mine", *("--world-size", "1", "--global-batch-size", "1")), "has no train_dataloader, and no data"),
        (
            ("{}:None", *("--world-size", "1", "--global-batch-size", "1")),
            "has no None; it has Asks, Chain, Draws, Empty, Fails, Loads, Mine",
        ),
        (("{}:Empty", *("--world-size", "1", "--global-batch-size", "1")), "the data has no batch"),
        (("{}:WithData", "--sequence-length", "7"), "--sequence-length (7) is for a recipe or a model"),
        (
            ("{}:Fails", *("--world-size", "1", "--global-batch-size", "1", "--layout", "pp=1")),
            "the model does not run on tensors without numbers: KeyError: 'no such key' (",
        ),
        (("{}",), "mine.py is a file of Python; name the LightningModule in it"),
        (("none.py:Mine", *("--world-size", "1", "--global-batch-size", "1")), "is no file"),
        ((RECIPE, "--precision", "32-true"), "--precision (32-true) is for a module of yours"),
        (("http://x.y/z",), "is not known; presets are"),
        ((RECIPE, "--data", "{}:data"), "is for a module of yours, as in module.py:MyModule; leave it out"),
    ],
)
def test_what_keeps_a_module_of_the_users_from_running_is_told(
    args: tuple[str, ...], words: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dry-run", *(one.format(module) for one in args)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and captured.out == ""


def written(path: Path, base: Path, model: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    recipe = yaml.safe_load(base.read_text())
    recipe["model"] |= model
    recipe["data"] |= data
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def test_a_recipe_that_fine_tunes_any_type_runs_dry_and_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(GEMMA, tmp_path)
    tuned = written(tmp_path / "tuned.yaml", FINETUNE, {"path": folder}, {"sequence_length": 64})
    layout = ("--layout", "tp=2,pp=2", "--world-size", "4")
    own = record_of(capsys, "dry-run", tuned, *layout)
    wanted = record_of(capsys, "dry-run", RECIPE, "--model", folder, *layout)
    assert own["ranks"] == wanted["ranks"] and own["ranks"][0]["parameters"] > 0
    planned = record_of(capsys, "plan", tuned, "--gpu", "h100", "--layout", "recipe")
    assert planned["model"] == "VaultGemmaForCausalLM"
    with_lora = written(tmp_path / "lora.yaml", FINETUNE, {"path": folder, "lora": {"rank": 4}}, {})
    lora = record_of(capsys, "dry-run", with_lora, "--rank", "0")
    plain = record_of(capsys, "dry-run", tuned, "--rank", "0", "--sequence-length", "128")
    moments = [one["ranks"][0]["peak_by_kind"]["moments"] for one in (lora, plain)]
    assert lora["ranks"][0]["parameters"] > plain["ranks"][0]["parameters"] and moments[0] < moments[1] / 4
    upcycled = written(tmp_path / "moe.yaml", FINETUNE, {"path": folder, "upcycle": {"router": {"num_experts": 4}}}, {})
    assert main(["dry-run", upcycled]) == 2
    assert "model.upcycle is for a model of this package's families" in capsys.readouterr().err


def test_a_family_s_model_is_planned_as_the_package_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tied = {**Qwen3Config(**SMALL).to_dict(), "tie_word_embeddings": False}
    folder = folder_of(Qwen3Config(**tied), tmp_path)
    tuned = written(tmp_path / "tuned.yaml", FINETUNE, {"path": folder}, {})
    assert record_of(capsys, "plan", tuned, "--gpu", "h100", "--layout", "recipe")["model"] != "Qwen3ForCausalLM"
