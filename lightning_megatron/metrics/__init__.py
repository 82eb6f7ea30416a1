"""What is measured of a run, as pure arithmetic over what others observed."""
