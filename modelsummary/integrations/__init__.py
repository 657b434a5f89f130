"""For the libraries that train models; each module needs its library."""
