"""Published measurements, and the runs that they are compared with."""
