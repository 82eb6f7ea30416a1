"""One training or evaluation step: its batch, its microbatches, what it logs, and the gradients it leaves."""
