"""Batch size ramp-up: the global batch size as a function of the samples consumed.

Between samples and the loader. With a ramp from 16 to 64 by 16 over 300 samples the sizes are

    samples seen    0 ...   100 ...   200 ...   300 ...
    global batch    16      32        48        64

where a batch has the size that belongs to the samples seen before it. So the samples seen are enough to go on.
"""

import math

from lightning_megatron.config_dataclass import config_dataclass


@config_dataclass
class BatchRamp:
    """Growth of the global batch size in equal steps, each over equally many samples."""

    first_size: int
    """Global batch size at the start of the run."""
    last_size: int
    """Global batch size after the ramp."""
    step_size: int
    """Samples by which the global batch size grows at each step."""
    ramp_samples: int
    """Samples that have been trained on when the last size is reached."""

    def __post_init__(self) -> None:
        faults = []
        if min(self.first_size, self.step_size) < 1 or self.last_size < self.first_size:
            faults.append(
                f"first_size ({self.first_size}) and step_size ({self.step_size}) must be at least 1, and last_size"
                f" ({self.last_size}) not below first_size"
            )
        elif (self.last_size - self.first_size) % self.step_size:
            steps = (self.last_size - self.first_size) // self.step_size
            below = self.first_size + steps * self.step_size
            faults.append(
                f"from first_size ({self.first_size}) steps of step_size ({self.step_size}) do not lead to last_size"
                f" ({self.last_size}); {below} or {below + self.step_size} would do"
            )
        if self.ramp_samples < 0:
            faults.append(f"ramp_samples ({self.ramp_samples}) must not be negative; 0 starts with last_size")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def num_steps(self) -> int:
        return (self.last_size - self.first_size) // self.step_size

    def size_at(self, consumed_samples: int) -> int:
        """The size of the global batch that comes after `consumed_samples`."""
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative")
        if consumed_samples >= self.ramp_samples:
            return self.last_size
        # In whole numbers: ramp_samples need not be a multiple of the steps.
        return self.first_size + self.step_size * (consumed_samples * self.num_steps // self.ramp_samples)

    def num_batches(self, num_samples: int) -> int:
        """Number of full global batches that so many samples give, from the first on."""
        count = first = 0
        while first < self.ramp_samples:
            if first + (size := self.size_at(first)) > num_samples:
                return count
            count, first = count + 1, first + size
        return count + (num_samples - first) // self.last_size

    @property
    def unit(self) -> int:
        """Greatest common divisor of all sizes."""
        return math.gcd(self.first_size, self.step_size) if self.num_steps else self.last_size

    def require_shared(self, num_replicas: int) -> None:
        """Raises ValueError unless the batches of all sizes can be shared evenly by so many data-parallel ranks."""
        if self.unit % num_replicas == 0:
            return
        below = self.last_size // num_replicas * num_replicas
        fits = " or ".join(str(size) for size in (below, below + num_replicas) if size)
        sizes = (
            f"first_size ({self.first_size}), step_size ({self.step_size}) and last_size ({self.last_size}) of a batch"
            " ramp must be multiples"
            if self.num_steps
            else f"global_batch_size ({self.last_size}) must be a multiple"
        )
        raise ValueError(
            f"{sizes} of the data-parallel size ({num_replicas}): data-parallel ranks share every batch; "
            + (f"steps of {num_replicas} would do" if self.num_steps else f"{fits} would do")
        )

    @staticmethod
    def constant(size: int) -> "BatchRamp":
        """A ramp of batches that do not grow."""
        return BatchRamp(first_size=size, last_size=size, step_size=1, ramp_samples=0)
