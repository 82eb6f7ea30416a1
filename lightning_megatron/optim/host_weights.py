"""Main weights of a bucket in host memory: the optimizer steps them there, and its moments follow them.

    device    gradient shard                                parameters of this rank's shard
                    |  copied after the reduction                 ^  cast, and copied, bucket by bucket
    host      gradient shard ---> the optimizer's step ---> main weights

Source: Ren et al., arXiv 2101.06840 (ZeRO-Offload), sections 4.1 and 4.2.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_megatron.host_memory import host_zeros
from lightning_megatron.optim.bucket import Bucket
from lightning_megatron.optim.reductions import fingerprint
from lightning_megatron.optim.sharded_params import take_over
from lightning_megatron.sharding import write_elements


class HostWeights:
    """The main weights of this rank's shard of a bucket [N/d], with the values that its parameters have now.

    The bucket's gradients go to the host from now on.
    """

    @torch.no_grad()
    def __init__(self, bucket: Bucket) -> None:
        num_elements, dtype = bucket.layout.num_elements // bucket.shards.size, bucket.members[0].parameter.dtype
        self.main = host_zeros(num_elements, dtype, bucket.device)
        """Main weights, flat."""
        for index, param in enumerate(bucket.members):
            own = bucket.own_range(index)
            write_elements(param.parameter, own.start, own.end, bucket.part_of(self.main, index))
        # What is copied to the device: fewer bytes than the main weights have, where the parameters have fewer.
        low = bucket.low or dtype
        self._cast = self.main if low == dtype else host_zeros(num_elements, low, bucket.device)
        bucket.on_host = host_zeros(num_elements, bucket.dtype, bucket.device)
        self.held = list(dict.fromkeys([self.main, self._cast, bucket.on_host]))
        """Tensors in host memory."""
        self._on_device = self.main
        self._sent = torch.empty(0)

    def attach(self, on_device: Tensor) -> None:
        """Takes the tensor on the device [N/d] that has the values of the main weights, in the parameters' dtype."""
        self._on_device, self._sent = on_device, fingerprint(on_device)

    def send(self) -> None:
        """Starts to copy the main weights to the device, which has taken what was sent before."""
        if self._cast is not self.main:
            self._cast.copy_(self.main)
        self.attach(self._on_device.copy_(self._cast, non_blocking=True))

    def take_changed(self) -> None:
        """Takes over what was changed on the device since it was sent; the host reads all of it only then."""
        if bool(fingerprint(self._on_device) != self._sent):
            take_over(self.main, self._on_device.to(self.main.device))


def offloaded(buckets: Sequence[Bucket], fraction: float) -> Iterable[Bucket]:
    """The first buckets, until they have that fraction of all elements or more."""
    wanted, counted = fraction * sum(bucket.layout.num_elements for bucket in buckets), 0
    for bucket in buckets:
        if counted < wanted:
            yield bucket
        counted += bucket.layout.num_elements
