"""A loader of streamed samples that a checkpoint can resume on any layout.

Between `data/streaming.py` and Lightning's loops.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_megatron.data.batch_ramp import BatchRamp
from lightning_megatron.data.collate import Sample, collate_tokens
from lightning_megatron.data.streaming import BatchPart, StreamedBatches, StreamReader, StreamStart, require_packers
from lightning_megatron.trainer.config import ConfigurationError
from lightning_megatron.trainer.setup.replica import Replica


class StreamLoader:
    """This data-parallel rank's part of `num_batches` global batches an epoch; the next epoch goes on after it.

    Its state is the samples consumed and the state of its readers; `merged_state` merges those of all data-parallel
    ranks into one.
    """

    def __init__(
        self,
        make_reader: Callable[[Sequence[int]], StreamReader],
        *,
        ramp: BatchRamp,
        num_batches: int,
        replica: Replica,
        num_workers: int,
    ) -> None:
        ramp.require_shared(replica.size)
        share = ramp.unit // replica.size
        self._make_reader = make_reader
        self._ramp = ramp
        self._num_batches = num_batches
        self._packers = range(replica.rank * share, (replica.rank + 1) * share)
        # Each has one packer at least.
        self._num_workers = min(num_workers, share)
        self._start = StreamStart()

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Sample]:
        dataset = StreamedBatches(self._make_reader, self._packers, self._ramp, self._num_batches, self._start)
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=self._num_workers,
            # Torch draws a seed for workers from it whenever they begin, and not from the default generator.
            generator=torch.Generator(),
        )
        parts = iter(loader)
        for _ in range(self._num_batches):
            found = [_sound(next(parts)) for _ in range(max(self._num_workers, 1))]
            states = tuple(state for _, state in found if state is not None)
            consumed = self._start.consumed_samples
            self._start = StreamStart(
                state_samples=consumed if states else self._start.state_samples,
                states=states or self._start.states,
                consumed_samples=consumed + self._ramp.size_at(consumed),
            )
            yield collate_tokens([sample for samples, _ in found for sample in samples])

    def state_dict(self) -> dict[str, Any]:
        start = self._start
        return {
            "consumed_samples": start.consumed_samples,
            "state_samples": start.state_samples,
            "states": list(start.states),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_of_stream(state)
        try:
            require_packers(state["states"], self._ramp.unit)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._start = StreamStart(
            state_samples=state["state_samples"],
            states=tuple(state["states"]),
            consumed_samples=state["consumed_samples"],
        )

    def merged_state(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state that every data-parallel rank resumes from, merged from those of all ranks."""
        for state in states:
            _require_of_stream(state)
        # Ranks that resumed from a checkpoint and have read nothing since all have the checkpoint's state.
        of_packers = {tuple(part["packers"]): part for state in states for part in state["states"]}
        return {**states[0], "states": list(of_packers.values())}


def _sound(part: BatchPart) -> tuple[list[Sample], Any]:
    if isinstance(part, ValueError):
        raise ConfigurationError(str(part))
    return part


def _require_of_stream(state: Mapping[str, Any]) -> None:
    if "states" not in state:
        raise ConfigurationError(
            "the checkpoint is of a run whose text did not stream, and has no position in a stream; resume it without"
            " streaming, or start anew from the checkpoint's weights"
        )
