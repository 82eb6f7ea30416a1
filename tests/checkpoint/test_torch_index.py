"""torch's own tools read a checkpoint directory, in the shape that Lightning's tool expects."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_megatron.checkpoint import save
from tests.checkpoint.folders import WORLD


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_torchs_own_tool_finds_weights_further_weights_and_optimizers_apart(tmp_path: Path) -> None:
    tensors = {
        "model.w": torch.arange(6.0).reshape(2, 3),
        "average.model.w": torch.full((2, 3), 7.0),
        "optimizer.0.model.w.exp_avg": torch.full((2, 3), 2.0),
        "optimizer.0.model.w.step": torch.tensor(5.0),
    }
    rest = {"groups": [{"params": ["model.w"], "lr": 0.1}], "state": {"model.w": {"calls": 3}}}
    save(tmp_path / "a.ckpt", tensors, {"optimizers": [rest], "other_states": ["average"]}, world=WORLD)
    dcp_to_torch_save(tmp_path / "a.ckpt", tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert found.keys() == {"model", "average", "optimizer_0"}
    assert found["model"].keys() == found["average"].keys() == {"model.w"}
    assert torch.equal(found["model"]["model.w"], tensors["model.w"])
    assert torch.equal(found["average"]["model.w"], tensors["average.model.w"])
    assert found["optimizer_0"]["param_groups"] == rest["groups"]
    state = found["optimizer_0"]["state"]["model.w"]
    assert state.keys() == {"exp_avg", "step", "calls"}
    assert state["calls"] == 3 and state["step"].shape == ()
    assert torch.equal(state["exp_avg"], tensors["optimizer.0.model.w.exp_avg"])
