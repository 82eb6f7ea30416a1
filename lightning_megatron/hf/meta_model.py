"""A model of transformers without memory, from the configuration in its folder."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_megatron.hf.folder import CONFIG
from lightning_megatron.rules.limits import MOST_LAYERS, limit_faults
from lightning_megatron.text_files import read_json_table

# Of what transformers says, which may go on with how to install another version.
_LONGEST_REASON = 300


def meta_model(path: Path, auto_class: str = "") -> nn.Module:
    """The model of a configuration, given by its folder or as the file, on the meta device.

    It is the configuration's architecture, or what the class of transformers of that name makes of it
    (`AutoModelForCausalLM`). Raises ValueError where there is no configuration, or transformers makes no model of it.
    """
    import transformers

    file = path if path.suffix == ".json" else path / CONFIG
    if not file.exists():
        raise ValueError(
            f"{file} is not there; give a folder with the {CONFIG} of a model of transformers, or that file"
        )
    read_json_table(file)
    try:
        # It looks for code beside the configuration in a folder alone.
        config = transformers.AutoConfig.from_pretrained(str(file.parent if file.name == CONFIG else file))
    except Exception as error:
        # Transformers reads the fields before it looks at their types.
        told = " ".join(str(error).split())[:_LONGEST_REASON]
        raise ValueError(f"{file} is no configuration that transformers reads: {told}") from error
    # A model of meta tensors takes time and memory for each layer, whatever its size.
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if faults := limit_faults({"num_hidden_layers": num_layers}, MOST_LAYERS):
        raise ValueError(f"{file}: {faults[0]}")
    names = [str(name) for name in config.architectures or []]
    is_auto = bool(auto_class) or not names
    kind: Any = getattr(transformers, (auto_class or "AutoModel") if is_auto else names[0], None)
    if not hasattr(kind, "from_config" if is_auto else "_from_config"):
        raise ValueError(f"{file}: the installed transformers has no model {names[0]}")
    make = kind.from_config if is_auto else kind._from_config
    try:
        with torch.device("meta"):
            made: nn.Module = make(config)
    except Exception as error:
        # Whatever a model raises of sizes that do not fit each other.
        raise ValueError(f"{file}: transformers makes no model of it: {type(error).__name__}: {error}") from error
    return made
