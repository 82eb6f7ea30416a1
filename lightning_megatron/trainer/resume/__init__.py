"""State of a resumed run beside weights and optimizers: loop progress, data position, random states."""
