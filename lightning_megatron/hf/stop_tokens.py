"""The tokens at which the model of a folder ends a text, as transformers reads them."""

import os
from pathlib import Path

from lightning_megatron.hf.folder import CONFIG, GENERATION
from lightning_megatron.hub import CONFIG_FILES, model_folder
from lightning_megatron.text_files import read_json_table


def stop_tokens(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Ids of the tokens that end a text: the `eos_token_id` of `generation_config.json`, else that of `config.json`.

    Of a model of chats the end of a turn is among them, which need not be the tokenizer's end of text. Raises
    ValueError for what is no id.
    """
    folder = Path(model_folder(path, CONFIG_FILES))
    file = folder / (GENERATION if (folder / GENERATION).is_file() else CONFIG)
    if not file.is_file():
        return ()
    found = read_json_table(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if wrong := [value for value in ids if not isinstance(value, int)]:
        raise ValueError(f"eos_token_id in {file} holds {wrong[0]!r}; it is the id of a token, or a list of ids")
    return tuple(ids)
