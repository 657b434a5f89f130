"""Memory of a step, predicted and measured."""
