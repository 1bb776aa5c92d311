"""A layer of a decoder in one launch."""
