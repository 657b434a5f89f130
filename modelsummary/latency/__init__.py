"""Measured time of every call."""
