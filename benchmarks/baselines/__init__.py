"""Published kernels, rewritten from their sources, that only modelled times are held against."""
