"""The pipeline schedules, one file each: the maker of its order, and the specification that the registry lists."""
