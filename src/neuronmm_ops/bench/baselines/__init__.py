"""Published kernels, rewritten from their sources, to hold modelled times against.

They keep what the originals do, partial sums in bfloat16 included. They are measured here, not
recommended.
"""
