"""fsspec's file system of this machine, to which a checkpoint directory is also the file that Lightning reads.

Lightning opens every path by fsspec, which makes this class once `registration` has named it there; everything but the
reading of a checkpoint directory is fsspec's.
"""

import os
from importlib import import_module
from typing import Any

from fsspec.implementations import local

# Floors above this file; imported by name when a directory is opened.
_CHECKPOINT, _CONSOLIDATE = "lightning_megatron.checkpoint", "lightning_megatron.checkpoint.consolidate"


# The name is fsspec's, because pyarrow knows files of this machine by it.
class LocalFileSystem(local.LocalFileSystem):
    """Files and directories of this machine; a checkpoint directory that is read gives its `consolidated_stream`."""

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "rb" and os.path.isdir(path) and import_module(_CHECKPOINT).is_checkpoint(path):
            return import_module(_CONSOLIDATE).consolidated_stream(path)
        return super()._open(path, mode, *args, **kwargs)
