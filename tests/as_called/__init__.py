"""Models as people call them, against every feature: an answer that an independent tool confirms, or a reason."""
