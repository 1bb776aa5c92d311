"""Published kernels, rewritten from their sources, that a whole model is also estimated with.

They keep what the originals do, partial sums in bfloat16 included. They are not recommended.
"""
