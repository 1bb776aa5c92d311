"""Regions of a tensor: which overlap, which hold others, and which are written, byte by byte."""

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


PARTITIONS, COLUMNS, ITEM = 4, 12, 2
ROW_BYTES = COLUMNS * ITEM


@st.composite
def views(draw):
    """A view of some partitions, whose two free dimensions may have holes; or of every other."""
    first, last = sorted(draw(st.tuples(*[st.integers(0, PARTITIONS - 1)] * 2)))
    step = draw(st.sampled_from([1, 1, 1, 2]))
    rows = (last - first) // step + 1
    start = draw(st.integers(0, COLUMNS - 1))
    size = draw(st.integers(1, COLUMNS - start))
    stride = draw(st.integers(1, 3))
    count = (size - 1) // stride + 1
    sizes, strides = (rows, count, ITEM), (step * ROW_BYTES, stride * ITEM, 1)
    end = (start + (count - 1) * stride + 1) * ITEM
    is_exact = (step == 1 or rows == 1) and (stride == 1 or count == 1)
    pattern = None if is_exact else (first * ROW_BYTES + start * ITEM, sizes, strides)
    return Box(first, first + (rows - 1) * step + 1, start * ITEM, end, pattern)


@settings(deadline=None, max_examples=300)
@given(st.lists(views(), max_size=12), views())
def test_a_region_is_written_where_all_of_its_bytes_are(written, wanted):
    layout = Layout((PARTITIONS, COLUMNS), nl.bfloat16, nl.sbuf)
    numbers = {layout.region(box) for box in written}
    region = layout.region(wanted)
    all_bytes = layout.mask(numbers)
    assert layout.covers(region, numbers) == bool(all_bytes[layout.mask([region])].all())
