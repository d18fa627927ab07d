"""Policies side by side: scenarios, the processes that run them, statistics over seeds, checks."""
