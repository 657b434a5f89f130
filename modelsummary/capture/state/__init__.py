"""The state that a run may change, and how it is restored."""
