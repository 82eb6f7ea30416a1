"""Folders of models by their names on the Hugging Face hub."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

logger = logging.getLogger(__name__)

# An owner and a model; a folder that is there comes first.
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SUFFIXES = (".json", ".model", ".tiktoken", ".ckpt", ".yaml")
# A hub that is reached has sent the small files by then.
_PATIENCE_SECONDS = 3.0
CONFIG_FILES = ("*.json",)
"""What tells of a model without its weights."""
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.vocab", "tokenizer*")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")
"""Not its weights in other formats."""


def is_name_on_hub(path: str | os.PathLike[str]) -> bool:
    """Whether a path has the form of a model's name on the hub, and is none of a file or folder here."""
    name = os.fspath(path)
    is_a_path = Path(name).exists() or Path(name).parent.is_dir() or Path(name).suffix in _SUFFIXES
    return bool(_NAME.fullmatch(name)) and not is_a_path


def model_folder(path: str | os.PathLike[str], files: Sequence[str] = MODEL_FILES) -> str:
    """The path itself, or where `huggingface_hub` has put these files of the model of that name, `owner/model`.

    It fetches them once, into its cache, on each machine. Raises ValueError where there is neither a folder nor, for as
    far as the network reaches, a model.
    """
    name = os.fspath(path)
    if not is_name_on_hub(name):
        return name
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return name
    try:
        with telling_who_is_asked(name):
            return str(snapshot_download(name, allow_patterns=list(files)))
    except (OSError, ValueError) as error:
        # The lines after the first are advice of the hub's package.
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(
            f"{name} is no file or folder here, and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); give a folder, or a model's name where the network reaches the hub "
            "or its cache has it"
        ) from error


@contextmanager
def telling_who_is_asked(name: str) -> Iterator[None]:
    """A block that asks the hub for a name; a line is logged once that takes some seconds, as tries do that fail, and
    downloads."""
    text = f"waiting for {name} of the Hugging Face hub, or for its answer; HF_HUB_OFFLINE=1 asks its cache alone"
    timer = Timer(_PATIENCE_SECONDS, logger.warning, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
