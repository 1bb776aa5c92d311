"""One hypothesis profile for all tests: the same examples in every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "neuronmm",
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("neuronmm")
