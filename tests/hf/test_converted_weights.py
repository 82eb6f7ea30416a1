"""Experts that files hold one by one are put together for what a rank holds, as transformers puts them together."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from lightning_megatron import hf
from lightning_megatron.mesh import Mesh, Sizes, ambient
from lightning_megatron.planner.memory_tracker import MemoryTracker
from lightning_megatron.sharding import shard_of
from lightning_megatron.testing import certify
from lightning_megatron.trainer.setup.pipelined_models import cut_plain_networks
from tests.any_module.model_families import Causal, batches, config_of
from tests.harness.sample import every_nth
from tests.hf.test_new_unchanged import of_rank, tensors_of


def written(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class Loaded(Causal):
    """Trains the model of a folder."""

    def __init__(self, model_type: str, folder: Path) -> None:
        super().__init__(model_type)
        self.folder = folder

    def configure_model(self) -> None:
        if self.model is None:
            # In the constructor of the model alone its grouped products are left out, which know no float64.
            self.model = hf.load_unchanged(self.folder)
            self.model.set_experts_implementation("eager")


LAYOUTS = [
    ("mixtral", Sizes(world=2, ep=2)),
    ("mixtral", Sizes(world=2, tp=2)),
    ("mixtral", Sizes(world=8, tp=2, etp=2, ep=2, pp=2)),
    ("qwen3_moe", Sizes(world=4, ep=2, pp=2)),
    # Layers without experts, and a shared one.
    ("deepseek_v3", Sizes(world=4, tp=2, pp=2)),
    ("phimoe", Sizes(world=2, ep=2)),
]


@pytest.mark.parametrize(("model_type", "sizes"), LAYOUTS)
def test_a_rank_has_its_parts_of_what_transformers_reads(model_type: str, sizes: Sizes, tmp_path: Path) -> None:
    folder = written(tmp_path, config_of(model_type))
    whole, seen, num_cut = tensors_of(AutoModelForCausalLM.from_pretrained(folder)), set(), 0
    for rank in range(sizes.world):
        for name, tensor in tensors_of(of_rank(rank, sizes, functools.partial(hf.load_unchanged, folder))).items():
            shard = shard_of(tensor)
            assert torch.equal(tensor, shard.part_of(whole[name])) and tensor.dtype == whole[name].dtype, name
            num_cut += shard.is_cut and "experts" in name
            seen.add(name)
    assert seen == set(whole) and num_cut > 0


def test_a_rank_reads_its_own_experts_alone(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_local_experts=8
    )
    folder, peaks, kept = written(tmp_path, config), {}, {}
    for sizes in (Sizes(), Sizes(world=4, ep=4)):
        tracker = MemoryTracker(torch.device("cpu"))
        with tracker:
            model = of_rank(sizes.ep - 1, sizes, functools.partial(hf.load_unchanged, folder))
        # It counts the file that is mapped, which takes no memory but for what is read of it.
        mapped_bytes = (folder / "model.safetensors").stat().st_size
        peaks[sizes.ep] = sum(tracker.take_peak().values()) - mapped_bytes
        kept[sizes.ep] = sum(one.nbytes for name, one in tensors_of(model).items() if "experts" in name)
    assert kept[4] == kept[1] / 4 > 6_000_000
    # One weight of a layer is there twice more while it is made of pieces.
    largest = {size: bytes_of_all / 2 * 2 / 3 for size, bytes_of_all in kept.items()}
    for size, peak_bytes in peaks.items():
        assert kept[size] < peak_bytes < kept[size] + 2 * largest[size] + 2**20


TRAINED = [("mixtral", "ep2"), ("mixtral", "pp2tp2"), ("deepseek_v3", "ep2pp2"), ("qwen3_moe", "dp2tp2-zero")]


@pytest.mark.matrix
@pytest.mark.parametrize(("model_type", "layout"), every_nth(TRAINED, 3))
def test_a_model_of_such_files_trains_as_on_one_device(model_type: str, layout: str, tmp_path: Path) -> None:
    folder = written(tmp_path, config_of(model_type))
    certify(functools.partial(Loaded, model_type, folder), batches, layouts=(layout,), steps=3).assert_equal()


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "granitemoe"])
def test_it_is_written_as_it_was_read(model_type: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "read", config_of(model_type))
    hf.save_pretrained(hf.load_unchanged(folder), tmp_path / "written")
    read, again = (load_file(tmp_path / name / "model.safetensors") for name in ("read", "written"))
    assert read.keys() == again.keys() and all(torch.equal(read[name], again[name]) for name in read)


def test_weights_that_are_there_may_be_changed_and_copied_before_the_cut(tmp_path: Path) -> None:
    folder, mesh = written(tmp_path, config_of("llama")), Mesh.imagine(0, Sizes(world=2, tp=2))
    module = L.LightningModule()
    with ambient(mesh):
        module.model = hf.load_unchanged(folder)
        module.reference = copy.deepcopy(module.model)
        with torch.no_grad():
            module.model.lm_head.weight.mul_(2)
        cut_plain_networks(module, mesh)
    assert torch.equal(module.model.lm_head.weight, 2 * module.reference.lm_head.weight)


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    change(held)
    save_file(held, file, {"format": "pt"})


def test_files_that_lack_a_weight_or_a_piece_of_one_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = written(tmp_path, config_of("mixtral"))
    changed(folder, lambda held: held.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(Exception, match="ignore_mismatched_sizes"):
        hf.load_unchanged(folder)
    assert "model.norm.weight has shape [3], and must have [32]" in caplog.text
    piece = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    for change in (lambda held: held.pop(piece), lambda held: held.update({piece: torch.ones(3, 3)})):
        folder = written(tmp_path, config_of("mixtral"))
        changed(folder, change)
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj cannot be put together of the \d+ weights for it"):
            hf.load_unchanged(folder)
