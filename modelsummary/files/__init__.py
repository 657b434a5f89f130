"""Models that are files: what each format is read with, and what is known of such a model."""
