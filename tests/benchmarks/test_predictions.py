"""`python benchmarks predictions`: arguments of kernels are kept where they still fit."""

from dataclasses import replace

import pytest

from benchmarks.predictions import predict
from neuronmm_ops.device import predictions, programme


@pytest.mark.parametrize("number", [2, 8])
def test_a_kept_prediction_keeps_its_arguments_where_they_fit(number):
    case = programme.kernel_cases("trn2")[number]
    kept = predictions.frozen().rows["trn2"][case.name]
    assert predict(case, kept).arguments == kept.arguments
    useless = replace(kept, arguments={"former": 1})
    assert predict(case, useless) == predict(case)
