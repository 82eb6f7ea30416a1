"""Mixture of experts: which experts each token goes to, and how they are kept equally busy."""
