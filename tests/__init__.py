"""Tests of lightning_megatron: one folder a room, and the harness that starts their ranks."""
