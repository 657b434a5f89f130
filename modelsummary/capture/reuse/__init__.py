"""Repeated structure runs once."""
