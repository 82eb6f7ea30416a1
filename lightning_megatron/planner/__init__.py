"""Before spending a device: whether a configuration can run, and what it would take."""
