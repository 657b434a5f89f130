"""Views of a ``LayerInfo`` tree: each is a function of the tree."""
