"""The command `lightning-megatron`: its door, its help, and how it says that something is wrong."""

import importlib
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import lightning
import pytest
import torch

import lightning_megatron
from lightning_megatron.checkpoint import save
from lightning_megatron.checkpoint.manifest import read_manifest
from lightning_megatron.cli.main import main
from lightning_megatron.mesh import Mesh

ROOT = Path(__file__).resolve().parents[2]
# A small schedule.
SCHEDULE = ("schedule", "--pp", "2", "--microbatches", "2")


def module_process(*args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_megatron", *args]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_script_of_the_package_is_main() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["lightning-megatron"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_the_version_is_that_of_the_project_also_where_it_is_not_installed(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    save(tmp_path / "a.ckpt", {"w": torch.zeros(1)}, {}, world=Mesh.single().world)
    assert lightning_megatron.__version__ == read_manifest(tmp_path / "a.ckpt").package == project["version"]


def test_version_is_that_of_the_package_and_names_torch_and_lightning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    version = lightning_megatron.__version__
    wanted = f"lightning-megatron {version} (torch {torch.__version__}, lightning {lightning.__version__})\n"
    assert capsys.readouterr().out == wanted


def test_version_says_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", nothing)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.endswith(" (no torch, no lightning)\n")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert {"schedule", "checkpoint", "convert"} <= set(told.split())
    # Whoever calls it alone wants to know what there is.
    assert main([]) == 0 and capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("shedule",), ("invalid choice: 'shedule'; did you mean schedule?",)),
        (("--vers",), ("unrecognized arguments: --vers; did you mean --version?",)),
        (("schedule",), ("--pp", "--microbatches", "required", "lightning-megatron schedule --help")),
        ((*SCHEDULE, "--vp", "two"), ("--vp", "'two'")),
        (
            (*SCHEDULE, "--micro", "4"),
            (
                "unrecognized arguments: --micro 4; did you mean --microbatches?",
                "see lightning-megatron schedule --help",
            ),
        ),
        (
            (*SCHEDULE, "--jsn=1", "--messages", "1", "--quite"),
            ("arguments: --jsn=1 --messages 1 --quite; did you mean --json?; did you mean --message?; see lightning-",),
        ),
        (("checkpoint", "verify", "a.ckpt", "--al"), ("see lightning-megatron checkpoint verify --help",)),
    ],
)
def test_a_command_line_that_does_not_parse_ends_with_one_line_and_code_2(
    args: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    for word in words:
        assert word in printed.err


def test_a_slip_of_our_own_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def slip(*_: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr("lightning_megatron.cli.schedule.timeline_of", slip)
    with pytest.raises(ValueError, match="ours"):
        main(SCHEDULE)


@pytest.mark.slow
def test_python_m_runs_a_command_and_passes_its_exit_code_on() -> None:
    process = module_process("schedule", "--pp", "0", "--microbatches", "2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2 and out == "" and err.startswith("error: pp (0)") and "Traceback" not in err


@pytest.mark.slow
def test_a_reader_that_stops_reading_is_no_error() -> None:
    process = module_process("schedule", "--pp", "2", "--microbatches", "2000", "--json")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(21) == '{"schedule": "1f1b", '
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 0
    process.stderr.close()
