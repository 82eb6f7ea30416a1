"""The script of `lightning-megatron completion` completes what the command line knows, in the shell itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_megatron.cli.commands import COMMANDS
from lightning_megatron.cli.main import main

# As the shell calls a function of completion: the words of the line, and which of them the cursor is in.
CALL = (
    'COMP_WORDS=(lightning-megatron {words} "{last}"); COMP_CWORD={place}; _lightning_megatron; '
    'echo "${{COMPREPLY[@]}}"'
)


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers where the cursor is at the end of the last word."""
    call = CALL.format(words=" ".join(words[:-1]), last=words[-1], place=len(words))
    ended = subprocess.run(["bash", "-c", f"source {script}; {call}"], capture_output=True, text=True, check=True)
    return ended.stdout.split()


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    path = tmp_path / "completion.sh"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_and_recipes(script: Path) -> None:
    assert [word for word in offered(script, "") if not word.startswith("-")] == list(COMMANDS)
    assert offered(script, "doc") == ["doctor"]
    assert offered(script, "plan", "--num") == ["--num-gpus"]
    assert offered(script, "checkpoint", "in") == ["inspect"]
    assert "--tensors" in offered(script, "checkpoint", "inspect", "a.ckpt", "--")
    assert offered(script, "train", "gpt2") == ["gpt2_124m"]
    assert "bert_toy" in offered(script, "recipes", "copy", "bert")
    # Options of another command, and names where none is taken, are not offered.
    assert offered(script, "doctor", "--num-g") == []
    assert offered(script, "plan", "gpt2") == []


def test_zsh_runs_the_script_of_bash(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    printed = capsys.readouterr().out
    assert "bashcompinit" in printed and printed.endswith(script.read_text())
    # In `1:n` without it zsh sees a modifier, where bash computes a number.
    assert "$((COMP_CWORD - 1))" in printed


def test_another_shell_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 2
    assert "'bash', 'zsh'" in capsys.readouterr().err
