"""Set-up of a run before its first step: checks, launch, process groups, and the module made ready."""
