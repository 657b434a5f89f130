"""Named devices: their figures, the kernel times that follow from them, and the measured table of this machine."""
