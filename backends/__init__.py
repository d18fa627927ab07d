"""Backends: what carries out the plans of the decision core."""
