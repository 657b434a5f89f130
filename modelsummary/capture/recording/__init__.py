"""The record of a run: a tree of events with the values that flow between them."""
