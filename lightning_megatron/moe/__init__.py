"""Mixture of experts: router, load balancing, token dispatch and the experts themselves."""
