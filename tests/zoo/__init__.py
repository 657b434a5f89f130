"""Every kind of model that people run, built small, and what must hold of each."""
