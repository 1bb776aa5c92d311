"""Make the pictures of the timeline page: `python neuroncore/tests/screenshots.py`.

Needs Chromium, and Pillow, which comes with matplotlib.
"""

import tempfile
from pathlib import Path

from browser import Page, browser
from PIL import Image

from neuroncore.cli import main

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "neuroncore" / "docs" / "images"
COMMAND = (
    *("simulate", f"{ROOT / 'examples' / 'kernels' / 'matmul.py'}:matmul", "--trace-only"),
    *("--arg", "lhsT=bf16[1024,512]", "--arg", "rhs=bf16[1024,2048]", "--target", "trn2"),
)
ZOOM = """(() => {
  const c = timeline.trace.cores[0].columns;
  timeline.show(timeline.length * 0.28, timeline.length * 0.42);
  const i = c.kind.findIndex((k, i) => timeline.trace.kinds[k].opcode === "tensor_copy" &&
    c.start[i] > timeline.length * 0.32);
  const band = timeline.bandOf(0, i), box = timeline.canvas.getBoundingClientRect();
  return [box.x + timeline.x((c.start[i] + c.end[i]) / 2), box.y + band.y + 8];
})()"""
TENSOR = """(() => {
  const band = timeline.bands.find((band) => band.kind === "map"), {lives} = band.memory;
  const i = lives.tensor.findIndex((n) => timeline.trace.tensors[n].name === "left");
  const [y, height] = timeline.rowsOf(band, i), box = timeline.canvas.getBoundingClientRect();
  return [box.x + timeline.x((lives.start[i] + lives.end[i]) / 2), box.y + y + height / 2];
})()"""


def shoot(page: Page, name: str) -> None:
    """A picture of few colours: a quarter of the bytes."""
    path = IMAGES / name
    page.shot(path)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


def make(directory: Path) -> None:
    file = directory / "matmul.html"
    assert main([*COMMAND, "--timeline", str(file)]) == 0
    with browser(directory / "browser") as page:
        page.open(file, 1100, 760)
        shoot(page, "timeline.png")
        page.mouse("Moved", *page.run(ZOOM))
        shoot(page, "timeline-hover.png")
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        page.open(file, 390, 1060)
        page.call("Emulation.setEmulatedMedia", features=dark)
        page.run("new Promise((done) => setTimeout(done, 200))")
        page.mouse("Moved", *page.run(TENSOR))
        shoot(page, "timeline-phone.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as found:
        make(Path(found))
