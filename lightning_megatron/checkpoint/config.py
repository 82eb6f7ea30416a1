"""How checkpoints are written, and when beside what callbacks ask for."""

import signal
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How checkpoints are written, and when beside what callbacks ask for."""

    asynchronous: bool = True
    # training goes on as soon as the state has been copied to host memory; the files are written behind it
    save_on_signals: tuple[str, ...] = ("SIGTERM",)
    # names of signals at which a fit saves and ends, whichever rank gets them; (): they do what they did before

    def __post_init__(self) -> None:
        catchable = {s.name for s in signal.Signals} - {"SIGKILL", "SIGSTOP", "SIGINT"}
        if strangers := sorted(set(self.save_on_signals) - catchable):
            raise ValueError(
                f"save_on_signals ({', '.join(map(repr, strangers))}) must be names of signals that a process can "
                "catch, such as 'SIGTERM' and 'SIGUSR1'; SIGINT stays Lightning's"
            )
