"""What is done once before the first step: checks, launch, process groups, and the module made ready."""
