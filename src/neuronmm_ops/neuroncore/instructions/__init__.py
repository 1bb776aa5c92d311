"""The instructions of `nki.isa`, by what runs them; `neuroncore.isa` lists them all."""
