"""Fit of the cost model to a short measurement by non-negative least squares.

Before the first step a rank of each group size times a few packed microbatches, and all fit the same measurements.

The formula is linear in its constants once it is known which measurements see the ring. That is guessed, the constants
are fitted, and the guess is updated until it stays; the best fit on the way is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_megatron.context.balance.cost import CostModel, Floats

Flags = npt.NDArray[np.bool_]

# Most updates of the guess, in case it alternates.
MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """Time of one microbatch, forward and backward."""

    tokens: int
    """Sum of the lengths of its documents."""
    squares: int
    """Sum of the squared lengths of its documents."""
    size: int
    """Number of ranks it ran on."""
    seconds: float


def fit(measurements: Sequence[Measurement], *, ranks_per_node: int = 0) -> CostModel:
    """Cost model with the least relative error on the measurements.

    A constant that no measurement determines is 0: without groups of two ranks or more there is no communication.
    Raises ValueError where a measurement is not a positive time of at least one token.
    """
    faults = [
        f"measurement {i} ({one.seconds} seconds, {one.tokens} tokens on {one.size} ranks) must be above 0 in all three"
        for i, one in enumerate(measurements)
        if not (one.seconds > 0 and one.tokens > 0 and one.size > 0)
    ]
    if len({(one.tokens, one.squares, one.size) for one in measurements}) < 3:
        faults.append(
            f"{len(measurements)} measurements are not enough: give at least 3 that differ in their documents"
        )
    if faults:
        raise ValueError("cost model: " + "\n".join(faults))
    tokens, squares, sizes, seconds = (
        np.array([getattr(one, name) for one in measurements], dtype=np.float64)
        for name in ("tokens", "squares", "size", "seconds")
    )
    best: tuple[float, Floats] | None = None
    for start in (sizes > 1, sizes < 1):
        sees_ring = start
        for _ in range(MAX_ROUNDS):
            columns = _columns(tokens, squares, sizes, sees_ring, ranks_per_node)
            constants = nonnegative_least_squares(columns / seconds[:, None], np.ones_like(seconds))
            model = _model(constants, ranks_per_node)
            made = np.array([model.seconds(one.tokens, one.squares, one.size) for one in measurements])
            error = float((((made - seconds) / seconds) ** 2).sum())
            if best is None or error < best[0]:
                best = error, constants
            guess = made > _columns(tokens, squares, sizes, sizes < 1, ranks_per_node) @ constants
            if (guess == sees_ring).all():
                break
            sees_ring = guess
    assert best is not None
    return _model(best[1], ranks_per_node)


def nonnegative_least_squares(columns: Floats, wanted: Floats) -> Floats:
    """Non-negative x with the smallest |columns x - wanted|.

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23.
    """
    scale = np.linalg.norm(columns, axis=0)
    scaled = columns / np.where(scale > 0, scale, 1.0)
    x = np.zeros(columns.shape[1])
    free = np.zeros(columns.shape[1], dtype=bool)
    tolerance = 1e-12 * float(np.linalg.norm(wanted))
    for _ in range(3 * columns.shape[1]):
        gain = scaled.T @ (wanted - scaled @ x)
        gain[free | (scale == 0)] = 0.0
        if gain.max() <= tolerance:
            break
        free[gain.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(scaled[:, free], wanted, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            step = (x[low] / (x[low] - trial[low])).min()
            x = np.where(free, x + step * (trial - x), 0.0)
            free &= x > 1e-15
        x = trial
    return x / np.where(scale > 0, scale, 1.0)


def _columns(tokens: Floats, squares: Floats, sizes: Floats, sees_ring: Flags, ranks_per_node: int) -> Floats:
    """Columns of the linear system, [measurements, constants]: fixed, a, b, c near, c far, latency."""
    ring = np.where(sees_ring, sizes - 1, 0.0)
    is_far = (sizes > ranks_per_node) if ranks_per_node else np.zeros_like(sizes, dtype=bool)
    sent = ring * tokens / sizes
    return np.stack(
        [
            np.ones_like(tokens),
            tokens / sizes,
            squares / sizes - ring * squares / sizes**2,
            np.where(is_far, 0.0, sent),
            np.where(is_far, sent, 0.0),
            ring,
        ],
        axis=1,
    )


def _model(constants: Floats, ranks_per_node: int) -> CostModel:
    fixed, per_token, per_square, per_sent, per_far, latency = map(float, constants)
    return CostModel(
        fixed_seconds=fixed,
        # Every token takes time, however little.
        seconds_per_token=max(per_token, 1e-15),
        seconds_per_square=per_square,
        seconds_per_sent_token=per_sent,
        seconds_per_far_token=per_far,
        latency_seconds=latency,
        ranks_per_node=ranks_per_node,
    )
