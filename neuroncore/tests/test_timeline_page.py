"""The timeline page: what it holds, that it asks for nothing, and that a browser draws it."""

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import profiled
import pytest
from browser import CHROMIUM, Page, browser
from profiled import idle, keeps_the_old_file, many, parts, profile_of, tiles

import neuroncore as nc
from neuroncore.memory.storage import MemoryRegion
from neuroncore.profile import metrics


@pytest.fixture(scope="module")
def one_core() -> nc.Profile:
    return profile_of(tiles, (128, 128), (128, 2048))


@pytest.fixture(scope="module")
def saved(one_core: nc.Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    one_core.save_timeline(path)
    assert [found.name for found in path.parent.iterdir()] == [path.name]
    return path


def script(page: str, name: str) -> str:
    (found,) = re.findall(rf'<script type="[^"]*" id="{name}">(.*?)</script>', page, re.DOTALL)
    return found


def unpacked(page: str) -> tuple[dict[str, Any], Any]:
    """What the page holds, and a function that reads one of its arrays."""
    inflated = zlib.decompress(base64.b64decode(script(page, "arrays")))

    def array(where: dict[str, Any]) -> np.ndarray:
        return np.frombuffer(inflated, where["type"], where["count"], where["offset"])

    return json.loads(script(page, "about")), array


def test_the_page_refers_to_nothing(saved):
    page = saved.read_text()
    page = page.replace(script(page, "about"), "").replace(script(page, "arrays"), "")
    page = re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL)  # the profile as text
    for word in ("http:", "https:", "src=", "href=", "url(", "@import", "fetch(", "import("):
        assert word not in page, word
    assert not re.search(r"\b(XMLHttpRequest|WebSocket|EventSource|sendBeacon|Worker)\b", page)


def test_the_policy_allows_the_page_s_own_script_alone(saved):
    page = saved.read_text()
    (policy,) = re.findall(r'content="(default-src [^"]*)"', page)
    assert policy.startswith("default-src 'none'; ")
    for tag in ("style", "script"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_every_instruction_is_there(one_core, saved):
    about, array = unpacked(saved.read_text())
    (core,), (schedule,) = about["cores"], one_core.schedule.cores
    columns = {name: array(where) for name, where in core["columns"].items()}
    assert sorted(columns["number"]) == list(range(one_core.instructions))
    per_ns = about["ticks_per_ns"]
    for at, i in enumerate(columns["number"].tolist()):
        template, _, _, line = schedule.trace.records[i]
        assert columns["start"][at] / per_ns == pytest.approx(schedule.start[i], abs=1e-3)
        assert columns["end"][at] / per_ns == pytest.approx(schedule.end[i], abs=1e-3)
        assert (columns["wait"][at], columns["cause"][at]) == (schedule.wait[i], schedule.cause[i])
        assert about["kinds"][columns["kind"][at]]["opcode"] == template.opcode
        assert (
            about["places"][columns["place"][at]]["place"]
            == f"{Path(profiled.__file__).name}:{line}"
        )
    texts = {place["text"] for place in about["places"]}
    assert "nisa.nc_matmul(total, a, b)" in texts
    assert any("</script>" in text for text in texts)


def test_lanes_are_engines_and_queues_without_overlaps(one_core, saved):
    about, array = unpacked(saved.read_text())
    (core,) = about["cores"]
    start, end = (array(core["columns"][name]).astype(int) for name in ("start", "end"))
    for lane in core["lanes"]:
        at = slice(lane["first"], lane["end"])
        assert (start[at][1:] >= end[at][:-1]).all(), lane
    names = [lane["name"] for lane in core["lanes"] if lane["name"]]
    assert names == ["TensorE", "VectorE", "q0 load", "q1 load", "q2 store"]
    assert [lane["tensors"] for lane in core["lanes"] if lane["name"]][2:] == [["x"], ["w"], ["y"]]


def test_the_path_fills_the_time_and_marks_its_instructions(one_core, saved):
    about, array = unpacked(saved.read_text())
    path = {name: array(where).astype(float) for name, where in about["path"].items()}
    assert path["waited"][0] == 0
    assert path["ended"][-1] == pytest.approx(about["time_ns"] * about["ticks_per_ns"])
    np.testing.assert_array_equal(path["waited"][1:], path["ended"][:-1])
    assert (path["waited"] <= path["began"]).all()
    assert (path["began"] <= path["ended"]).all()
    columns = {name: array(where) for name, where in about["cores"][0]["columns"].items()}
    marked = columns["number"][columns["critical"] == 1]
    assert sorted(marked) == sorted(set(path["number"].astype(int)))
    steps = metrics.critical_steps(one_core.schedule)
    assert sorted(marked) == sorted({i for _, i, _, _ in steps})


def test_memories_over_time(one_core, saved):
    about, array = unpacked(saved.read_text())
    memories = {memory["name"]: memory for memory in about["cores"][0]["memories"]}
    for name, peak in (("SBUF", one_core.sbuf), ("PSUM", one_core.psum)):
        sizes = array(memories[name]["size"])
        assert (max(sizes), sizes[-1]) == (peak.scheduled, 0)
        assert memories[name]["limit"] == peak.limit
    held = metrics.occupancy(one_core.schedule.cores[0], MemoryRegion.sbuf)
    times = array(memories["SBUF"]["time"]) / about["ticks_per_ns"]
    np.testing.assert_allclose(times, [ns for ns, _ in held], atol=1e-3)


def lives_of(about, array, memory):
    """Places of a memory's tensors, of the first core, in ns."""
    (found,) = [m["lives"] for m in about["cores"][0]["memories"] if m["name"] == memory]
    columns = {name: array(where) for name, where in found.items()}
    for name in ("start", "end"):
        columns[name] = columns[name] / about["ticks_per_ns"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(("kernel", "shapes"), [(tiles, (128, 2048)), (parts, ())])
def test_tensors_by_address_share_no_byte_and_are_what_the_chart_counts(kernel, shapes, tmp_path):
    profile = profile_of(kernel, (128, 512), *filter(None, [shapes]))
    profile.save_timeline(tmp_path / "page.html")
    about, array = unpacked((tmp_path / "page.html").read_text())
    for name, peak in (("SBUF", profile.sbuf), ("PSUM", profile.psum)):
        lives = lives_of(about, array, name)
        assert max([life["byte_end"] for life in lives], default=0) <= peak.limit * 2048
        for one, other in itertools.combinations(lives, 2):
            apart = [
                one[f"{axis}end"] <= other[begin] or other[f"{axis}end"] <= one[begin]
                for axis, begin in (("", "start"), ("byte_", "byte"), ("partition_", "partition"))
            ]
            assert any(apart), (one, other)
        for life in lives:
            kind = about["tensors"][life["tensor"]]
            assert kind["memory"] == name
            assert life["byte_end"] - life["byte"] >= kind["bytes"]
            assert f"[{life['partition_end'] - life['partition']}," in kind["type"]


def test_an_address_of_the_kernel_and_quarters_of_the_partitions(tmp_path):
    profile_of(parts, (128, 512)).save_timeline(tmp_path / "page.html")
    about, array = unpacked((tmp_path / "page.html").read_text())
    found = [(about["tensors"][life["tensor"]]["name"], life) for life in
             lives_of(about, array, "SBUF")]  # fmt: skip
    assert sorted(life["byte"] for name, life in found if name.startswith("at")) == [0, 1024]
    low = {
        life["partition"] for name, life in found if life["partition_end"] - life["partition"] == 32
    }
    assert low <= {0, 32, 64, 96}
    assert all(life["partition"] in (0, 64) for _, life in found
               if life["partition_end"] - life["partition"] == 64)  # fmt: skip


def test_tensors_by_name_say_who_writes_and_reads_them(saved):
    about, _ = unpacked(saved.read_text())
    tensors = {tensor["name"]: tensor for tensor in about["tensors"]}
    assert {"x", "w", "y", "a", 'the "right" tile', "psum()", "tile()"} == set(tensors)
    texts = [place["text"] for place in about["places"]]
    total = tensors["psum()"]
    assert (total["memory"], total["type"], total["bytes"]) == ("PSUM", "float32[128,512]", 2048)
    assert [texts[n] for n in total["writes"]] == ["nisa.nc_matmul(total, a, b)"]
    assert [texts[n] for n in total["reads"]] == ["nisa.tensor_copy(out, total)"]
    assert total["count"] == 4


def test_tensors_without_a_source_line_keep_their_numbers(tmp_path):
    scope = dict(vars(profiled))
    lines = (
        "def kernel(x):",
        "    a, b = nl.ndarray((128, 512), x.dtype), nl.ndarray((64, 8), x.dtype)",
        "    nisa.memset(a, 1.0)",
        "    nisa.memset(b, 1.0)",
        "    return x",
    )
    exec("\n".join(lines), scope)  # noqa: S102
    profile_of(scope["kernel"], (128, 512)).save_timeline(tmp_path / "page.html")
    about, _ = unpacked((tmp_path / "page.html").read_text())
    assert {tensor["name"] for tensor in about["tensors"]} == {"sbuf1", "sbuf2"}


def test_what_would_help_is_on_the_page(one_core, saved):
    about, _ = unpacked(saved.read_text())
    assert about["what_would_help"] == one_core.what_would_help
    assert [entry[0] for entry in about["what_if"]] == [w.resource for w in one_core.what_if]
    facts = dict(about["facts"])
    low, high = f"{one_core.time_low_ms * 1e3:,.2f}", f"{one_core.time_high_ms * 1e3:,.2f}"
    of = "" if low == high else f"; {low} to {high} under the DMA models"
    assert facts["time"] == f"{one_core.time_ms * 1e3:,.2f} us (modelled{of})"


def test_a_failed_write_leaves_the_old_page(one_core, tmp_path):
    keeps_the_old_file(one_core.save_timeline, tmp_path, (Path, "write_text"))


# --- in a browser


def in_a_browser(test):
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")(test))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def opened(page: Page, path: Path, width: int = 1200) -> Page:
    page.open(path, width)
    assert page.errors == []
    assert page.run("document.documentElement.dataset.ready") == "yes"
    return page


def colors(page: Page) -> int:
    """How many colours the canvas shows."""
    return page.run(
        """(() => {
          const canvas = document.getElementById("canvas");
          const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          return new Set(new Uint32Array(data.buffer)).size;
        })()"""
    )


def place_of(page: Page, opcode: str) -> tuple[float, float]:
    """Where in the window the first instruction of an opcode is drawn."""
    x, y = page.run(
        f"""(() => {{
          const core = timeline.trace.cores[0], c = core.columns;
          const index = c.kind.findIndex((k) => timeline.trace.kinds[k].opcode === "{opcode}");
          const band = timeline.bandOf(0, index);
          const box = timeline.canvas.getBoundingClientRect();
          const middle = (c.start[index] + c.end[index]) / 2;
          return [box.x + timeline.x(middle), box.y + band.y + band.height / 2];
        }})()"""
    )
    return x, y


@in_a_browser
def test_a_browser_draws_it_and_asks_for_nothing_else(page, saved):
    opened(page, saved)
    assert page.requested == [saved.as_uri()]
    assert colors(page) > 10
    about, _ = unpacked(saved.read_text())
    text = page.run("document.body.innerText")
    for shown in (dict(about["facts"])["time"], about["what_would_help"], "What would help"):
        assert shown in text
    assert page.run("document.querySelectorAll('#what_if tbody tr').length") == len(
        about["what_if"]
    )


@in_a_browser
def test_hover_click_and_zoom(page, saved):
    opened(page, saved)
    x, y = place_of(page, "nc_matmul")
    page.mouse("Moved", x, y)
    tip = page.run("document.getElementById('tip').innerText")
    assert "nisa.nc_matmul(total, a, b)" in tip
    assert f"{Path(profiled.__file__).name}:" in tip
    assert "waited for data, until instruction 1 (dma_copy" in tip
    page.click(x, y)
    assert page.run("document.getElementById('kept').innerText").startswith("nc_matmul")
    page.run("document.querySelector('#kept button').click()")
    assert page.run("document.getElementById('kept').innerText").startswith("dma_copy")
    before = page.run("timeline.to - timeline.from")
    page.mouse("Wheel", x, y, deltaX=0, deltaY=-100)
    assert page.run("timeline.to - timeline.from") == pytest.approx(before / 1.2)
    page.run("document.getElementById('all').click()")
    assert page.run("timeline.to - timeline.from") == before
    page.run("document.querySelector('#lines tbody tr').click()")
    assert page.run("timeline.marked") >= 0
    page.run("document.querySelector('#lines tbody tr').click()")
    assert page.run("timeline.marked") == -1
    page.run("for (let i = 0; i < 99; i++) timeline.zoom(0.1)")  # as far as it goes
    assert page.run("timeline.to - timeline.from") == 200
    assert page.errors == []


def in_the_map(page: Page, memory: str) -> tuple[float, float]:
    """Where in the window the first tensor of a memory is drawn by address."""
    x, y = page.run(
        f"""(() => {{
          const band = timeline.bands.find((b) => b.kind === "map" && b.memory.name === "{memory}");
          const {{lives}} = band.memory, [y, height] = timeline.rowsOf(band, 0);
          const box = timeline.canvas.getBoundingClientRect();
          return [box.x + timeline.x((lives.start[0] + lives.end[0]) / 2), box.y + y + height / 2];
        }})()"""
    )
    return x, y


@in_a_browser
def test_a_tensor_shows_its_place_and_its_lines(page, saved):
    opened(page, saved)
    x, y = in_the_map(page, "PSUM")
    page.mouse("Moved", x, y)
    tip = page.run("document.getElementById('tip').innerText")
    for part in ("psum(): float32[128,512] in PSUM, made at profiled.py:",
                 "bytes 0 to 2,047 (2,048) of partitions 0 to 127", "from ",
                 "nisa.nc_matmul(total, a, b)", "nisa.tensor_copy(out, total)"):  # fmt: skip
        assert part in tip
    page.click(x, y)
    assert page.run("document.getElementById('kept').innerText").startswith("psum()")
    assert page.run("document.querySelector('#tensors tr.chosen td').innerText") == "psum()"
    page.run("document.querySelector('#tensors tr.chosen').click()")
    assert page.run("timeline.tensor") == -1
    assert page.run("document.getElementById('kept').hidden")
    assert page.errors == []


@in_a_browser
def test_the_page_is_dark_as_the_browser_prefers_and_by_its_switch(page, saved):
    def back() -> str:
        return page.run("getComputedStyle(document.body).backgroundColor")

    opened(page, saved)
    backs = {}
    for theme in ("dark", "light"):
        preferred = [{"name": "prefers-color-scheme", "value": theme}]
        page.call("Emulation.setEmulatedMedia", features=preferred)
        page.run(
            "new Promise((done) => { const wait = () => document.documentElement.dataset.theme ==="
            f" '{theme}' ? done() : setTimeout(wait, 20); wait(); }})"
        )
        backs[theme] = back()
    assert backs["dark"] != backs["light"]
    page.run("document.getElementById('theme').click()")
    assert back() == backs["dark"]
    page.call("Emulation.setEmulatedMedia", features=[])


@in_a_browser
def test_fingers_pinch_drag_and_tap(page, saved):
    opened(page, saved, 390)
    page.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)

    def touch(kind: str, *at: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(at)]
        page.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    x, y = in_the_map(page, "SBUF")
    whole = page.run("timeline.to - timeline.from")
    touch("Start", (180, y), (220, y))
    for spread in (40, 60, 80):
        touch("Move", (200 - spread, y), (200 + spread, y))
    touch("End")
    pinched = page.run("timeline.to - timeline.from")
    assert pinched == pytest.approx(whole / 4, rel=0.2)
    before = page.run("timeline.from")
    touch("Start", (200, y))
    for to in (210, 240, 280):
        touch("Move", (to, y))
    touch("End")
    assert page.run("timeline.from") < before
    assert page.run("timeline.to - timeline.from") == pytest.approx(pinched)
    page.run("timeline.show(0, timeline.length)")
    touch("Start", (x, y))
    touch("End")
    assert page.run("document.getElementById('kept').innerText").startswith("a: bfloat16")
    assert not page.run("document.getElementById('tip').hidden")
    page.call("Emulation.setTouchEmulationEnabled", enabled=False)


@in_a_browser
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_has_cards_for_tables_and_whole_ticks(page, saved, width):
    opened(page, saved, width)
    assert page.run("document.documentElement.scrollWidth") == width
    cells = "document.querySelectorAll('td:last-child:not(:empty)')"
    assert page.run(f"Math.min(...Array.from({cells}, (cell) => cell.clientWidth))") > 200
    ticks = page.run(
        """(() => {
          const drawn = [], draw = timeline.pen.fillText.bind(timeline.pen);
          CanvasRenderingContext2D.prototype.fillText = function(text, x, y) {
            if (y < 24) drawn.push([x, x + this.measureText(text).width]);
            draw(text, x, y);
          };
          for (let i = 0; i < 9; i++) { drawn.push([0, 0]); timeline.zoom(0.7); }
          return drawn;
        })()"""
    )
    assert len(ticks) > 9
    for (_, end), (begin, _) in itertools.pairwise(ticks):
        assert begin == 0 or end < begin
    assert max(end for _, end in ticks) <= page.run("timeline.canvas.clientWidth")


@in_a_browser
def test_two_cores_and_none_at_all(page, tmp_path):
    two, none = tmp_path / "two.html", tmp_path / "none.html"
    profile_of(tiles[2], (128, 256), (128, 2048)).save_timeline(two)
    profile_of(idle, (4, 4)).save_timeline(none)
    opened(page, two)
    labels = page.run("timeline.bands.map((band) => band.label)")
    assert {"0: TensorE", "1: TensorE", "0: SBUF", "1: PSUM"} <= set(labels)
    opened(page, none)
    assert "Nothing ran." in page.run("document.body.innerText")
    page.mouse("Moved", 400, 200)
    assert page.errors == []


@in_a_browser
def test_a_hundred_thousand_instructions_stay_usable(page, tmp_path):
    path = tmp_path / "many.html"
    profile_of(lambda x: many(x, 100_000), (128, 512)).save_timeline(path)
    assert path.stat().st_size < 4_000_000
    opened(page, path)
    frame_ms = page.run(
        """(() => {
          const from = performance.now();
          for (let i = 0; i < 5; i++) timeline.draw();
          return (performance.now() - from) / 5;
        })()"""
    )
    assert frame_ms < 1000  # tens of milliseconds; a frame per instruction would take seconds
    assert colors(page) > 5
