"""Defaults of `certify`, and the limit of a layout that `model-plan` shares."""

STEPS = 3
"""Steps of each run."""
ROWS = 8
"""Rows of a global batch."""
LIMIT_SECONDS = 180.0
"""Time that one layout may take."""
