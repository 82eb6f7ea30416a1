"""`UsageError`: a user's mistake on the command line, which ends a command with a message and exit code 2."""

from collections.abc import Sequence


class UsageError(Exception):
    """A request that a command cannot do; the message is one line with every error."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
