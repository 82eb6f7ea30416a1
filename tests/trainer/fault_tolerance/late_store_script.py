"""A process that ends its watch, and itself, while the store owes the watch an answer; for a test of the failure watch.

before the end      the store's process is stopped, so that the watch waits for its answer
0.5 s later         the store's process goes on, and answers
meanwhile           whatever still is there when the interpreter ends lives on for a second: `Lasts`
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from lightning_megatron.trainer.fault_tolerance.failure_watch import FailureWatch
from lightning_megatron.trainer.fault_tolerance.stop_vote import StopVote

TIMEOUT = timedelta(seconds=60)


class Lasts:
    """Something that the interpreter takes apart at its very end, and that takes its time."""

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        sleep(1.0)


def serve(writer: int) -> None:
    store = FailureWatch.connect("127.0.0.1", 0, is_host=True, timeout=TIMEOUT)
    os.write(writer, f"{store.port}\n".encode())
    time.sleep(TIMEOUT.total_seconds())


def start_host() -> tuple[int, int]:
    """The process that serves the store, and its port."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        # It must not keep open what the test reads to its end.
        for own in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), own)
        serve(writer)
        os._exit(0)
    return process, int(os.read(reader, 100))


if __name__ == "__main__":
    sys.lasts = Lasts()  # type: ignore[attr-defined]
    host, port = start_host()
    late = f"sleep 0.5; kill -CONT {host}; sleep 3; kill -KILL {host}"
    watch = FailureWatch(FailureWatch.connect("127.0.0.1", port, is_host=False, timeout=TIMEOUT), 1, StopVote(1, 2))
    watch.start()
    os.kill(host, signal.SIGSTOP)
    # Longer than the watch is silent between two questions.
    time.sleep(1.0)
    subprocess.Popen(["/bin/sh", "-c", late], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    watch.stop()
    print("the watch has ended", flush=True)
