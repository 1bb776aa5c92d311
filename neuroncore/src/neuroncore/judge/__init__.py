"""`neuroncore judge`: values, rules and modelled time of a submitted kernel, as one score."""
