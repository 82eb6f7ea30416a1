"""Plays the part of CUDA's flash attention of sequences in a row."""

from itertools import pairwise

import torch
from torch import Tensor

from lightning_megatron.context.attention_step import BackwardInputs
from lightning_megatron.context.flash import FlashVarlen, VarlenSequences


class PlainVarlen(FlashVarlen):
    """What flash attention does, its rules for bounds among it, a sequence at a time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def forward(
        self, queries: Tensor, keys: Tensor, values: Tensor, sequences: VarlenSequences, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.num_calls += 1
        output, lse = torch.zeros_like(queries), torch.full(queries.shape[:2], torch.inf, dtype=queries.dtype).mT
        for rows, seen in self._each(sequences):
            scores = self._scores(queries[rows], keys[seen], sequences, scale)
            part_lse = scores.logsumexp(dim=-1)
            weights = (scores - part_lse.masked_fill(part_lse == -torch.inf, 0.0).unsqueeze(-1)).exp()
            output[rows] = torch.einsum("aqk,kad->qad", weights, self._repeated(values[seen], queries))
            lse[:, rows] = part_lse.masked_fill(part_lse == -torch.inf, torch.inf)
        return output, lse

    def backward(
        self, inputs: BackwardInputs, sequences: VarlenSequences, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, queries, keys, values, output, lse = inputs
        grads = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for rows, seen in self._each(sequences):
            keys_A, values_A = (self._repeated(x[seen], queries) for x in (keys, values))
            weights = (self._scores(queries[rows], keys[seen], sequences, scale) - lse[:, rows, None]).exp()
            delta = (grad[rows] * output[rows]).sum(-1).mT.unsqueeze(-1)
            scores_grad = weights * (torch.einsum("qad,kad->aqk", grad[rows], values_A) - delta) * scale
            grads[0][rows] = torch.einsum("aqk,kad->qad", scores_grad, keys_A)
            by_group = (len(keys_A), keys.shape[1], -1, keys.shape[2])
            grads[1][seen] = torch.einsum("aqk,qad->kad", scores_grad, queries[rows]).reshape(by_group).sum(2)
            grads[2][seen] = torch.einsum("aqk,qad->kad", weights, grad[rows]).reshape(by_group).sum(2)
        return grads

    def _each(self, sequences: VarlenSequences) -> list[tuple[slice, slice]]:
        starts = [x.tolist() for x in (sequences.query_starts, sequences.key_starts)]
        pairs = [[slice(*pair) for pair in pairwise(x)] for x in starts]
        assert max(pair.stop - pair.start for pair in pairs[0]) == sequences.most_queries
        assert max(pair.stop - pair.start for pair in pairs[1]) == sequences.most_keys
        return list(zip(*pairs, strict=True))

    def _repeated(self, x: Tensor, queries: Tensor) -> Tensor:
        return x.repeat_interleave(queries.shape[1] // x.shape[1], dim=1)

    def _scores(self, queries: Tensor, keys: Tensor, sequences: VarlenSequences, scale: float) -> Tensor:
        left, right = (-1 if bound >= sequences.most_keys else bound for bound in sequences.bounds)
        # A bound of one side bounds the other by the longest.
        if left < 0 <= right:
            left = sequences.most_keys
        if right < 0 <= left:
            right = sequences.most_keys
        offset = torch.arange(len(keys)) - torch.arange(len(queries))[:, None] - (len(keys) - len(queries))
        scores = torch.einsum("qad,kad->aqk", queries, self._repeated(keys, queries)) * scale
        if right < 0:
            return scores
        return scores.masked_fill((offset > right) | (offset < -left), -torch.inf)
