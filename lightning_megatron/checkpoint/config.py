"""Configuration of checkpoints: directories or files, background saving, saves on signals, local checkpoints."""

import signal
from typing import Literal

from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class CheckpointConfig:
    """Checkpoint saving: sharded or in one file, in the background or not, on signals, and to local disks."""

    kind: Literal["directory", "file"] = "directory"
    """"directory": every rank writes its shards, and any layout reads them. "file": the first rank gathers all tensors
    and writes one file as Lightning does on one device, for models that fit the memory of one host;
    `MyModule.load_from_checkpoint` and `torch.load` read it, and any layout goes on from it."""
    asynchronous: bool = True
    """Save directories in the background: training goes on as soon as the state has been copied to host memory. Else
    training waits until the files are written, as it always does for the kind "file"."""
    save_on_signals: tuple[str, ...] = ("SIGTERM",)
    """Names of signals at which a fit saves a checkpoint and ends, whichever rank gets them; (): no signal does."""
    local_folder: str = ""
    """Folder on a disk or in the memory of each machine (/dev/shm/run1) to which every rank also saves what it holds,
    often and without communication; empty: no local checkpoints."""
    local_every_n_steps: int = 0
    """Optimizer steps between two local checkpoints; 0 without `local_folder`."""

    def __post_init__(self) -> None:
        faults = []
        if self.kind not in ("directory", "file"):
            faults.append(f"kind ({self.kind!r}) of CheckpointConfig must be 'directory' or 'file'")
        catchable = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP", "SIGINT"}
        if strangers := sorted(set(self.save_on_signals) - catchable):
            faults.append(
                f"save_on_signals ({', '.join(map(repr, strangers))}) must be names of signals that a process can "
                "catch, such as 'SIGTERM' and 'SIGUSR1'; SIGINT stays Lightning's"
            )
        if self.local_folder and self.local_every_n_steps < 1:
            faults.append(
                f"local_every_n_steps ({self.local_every_n_steps}) must be 1 or more with local_folder "
                f"({self.local_folder!r}); give both, or neither"
            )
        if not self.local_folder and self.local_every_n_steps != 0:
            faults.append(
                f"local_every_n_steps ({self.local_every_n_steps}) needs local_folder, a folder on a disk or in the "
                "memory of each machine, as '/dev/shm/run1'; give both, or neither"
            )
        if "://" in self.local_folder:
            faults.append(
                f"local_folder ({self.local_folder!r}) must be a folder of the machine; an address is for "
                "ModelCheckpoint(dirpath=...)"
            )
        if faults:
            raise ValueError("\n".join(faults))
