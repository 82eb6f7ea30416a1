"""A model of transformers without memory, from the configuration in its folder."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn


def meta_model(folder: Path) -> nn.Module:
    """The model whose configuration is in a folder, as its architecture says, on the meta device.

    Raises ValueError where there is no configuration, or transformers does not know the architecture.
    """
    import transformers

    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no config.json, and so is no folder of a model of transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder))
    except (ValueError, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no configuration that transformers reads: {str(error).splitlines()[0]}") from error
    names = config.architectures or []
    kind: Any = getattr(transformers, names[0], None) if names else transformers.AutoModel
    if kind is None:
        raise ValueError(f"{file}: the installed transformers has no {names[0]}")
    with torch.device("meta"):
        made: nn.Module = kind.from_config(config) if kind is transformers.AutoModel else kind(config)
    return made
