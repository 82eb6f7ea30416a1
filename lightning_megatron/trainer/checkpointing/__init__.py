"""Checkpoints of a Trainer: what Lightning saves and loads, as a sharded directory."""
