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
        """Replica of a DistributedSampler under the Trainer's strategy; a strategy of one process has one replica."""
        if not isinstance(strategy, ParallelStrategy):
            return Replica(0, 1)
        told = strategy.distributed_sampler_kwargs
        return Replica(told["rank"], told["num_replicas"])
