"""Time of every call."""
