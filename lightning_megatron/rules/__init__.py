"""Rules that cross configurations: what the strategy checks before a run, and the planner before it plans one."""
