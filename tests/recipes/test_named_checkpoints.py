"""The checkpoints that docs and recipes name are those that the toy configurations write."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"--config (recipes/configs/\w+\.yaml)[\s\\]+--ckpt_path (\S+)")
# pretrain_hf.py predicts nothing.
SCRIPTS = [path for path in sorted((ROOT / "recipes").glob("pretrain_*.py")) if path.stem != "pretrain_hf"]
TEXTS = [ROOT / "docs" / "lightning_modules.md", *SCRIPTS]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_a_checkpoint_that_a_command_names_is_written_by_its_configuration(path: Path) -> None:
    named = NAMED.findall(path.read_text())
    assert named and path.read_text().count("--ckpt_path") == len(named)
    for config, checkpoint in named:
        trainer = yaml.safe_load((ROOT / config).read_text())["trainer"]
        logger = trainer["logger"]["init_args"]
        [saver] = [c["init_args"] for c in trainer["callbacks"] if c["class_path"].endswith(".ModelCheckpoint")]
        assert saver["filename"] == "{step}" and saver["save_top_k"] == -1
        every = saver["every_n_train_steps"]
        last = trainer["max_steps"] // every * every
        folder = f"{logger['save_dir']}/{logger['name']}/version_0/checkpoints"
        assert checkpoint == f"{folder}/step={last}.ckpt"
