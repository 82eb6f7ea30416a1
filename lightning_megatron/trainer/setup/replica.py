"""Which data-parallel replica a process belongs to, under any strategy of Lightning."""

from dataclasses import dataclass

from lightning.pytorch.strategies import ParallelStrategy, Strategy


@dataclass(frozen=True)
class Replica:
    """Which of how many data-parallel replicas this process belongs to."""

    rank: int
    size: int

    @staticmethod
    def under(strategy: Strategy) -> "Replica":
        """As Lightning would tell a DistributedSampler; strategies of one process have one replica."""
        if not isinstance(strategy, ParallelStrategy):
            return Replica(0, 1)
        told = strategy.distributed_sampler_kwargs
        return Replica(told["rank"], told["num_replicas"])
