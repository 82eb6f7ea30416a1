"""How checkpoints are written, and when beside what callbacks ask for."""

import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written, and when beside what callbacks ask for."""

    asynchronous: bool = True
    """Training goes on as soon as the state has been copied to host memory; the files are written behind it."""
    save_on_signals: tuple[str, ...] = ("SIGTERM",)
    """Names of signals at which a fit saves and ends, whichever rank gets them; (): they do what they did before."""
    local_folder: str = ""
    """On a disk or in the memory of each machine: where every rank also saves what it holds; empty: nowhere."""
    local_every_n_steps: int = 0
    """Optimizer steps from one such save to the next."""

    def __post_init__(self) -> None:
        faults = []
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
