"""Faults on purpose: what `check` must catch."""
