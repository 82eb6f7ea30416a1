"""Measures of a run, as pure arithmetic over observations of other rooms."""
