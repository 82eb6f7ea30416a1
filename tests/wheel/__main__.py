"""The wheel in a fresh environment, outside of the repository: it runs the README's example and a recipe.

python3.13 -m tests.wheel dist    # of the Python that runs it, which needs no packages

`make release` builds and checks. Versions are those of `constraints.txt`, or with `--newest` those that pip finds.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = re.compile(r"^```python run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Lightning's two progress bars write it each in its way.
LOSS = re.compile(r"train_loss(?:=|: )([\d.]+)")
# The example starts near the logarithm of its 256 tokens, 5.5, and ends at 3.16 with the pinned versions.
HIGHEST_LOSS = 3.5
MANY_SECONDS = 900


def printed(*command: object, folder: Path) -> str:
    """What a command that must succeed printed, on both streams."""
    print("$", *command, flush=True)
    # Nothing of the repository is on the path.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MANY_SECONDS,
    )
    if ended.returncode:
        sys.exit(f"{ended.stdout}\nit ended with {ended.returncode}")
    return ended.stdout


def check(wheel: Path, folder: Path, constraints: list[str]) -> None:
    """Installs a wheel into a new environment of the folder, and does what the README says."""
    venv.create(folder / "venv", with_pip=True)
    binaries = folder / "venv" / "bin"
    printed(binaries / "pip", "install", "--quiet", *constraints, f"{wheel}[data]", folder=folder)
    command = binaries / "lightning-megatron"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    told = printed(command, "--version", folder=folder)
    assert version in told and "torch" in told, told
    print(told.strip(), flush=True)
    where = "import lightning_megatron; print(lightning_megatron.__file__)"
    assert str(folder) in printed(binaries / "python", "-c", where, folder=folder)

    example = EXAMPLE.search((ROOT / "README.md").read_text())
    assert example is not None
    (folder / "train.py").write_text(example.group(1))
    losses = LOSS.findall(printed(binaries / "python", "train.py", folder=folder))
    assert losses and float(losses[-1]) < HIGHEST_LOSS, losses
    print(f"the README's example ends at a loss of {losses[-1]}", flush=True)

    (folder / "texts").mkdir()
    for page in sorted((ROOT / "docs").glob("*.md")):
        (folder / "texts" / page.with_suffix(".txt").name).write_text(page.read_text())
    told = printed(command, "train", "toy", "--data.path", "texts", "--trainer.max_steps", "2", folder=folder)
    assert LOSS.search(told), told
    assert len((folder / "runs/toy/version_0/metrics.csv").read_text().splitlines()) == 3
    assert "toy.yaml" in printed(command, "recipes", "copy", "toy", ".", folder=folder)
    print("a recipe trains by its name", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Checks the wheel in a fresh environment.")
    parser.add_argument("folder", type=Path, help="the folder with the wheel")
    parser.add_argument("--newest", action="store_true", help="the newest versions that pip finds, pinned by nothing")
    options = parser.parse_args()
    [built] = options.folder.resolve().glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        check(built, Path(scratch), [] if options.newest else ["--constraint", str(ROOT / "constraints.txt")])
    print(f"{built.name} works under Python {sys.version.split()[0]}")
