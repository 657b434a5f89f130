"""Bytes of a step, predicted and measured, and activation checkpointing."""
