"""A server whose model's own compression drafts: under load no answer is wrong."""

import load_with_draft
import pytest

pytestmark = pytest.mark.slow


def test_clients_that_are_killed_change_no_answer_of_others(tmp_path):
    found = load_with_draft.run(tmp_path, clients=8, seconds=8, least=9)
    assert found["wrong"] == 0
    assert min(found["right"], found["killed"]) > 8
    assert 0 < found["accepted"] < found["drafted"]
