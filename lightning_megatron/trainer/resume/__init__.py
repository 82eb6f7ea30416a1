"""What a resumed run needs beside weights and optimizers: loop progress, data position, random states."""
