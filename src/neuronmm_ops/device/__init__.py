"""The hour on a device: what is run there, what was predicted of it, and what was found."""
