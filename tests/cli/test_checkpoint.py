"""`lightning-megatron checkpoint`: what it shows of checkpoints is so, and a mistake is one line."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.checkpoint import load, save
from lightning_megatron.checkpoint.atomic_directory import UNFINISHED
from lightning_megatron.checkpoint.manifest import read_manifest
from lightning_megatron.cli import checkpoint_upkeep
from lightning_megatron.cli.main import main
from tests.checkpoint import object_store
from tests.checkpoint.folders import WORLD, begun, left, saved

META: dict[str, Any] = {
    "global_step": 5,
    "epoch": 1,
    "mesh": {"world": 4, "tp": 2, "pp": 2, "cp": 1, "sequence_parallel": True, "placement": "loop"},
    "models": {"model": {"class": "GPTModel", "config": {"num_layers": 3, "activation": "gelu"}}},
    "other_states": ["current_model_state"],
    "hyper_parameters": {"rate": 0.5},
    "optimizers": [
        {"groups": [{"params": ["b", "w"], "lr": 0.1}, {"params": ["frozen"], "lr": 0.2}], "state": {"b": {"n": 3}}}
    ],
    "lr_schedulers": [],
}
TENSORS = {
    "w": torch.arange(12.0).reshape(3, 4),
    "b": torch.ones(4),
    "frozen": torch.ones((), dtype=torch.int64),
    "current_model_state.w": torch.full((3, 4), 7.0),
    "optimizer.0.w.exp_avg": torch.full((3, 4), 2.0),
    "optimizer.0.w.step": torch.tensor(5.0),
    "optimizer.0.b.exp_avg": torch.full((4,), 3.0),
    "optimizer.0.b.step": torch.tensor(6.0),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "step=5.ckpt", TENSORS, META, world=WORLD)
    return tmp_path / "step=5.ckpt"


def printed(capsys: pytest.CaptureFixture[str], *options: str | Path, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, options)]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def record(capsys: pytest.CaptureFixture[str], *options: str | Path, code: int = 0) -> Any:
    return json.loads(printed(capsys, *options, "--json", code=code))


def shown(capsys: pytest.CaptureFixture[str], *options: str | Path) -> str:
    """The one line of a command that ends with a mistake."""
    assert main(["checkpoint", *map(str, options)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and captured.err.endswith("\n")
    return captured.err


def test_inspect_shows_who_wrote_what_on_which_layout(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, "inspect", path)
    manifest = read_manifest(path)
    assert found["save_id"] == manifest.save_id
    assert (found["step"], found["epoch"]) == (5, 1)
    assert found["layout"] == {"world": 4, "tp": 2, "pp": 2, "sequence_parallel": True}
    assert found["models"] == META["models"]
    assert found["files"] == dict(manifest.files)
    assert found["tensors"] == {
        "weights": {"number": 3, "num_bytes": 12 * 4 + 4 * 4 + 8},
        "optimizer states": {"number": 4, "num_bytes": 12 * 4 + 4 + 4 * 4 + 4},
        "current_model_state": {"number": 1, "num_bytes": 48},
    }
    text = printed(capsys, "inspect", path)
    for words in (manifest.save_id, "world 4, tp 2, pp 2", "5, epoch 1", "num_layers 3", "4 tensors, 72 bytes"):
        assert words in text, words


def test_inspect_lists_tensors_where_asked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {line["name"]: line for line in record(capsys, "inspect", path, "--tensors")["tensors"]}
    assert lines.keys() == TENSORS.keys()
    assert lines["w"] == {"name": "w", "shape": [3, 4], "dtype": "float32", "num_chunks": 1, "num_bytes": 48}
    text = printed(capsys, "inspect", path, "--tensors").splitlines()
    assert [line.split()[1:] for line in text if line.startswith("frozen ")] == [
        ["[]", "int64,", "1", "chunk,", "8", "bytes"]
    ]


def test_inspect_of_a_folder_has_a_line_for_each_and_marks_the_newest(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = path.parent
    saved(folder / "step=9.ckpt", 9)
    os.truncate(saved(folder / "step=7.ckpt", 7) / "__0_0.distcp", 3)
    left(folder / "step=12.ckpt", UNFINISHED, "1", is_complete=False)
    (folder / "last.ckpt").symlink_to("step=12.ckpt")
    lines = dict(line.split(": ", 1) for line in printed(capsys, "inspect", folder).splitlines())
    assert lines.keys() == {"step=5.ckpt", "step=7.ckpt", "step=9.ckpt", "step=12.ckpt", "last.ckpt"}
    assert lines["step=5.ckpt"].startswith("complete, step 5, epoch 1, 20")
    assert lines["step=7.ckpt"].startswith("damaged: ")
    assert [name for name, line in lines.items() if line.endswith("the newest")] == ["step=9.ckpt"]
    assert lines["step=12.ckpt"].startswith("unfinished")
    assert lines["last.ckpt"] == "link to step=12.ckpt, which is not there"
    found = record(capsys, "inspect", folder)
    assert found["newest"] == "step=9.ckpt"
    assert [one["is_complete"] for one in found["checkpoints"]] == [False, True, True]
    assert [one["is_unfinished"] for one in found["leftovers"]] == [True]


def test_a_folder_at_a_remote_address_is_listed_and_tidied(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"file://{path.parent}"
    saved(f"{address}/step=9.ckpt", 9)
    begun(f"{address}/step=12.ckpt")
    lines = dict(line.split(": ", 1) for line in printed(capsys, "inspect", address).splitlines())
    assert lines.keys() == {"step=5.ckpt", "step=9.ckpt", "step=12.ckpt"}
    assert lines["step=9.ckpt"].endswith("the newest") and lines["step=12.ckpt"].startswith("unfinished")
    shown = printed(capsys, "prune", address, "--keep", "1", "--all")
    assert [line.split()[1] for line in shown.splitlines()] == ["step=12.ckpt", "step=5.ckpt"]
    assert os.listdir(path.parent) == ["step=9.ckpt"]


def test_verify_exits_with_1_where_a_byte_is_wrong_and_names_it(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is sound" in printed(capsys, "verify", path)
    assert record(capsys, "verify", path) == {"path": str(path), "is_sound": True, "faults": []}
    with open(path / "__0_0.distcp", "r+b") as stream:
        stream.seek(40)
        stream.write(b"\xff\xff")
    assert "__0_0.distcp, bytes 0 to" in printed(capsys, "verify", path, code=1)
    found = record(capsys, "verify", path, code=1)
    assert not found["is_sound"] and len(found["faults"]) == 1


def test_consolidate_writes_lightnings_dictionary(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "one.ckpt"
    assert str(out) in printed(capsys, "consolidate", path, out)
    found = torch.load(out, weights_only=True)
    tensors = {"state_dict", "optimizer_states", "current_model_state"}
    assert found.keys() == tensors | {"global_step", "epoch", "hyper_parameters", "lr_schedulers"}
    assert found["state_dict"].keys() == {"w", "b", "frozen"}
    assert torch.equal(found["state_dict"]["w"], TENSORS["w"])
    assert torch.equal(found["current_model_state"]["w"], TENSORS["current_model_state.w"])
    [optimizer] = found["optimizer_states"]
    assert optimizer["param_groups"] == [{"params": [0, 1], "lr": 0.1}, {"params": [2], "lr": 0.2}]
    # By number: b is the first parameter, w the second, and the third has no state.
    assert optimizer["state"].keys() == {0, 1}
    assert optimizer["state"][0]["n"] == 3
    assert float(optimizer["state"][1]["step"]) == 5 and optimizer["state"][1]["step"].shape == ()
    assert torch.equal(optimizer["state"][1]["exp_avg"], TENSORS["optimizer.0.w.exp_avg"])
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "step=5.ckpt"]


def test_weights_alone_are_what_lightning_keeps_of_a_checkpoint_of_weights(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed(capsys, "consolidate", path, tmp_path / "one.ckpt", "--weights-only")
    found = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert not found.keys() & {"optimizer_states", "lr_schedulers", "optimizers", "mesh", "models"}
    assert found["state_dict"].keys() == {"w", "b", "frozen"}
    assert found["hyper_parameters"] == {"rate": 0.5}


def test_consolidate_never_writes_over_anything_and_leaves_nothing_where_it_fails(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "one.ckpt"
    out.write_text("precious")
    assert "exists and is not overwritten" in shown(capsys, "consolidate", path, out)
    assert out.read_text() == "precious"
    assert "which is no directory" in shown(capsys, "consolidate", path, tmp_path / "none" / "one.ckpt")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert "No space left" in shown(capsys, "consolidate", path, tmp_path / "two.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["one.ckpt", "step=5.ckpt"]


def test_consolidate_of_a_damaged_checkpoint_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open(path / "__0_0.distcp", "r+b") as stream:
        stream.seek(200)
        stream.write(b"\xff\xff")
    assert "__0_0.distcp" in shown(capsys, "consolidate", path, tmp_path / "one.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


def test_prune_says_what_it_would_do_and_then_does_that(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = path.parent
    saved(folder / "step=9.ckpt", 9)
    left(folder / "step=12.ckpt", UNFINISHED, "1", is_complete=False, age_seconds=5000)
    left(folder / "step=13.ckpt", UNFINISHED, "2", is_complete=False)
    options = ("prune", folder, "--keep", "1")
    would = printed(capsys, *options, "--dry-run")
    assert path.exists()
    assert printed(capsys, *options) == would.replace("would remove", "removed")
    assert [line.split(" (")[0] for line in would.splitlines()] == [
        f"would remove {UNFINISHED}/1/step=12.ckpt",
        f"leaves {UNFINISHED}/2/step=13.ckpt",
        "would remove step=5.ckpt",
    ]
    assert sorted(os.listdir(folder)) == [UNFINISHED, "step=9.ckpt"]
    assert [one["is_kept"] for one in record(capsys, *options)["removals"]] == [True]
    printed(capsys, *options, "--all")
    assert os.listdir(folder) == ["step=9.ckpt"]
    assert printed(capsys, *options) == "nothing to remove\n"


def test_mistakes_are_one_line(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.ckpt").write_text("not one")
    (tmp_path / "empty").mkdir()
    for command in (("inspect",), ("verify",), ("consolidate",)):
        rest = (tmp_path / "out.ckpt",) if command == ("consolidate",) else ()
        assert "does not exist" in shown(capsys, *command, tmp_path / "none", *rest)
        assert "is a plain file" in shown(capsys, *command, tmp_path / "file.ckpt", *rest)
        assert "is an empty directory" in shown(capsys, *command, tmp_path / "empty", *rest)
    assert "--tensors needs a checkpoint" in shown(capsys, "inspect", tmp_path, "--tensors")
    assert "--keep (0) must be at least 1" in shown(capsys, "prune", tmp_path, "--keep", "0")
    both = shown(capsys, "prune", tmp_path / "none", "--keep", "-1")
    assert "is no directory" in both and "--keep (-1)" in both
    assert f"give the folder that holds it: {tmp_path}" in shown(capsys, "prune", path)
    assert f"give the folder that holds it: file://{tmp_path}\n" in shown(capsys, "prune", f"file://{path}/")
    assert "COMMAND" in shown(capsys)


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate", "prune"])
def test_an_address_that_cannot_be_used_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("out.ckpt",) if command == "consolidate" else ()
    output = shown(capsys, command, "nowhere://folder", *rest)
    assert "nowhere://folder is an address of no file system" in output and "Protocol not known: nowhere" in output


@pytest.mark.parametrize("command", ["inspect", "verify", "consolidate", "prune"])
def test_an_error_that_a_store_has_of_its_own_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ("out.ckpt",) if command == "consolidate" else ()
    with object_store.emptied() as address, object_store.failing(object_store.without_credentials):
        output = shown(capsys, command, address, *rest)
    assert output == f"error: {address}: NoCredentialsError: unable to locate credentials\n"


def test_an_error_of_our_own_keeps_its_traceback(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(path: str, **_: Any) -> None:
        raise KeyError("our own slip")

    monkeypatch.setattr(checkpoint_upkeep, "verify", slip)
    with pytest.raises(KeyError, match="our own slip"):
        main(["checkpoint", "verify", f"file://{path}"])


def test_what_was_written_by_a_newer_version_is_reported(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(path)
    (path / "manifest.json").write_bytes(replace(manifest, layout=99, package="9.9").to_bytes())
    for command in ("inspect", "verify"):
        assert "layout 99, written by lightning_megatron 9.9" in shown(capsys, command, path)


def test_a_checkpoint_at_an_address_is_read(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"file://{path}"
    assert record(capsys, "inspect", address)["step"] == 5
    assert record(capsys, "verify", address)["is_sound"]
    printed(capsys, "consolidate", address, tmp_path / "one.ckpt")
    target = torch.zeros(3, 4)
    load(path, {"w": target}, world=WORLD, among=lambda name: False)
    shutil.rmtree(path)
    assert torch.equal(torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]["w"], target)
