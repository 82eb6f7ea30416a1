"""A model of transformers that ranks have trained as it is is saved whole, as transformers loads it."""

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GenerationConfig

from lightning_megatron import hf
from lightning_megatron.hf.save_unchanged import mesh_of, remember_ranks, take_methods
from lightning_megatron.mesh import Mesh, Sizes
from tests.any_module.model_families import Causal, batches
from tests.harness.ranks import run_on_ranks
from tests.trainer.layouts import Layout, make_trainer


class Saves(L.Callback):
    """Saves after the fit; where ranks have cut the model, by its own method in the fit and on the first rank too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.refusal = ""

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.world_size > 1:
            with pytest.raises(RuntimeError) as caught:
                pl_module.model.save_pretrained(self.path)
            self.refusal = str(caught.value)

    def on_fit_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if trainer.world_size == 1:
            pl_module.model.save_pretrained(self.path)
            return
        hf.save_pretrained(pl_module.model, self.path)
        if trainer.is_global_zero:
            pl_module.model.save_pretrained(f"{self.path}_itself")


class Generates(Causal):
    """Its model has a configuration of how to generate."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.generation_config = GenerationConfig(eos_token_id=7, max_new_tokens=3)


def saved(layout: Layout, model_type: str, path: Path) -> str:
    torch.use_deterministic_algorithms(False)
    saves = Saves(path)
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    make_trainer(layout, max_epochs=1, callbacks=[saves]).fit(Generates(model_type), loader)
    return saves.refusal


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("qwen3", Layout(world=4, tp=2, pp=2, microbatches=2)), ("qwen3_moe", Layout(world=2, ep=2))],
    ids=["qwen3", "qwen3_moe"],
)
def test_a_folder_has_what_one_device_would_have_saved(model_type: str, layout: Layout, tmp_path: Path) -> None:
    run_on_ranks(1, saved, Layout(is_plain=True), model_type, tmp_path / "wanted", init=False)
    for refusal in run_on_ranks(layout.world, saved, layout, model_type, tmp_path / "found", init=False):
        assert "call lightning_megatron.hf.save_pretrained(model, path) on every rank" in refusal
    names = ("wanted", "found", "found_itself")
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in names]
    wanted, found, by_itself = (model.state_dict() for model in models)
    assert found.keys() == wanted.keys() == by_itself.keys()
    assert all(torch.equal(by_itself[name], tensor) for name, tensor in found.items())
    # In float32, which transformers' norms and tables compute in.
    assert max(float((found[name] - tensor).abs().max()) for name, tensor in wanted.items()) < 1e-4
    files = {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in names}
    assert files["found"] == files["wanted"] == files["found_itself"]
    assert models[1].generation_config.eos_token_id == 7
    assert models[1].config.to_diff_dict() == models[0].config.to_diff_dict()


def test_a_model_that_knows_its_ranks_is_copied_and_pickled(tmp_path: Path) -> None:
    module = Causal("qwen3")
    module.configure_model()
    mesh = Mesh.imagine(1, Sizes(world=2, tp=2))
    remember_ranks(module.model, mesh)
    assert b"lightning_megatron.hf" not in pickle.dumps(module.model)
    take_methods(module.model, mesh)
    copy, loaded = deepcopy(module.model), pickle.loads(pickle.dumps(module.model))
    assert (mesh_of(copy).tp.size, mesh_of(loaded).tp.size) == (2, 1)
    for one in (module.model, copy, loaded):
        with pytest.raises(RuntimeError, match="each rank holds a part of this model"):
            one.save_pretrained(tmp_path)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model \(Linear\) with family \(None\) must be a model of this package"):
        hf.save_pretrained(torch.nn.Linear(1, 1), tmp_path / "x")
