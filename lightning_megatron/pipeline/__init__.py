"""Pipeline parallelism: schedules as data, the checks on them, and the runtime that executes them."""
