"""Regions of a tensor: which overlap, and which hold others, as each pair of boxes says."""

from hypothesis import given, settings
from hypothesis import strategies as st

from neuroncore import language as nl
from neuroncore.memory.storage import Box, Layout

ROWS, BYTES = 40, 96
edges = st.tuples(
    *[st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda e: e[0] < e[1]).map(tuple)
      for n in (ROWS, BYTES)]
)  # fmt: skip
patterns = st.none() | st.just((0, (2,), (3,)))


@settings(deadline=None)
@given(st.lists(st.tuples(edges, patterns), max_size=40))
def test_regions_that_share_a_byte_know_each_other(drawn):
    layout = Layout((ROWS, BYTES // 2), nl.bfloat16, nl.shared_hbm)
    boxes: list[Box] = []
    for ((row, row_end), (byte, byte_end)), pattern in drawn:
        box = Box(row, row_end, byte, byte_end, pattern)
        number = layout.region(box)
        if number == len(boxes):
            boxes.append(box)
        assert boxes[number] == box
    for i, a in enumerate(boxes):
        touching = [
            j
            for j, b in enumerate(boxes)
            if max(a.row, b.row) < min(a.row_end, b.row_end)
            and max(a.byte, b.byte) < min(a.byte_end, b.byte_end)
        ]
        assert layout.overlaps[i] == touching
        around = [
            j
            for j in touching
            if boxes[j].pattern is None
            and boxes[j].row <= a.row < a.row_end <= boxes[j].row_end
            and boxes[j].byte <= a.byte < a.byte_end <= boxes[j].byte_end
        ]
        assert sorted(layout.containers[i]) == around
