"""Tensor parallelism: the sharding of each weight, and the collectives."""
