"""Tensor-parallel layers: linear, embedding, norm and cross-entropy, each equal to its plain torch counterpart."""
