"""When instructions run: their trace, the resources they compete for, their schedule."""
