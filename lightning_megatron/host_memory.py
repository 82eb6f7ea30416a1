"""The memory of this machine."""

import os


def machine_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
