"""State of a resumed run besides weights and optimizers: loop progress, data position, random states."""
