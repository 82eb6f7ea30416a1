"""The command line: `lightning-megatron` and recipes."""
