"""A module for models of transformers as they are: its labels are the data's, and what does not fit is refused."""

from pathlib import Path

import pytest
import torch

from lightning_megatron.lightning_modules import CausalModule
from lightning_megatron.trainer import ConfigurationError
from tests.lightning_modules.pretrained import write_model


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CausalModule:
    folder = write_model(tmp_path_factory.mktemp("causal") / "tiny")
    found = CausalModule(str(folder))
    found.configure_model()
    return found


def test_the_loss_is_of_the_labels_that_count_but_a_row_s_last(module: CausalModule) -> None:
    tokens, labels = torch.randint(0, 300, (2, 3, 8), generator=torch.Generator().manual_seed(0)).unbind()
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 2:5] = False
    loss, num_valid = module._loss({"tokens": tokens, "labels": labels, "loss_mask": mask})
    chosen = mask[:, :-1]
    logits = module.model(input_ids=tokens).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits[chosen], labels[:, :-1][chosen])
    assert int(num_valid) == 18 and torch.allclose(loss, wanted, rtol=1e-5)


def test_weights_are_the_folder_s_or_new(module: CausalModule) -> None:
    assert not module.from_scratch
    new = CausalModule(module.path, from_scratch=True)
    torch.manual_seed(1)
    new.configure_model()
    name = "model.layers.0.mlp.up_proj.weight"
    kept = CausalModule(module.path)
    kept.configure_model()
    assert torch.equal(kept.model.get_parameter(name), module.model.get_parameter(name))
    assert not torch.equal(new.model.get_parameter(name), module.model.get_parameter(name))


def test_rows_of_several_documents_are_refused(module: CausalModule) -> None:
    batch = {name: torch.zeros(1, 4, dtype=torch.long) for name in ("tokens", "labels", "loss_mask", "segments")}
    with pytest.raises(RuntimeError, match=r"use data\.packing='stream'"):
        module._loss(batch)


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no configuration that this version of transformers reads"):
        CausalModule(str(tmp_path))
    write_model(tmp_path / "bare")
    for file in (tmp_path / "bare").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ConfigurationError, match="neither model"):
        CausalModule(str(tmp_path / "bare")).configure_model()
