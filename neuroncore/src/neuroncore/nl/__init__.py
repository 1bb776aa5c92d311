"""The parts of `nki.language`: operators, element-wise and composite functions, objects."""
