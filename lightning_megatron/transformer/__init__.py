"""The transformer stack: its configuration, layers, initial values and cost, for every model above."""
