"""Measurements: each file times one thing against its plain counterpart, both sides interleaved in one run."""
