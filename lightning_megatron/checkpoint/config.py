"""How checkpoints are written."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written."""

    asynchronous: bool = True
    # training goes on as soon as the state has been copied to host memory; the files are written behind it
