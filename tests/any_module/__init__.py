"""Tests of networks that know nothing of ranks."""
