"""Integrations with libraries that train models; each module needs its library."""
