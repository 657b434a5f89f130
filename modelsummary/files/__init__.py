"""Models that are files, read without running anything in them."""
