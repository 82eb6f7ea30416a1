"""Context parallelism: sequences that several ranks share, and documents that share a sequence."""
