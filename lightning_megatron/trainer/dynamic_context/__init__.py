"""Dynamic context parallelism beside training: the next step is planned and its documents are sent."""
