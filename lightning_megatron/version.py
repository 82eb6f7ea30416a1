"""The version of the package, the same from a checkout as where it is installed."""

VERSION = "0.2.0"
