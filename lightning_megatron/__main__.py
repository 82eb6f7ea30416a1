"""`python -m lightning_megatron` is the command `lightning-megatron`."""

import sys

from lightning_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
