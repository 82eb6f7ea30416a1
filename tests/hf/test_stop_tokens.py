"""Where the model of a folder ends a text, by the files that transformers generates with."""

import json
from pathlib import Path

import pytest

from lightning_megatron.hf.stop_tokens import stop_tokens


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [1, 107]}, {"eos_token_id": 1}, (1, 107)),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, (0,)),
        # A file of its own has the last word, as in transformers.
        ({}, {"eos_token_id": 1}, ()),
        (None, {"eos_token_id": 1}, (1,)),
        (None, {"eos_token_id": None}, ()),
        (None, None, ()),
    ],
)
def test_settings_of_generation_come_before_the_configuration(
    generation: dict[str, object] | None, config: dict[str, object] | None, wanted: tuple[int, ...], tmp_path: Path
) -> None:
    for name, table in (("generation_config.json", generation), ("config.json", config)):
        if table is not None:
            (tmp_path / name).write_text(json.dumps(table))
    assert stop_tokens(tmp_path) == wanted


def test_what_is_no_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ValueError, match=r"eos_token_id in .*config\.json holds '</s>'; it is the id of a token"):
        stop_tokens(tmp_path)
