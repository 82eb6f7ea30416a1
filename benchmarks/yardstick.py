"""Samples of rows that are held against a yardstick: another row, whose loss of every step a row must have to count."""

import sys
from typing import Any

# Tolerance of the loss: sums are taken in different orders, in float32. A skipped step shows in the second digit.
TOLERANCE = 1e-4


def fault_of(sample: dict[str, Any], yardstick: dict[str, Any], name: str) -> str:
    """Reason why a sample must not be shown next to that of the yardstick, whose row has this name; empty: none."""
    for reason in ("not_here", "failed"):
        if reason in sample:
            return str(sample[reason])
    losses, wanted = sample["losses"], yardstick["losses"]
    if len(losses) != len(wanted):
        return f"it took {len(losses)} steps, {name} took {len(wanted)}"
    for step, (loss, other) in enumerate(zip(losses, wanted, strict=True), start=1):
        # Written so that NaN is a fault.
        if not abs(loss - other) <= TOLERANCE * abs(other):
            return f"wrong: the loss of step {step} is {loss:.6f}, that of {name} is {other:.6f}"
    return ""


def failed_sample(row: str, error: Exception, name: str) -> dict[str, Any]:
    """The sample of a row whose ranks failed or took too long; SystemExit where the row is the yardstick `name`."""
    if row == name:
        raise SystemExit(f"{name}, the yardstick, failed:\n{error}") from None
    print(error, file=sys.stderr)
    return {"failed": f"failed: {str(error).strip().splitlines()[-1]}"}
