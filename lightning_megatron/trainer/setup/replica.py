"""Data-parallel rank and size of a process, under any strategy of Lightning."""

from dataclasses import dataclass

from lightning.pytorch.strategies import ParallelStrategy, Strategy


@dataclass(frozen=True)
class Replica:
    """Data-parallel rank of this process, and the number of data-parallel ranks."""

    rank: int
    size: int

    @staticmethod
    def under(strategy: Strategy) -> "Replica":
        """Rank and size of a DistributedSampler under the Trainer's strategy; a strategy of one process has size 1."""
        if not isinstance(strategy, ParallelStrategy):
            return Replica(0, 1)
        kwargs = strategy.distributed_sampler_kwargs
        return Replica(kwargs["rank"], kwargs["num_replicas"])
