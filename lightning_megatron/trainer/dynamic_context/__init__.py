"""Dynamic context parallelism in the background: the next step is planned and its documents are sent."""
