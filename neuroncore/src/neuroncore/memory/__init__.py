"""What tensors occupy: storages and their regions, views, and how long each is live."""
