// The timeline on a canvas. Items narrower than two pixels are summed by pixel column, so that a
// frame takes one pass over what is visible, and the picture keeps what is busy and what is marked.

const RULER = 24, ROW = 16, GAP = 3, CHART = 44, MAP = 144, WIDE = 2;

// Add a span, at most two pixels wide, to the busy shares of the one or two columns that it is in.
function addShare(shares, x, end) {
  const column = Math.max(Math.floor(x), 0), share = Math.max(end - x, 0.02);
  if (column >= shares.length) return;
  const here = Math.min(share, column + 1 - x);
  shares[column] += here;
  if (share > here && column + 1 < shares.length) shares[column + 1] += share - here;
}

class Timeline {
  constructor(canvas, trace) {
    this.canvas = canvas;
    this.trace = trace;
    this.length = Math.max(trace.time_ns * trace.ticks_per_ns, 1);
    this.from = 0;
    this.to = this.length;
    this.marked = -1;  // a source line, or -1 for the critical path
    this.kept = null;  // [core, index]
    this.tensor = -1;  // a kind of tensor that is kept, or -1
    this.measure();
    this.bands = this.layout();
    const last = this.bands[this.bands.length - 1];
    this.height = last.y + last.height + 8;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  layout() {
    const bands = [];
    let y = RULER;
    const add = (band, height) => { bands.push({...band, y, height}); y += height + GAP; };
    add({kind: "path", label: "critical path"}, ROW);
    this.trace.cores.forEach((core, number) => {
      const prefix = this.trace.cores.length > 1 ? `${number}: ` : "";
      y += 6;
      for (const lane of core.lanes) {
        const tensors = lane.tensors.length ? ` ${lane.tensors.join(", ")}` : "";
        add({kind: "lane", core: number, lane, label: lane.name && prefix + lane.name + tensors},
          ROW);
      }
      for (const memory of core.memories) {
        add({kind: "memory", core: number, memory, label: prefix + memory.name}, CHART);
        if (memory.top) {
          add({kind: "map", core: number, memory, label: "by address"}, MAP);
        }
      }
    });
    return bands;
  }

  // Measured once a frame: asking the page for each of 100,000 items would take seconds.
  measure() {
    this.gutter = this.canvas.clientWidth < 600 ? 88 : 150;
    this.width = this.canvas.clientWidth - this.gutter;
  }

  get scale() { return this.width / (this.to - this.from); }
  x(ticks) { return this.gutter + (ticks - this.from) * this.scale; }
  ticks(x) { return this.from + (x - this.gutter) / this.scale; }

  // Show [from, to], moved and cut to what there is, and not narrower than 200 ticks.
  show(from, to) {
    const span = Math.min(Math.max(to - from, 200), this.length);
    this.from = Math.min(Math.max(from, 0), this.length - span);
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, x = this.gutter + this.width / 2) {
    const at = this.ticks(x);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  color(name) { return this.style.getPropertyValue(`--${name}`); }

  draw() {
    const ratio = window.devicePixelRatio || 1, {canvas} = this;
    canvas.style.height = `${this.height}px`;
    this.measure();
    canvas.width = Math.round(canvas.clientWidth * ratio);
    canvas.height = Math.round(this.height * ratio);
    this.style = getComputedStyle(document.documentElement);
    const pen = this.pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = this.color("back");
    pen.fillRect(0, 0, canvas.clientWidth, this.height);
    for (const band of this.bands) {
      pen.fillStyle = this.color("band");
      pen.fillRect(this.gutter, band.y, this.width, band.height);
    }
    this.drawRuler();
    pen.save();
    pen.beginPath();
    pen.rect(this.gutter, 0, this.width, this.height);
    pen.clip();
    for (const band of this.bands) {
      if (band.kind === "lane") this.drawLane(band);
      else if (band.kind === "memory") this.drawMemory(band);
      else if (band.kind === "map") this.drawMap(band);
      else this.drawPath(band);
    }
    this.drawKept();
    pen.restore();
    for (const band of this.bands) {
      pen.fillStyle = this.color(band.kind === "path" ? "mark" : "ink");
      pen.fillText(this.fitted(band.label, this.gutter - 12), 6,
        band.y + Math.min(band.height, ROW) / 2);
      if (band.kind === "map") this.drawAxis(band);
    }
  }

  // The bytes at the ends of a map.
  drawAxis(band) {
    const {pen} = this;
    pen.fillStyle = this.color("faint");
    pen.textAlign = "right";
    const last = `${(band.memory.top / 1024).toFixed(1).replace(".0", "")} KiB`;
    pen.fillText("byte 0", this.gutter - 4, band.y + ROW * 1.5);
    pen.fillText(last, this.gutter - 4, band.y + band.height - 6);
    pen.textAlign = "left";
  }

  fitted(text, width) {
    const pen = this.pen;
    if (pen.measureText(text).width <= width) return text;
    let end = text.length;
    while (end > 0 && pen.measureText(`${text.slice(0, end)}…`).width > width) end--;
    return `${text.slice(0, end)}…`;
  }

  drawRuler() {
    const pen = this.pen, perNs = this.trace.ticks_per_ns;
    const rough = (this.to - this.from) / perNs / Math.max(this.width / 110, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
    for (let n = Math.ceil(this.from / perNs / step); n * step * perNs <= this.to; n++) {
      const x = this.x(n * step * perNs);
      pen.fillStyle = this.color("line");
      pen.fillRect(x, 4, 1, this.height - 12);
      pen.fillStyle = this.color("faint");
      const label = n ? shownTime(n * step, step) : "0";
      if (x + 3 + pen.measureText(label).width <= this.canvas.clientWidth) {
        pen.fillText(label, x + 3, RULER / 2);
      }
    }
  }

  strong(columns, index) {
    return this.marked < 0 ? columns.critical[index] === 1 : columns.place[index] === this.marked;
  }

  drawLane(band) {
    const {lane} = band, c = this.trace.cores[band.core].columns, {pen, scale, from, to} = this;
    const count = Math.ceil(this.width) + 1;
    const busy = new Float32Array(count), strong = new Float32Array(count);
    const plainColor = this.color(`e${lane.engine}`), markColor = this.color("mark");
    const ink = this.color("ink"), markInk = this.color("mark-ink");
    for (let i = firstAbove(c.end, from - 1, lane.first, lane.end); i < lane.end; i++) {
      if (c.start[i] > to) break;
      const x = (c.start[i] - from) * scale, end = (c.end[i] - from) * scale;
      const isStrong = this.strong(c, i);
      if (end - x >= WIDE) {
        const left = Math.max(x, -2), width = Math.min(end, this.width + 2) - left;
        pen.fillStyle = isStrong ? markColor : plainColor;
        pen.fillRect(this.gutter + left, band.y, width - (width > 4 ? 1 : 0), band.height);
        if (width > 40) {
          pen.fillStyle = isStrong ? markInk : ink;
          const opcode = this.trace.kinds[c.kind[i]].opcode;
          pen.fillText(this.fitted(opcode, width - 8), this.gutter + left + 4, band.y + ROW / 2);
        }
      } else {
        addShare(busy, x, end);
        if (isStrong) addShare(strong, x, end);
      }
    }
    this.drawColumns(band, busy, plainColor);
    this.drawColumns(band, strong, markColor);
  }

  // Busy shares of pixel columns, as bars from the bottom of the band, of two pixels at least.
  drawColumns(band, shares, color) {
    this.pen.fillStyle = color;
    for (let column = 0; column < shares.length; column++) {
      if (shares[column] > 0) {
        const height = Math.max(Math.min(shares[column], 1) * band.height, 2);
        this.pen.fillRect(this.gutter + column, band.y + band.height - height, 1, height);
      }
    }
  }

  drawMemory(band) {
    const {time, size, limit, name} = band.memory, pen = this.pen;
    const share = (value) => Math.min(value / (limit * 1.05), 1);
    const top = (value) => band.y + band.height - Math.max(share(value) * band.height, 1);
    pen.fillStyle = this.color(name.toLowerCase());
    const first = firstAbove(time, this.from, 0, time.length);
    let column = -1, most = first > 0 ? size[first - 1] : 0, value = most;
    const bar = (x, width, v) => v && pen.fillRect(x, top(v), width, band.y + band.height - top(v));
    let x = this.gutter;
    for (let i = first; i <= time.length; i++) {
      const at = i < time.length ? Math.min(this.x(time[i]), this.gutter + this.width)
        : this.gutter + this.width;
      if (Math.floor(at) > Math.floor(x)) {  // the fullest moment of a column, then what lasts
        bar(Math.floor(x), 1, most);
        bar(Math.floor(x) + 1, Math.floor(at) - Math.floor(x) - 1, value);
        most = value;
        x = at;
      }
      if (i === time.length || time[i] > this.to) break;
      value = size[i];
      most = Math.max(most, value);
    }
    bar(Math.floor(x), 1, most);
    pen.strokeStyle = this.color("limit");
    pen.setLineDash([4, 4]);
    pen.beginPath();
    pen.moveTo(this.gutter, top(limit));
    pen.lineTo(this.gutter + this.width, top(limit));
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = this.color("faint");
    pen.fillText(`${limit.toLocaleString("en")} ${band.memory.unit}`, this.gutter + 4, top(limit) + 8);
  }

  // The bytes of a tensor's life as rows of its band: a tensor on fewer than 128 partitions has
  // their share of its height, so that two that lie above one another are both seen.
  rowsOf(band, i) {
    const {lives, top} = band.memory, unit = band.height / top;
    const size = lives.byte_end[i] - lives.byte[i], share = size * unit / 128;
    const y = band.y + lives.byte[i] * unit + lives.partition[i] * share;
    return [y, Math.max((lives.partition_end[i] - lives.partition[i]) * share, 1)];
  }

  drawMap(band) {
    const {lives} = band.memory, {pen, from, to, scale} = this;
    const ink = this.color("tensor-ink"), edge = this.color("band"), drawn = new Map();
    const colors = this.trace.tensors.map((_, tensor) => this.tensorColor(tensor));
    for (let i = 0; i < lives.start.length && lives.start[i] <= to; i++) {
      if (lives.end[i] < from) continue;
      const end = Math.floor((lives.end[i] - from) * scale);
      if ((lives.end[i] - lives.start[i]) * scale < WIDE) {  // one a pixel of its place will do
        const place = lives.byte[i] * 128 + lives.partition[i];
        if (drawn.get(place) === end) continue;
        drawn.set(place, end);
      }
      const left = Math.max((lives.start[i] - from) * scale, -2);
      const width = Math.max(Math.min((lives.end[i] - from) * scale, this.width + 2) - left, 1);
      const [y, height] = this.rowsOf(band, i), tensor = lives.tensor[i];
      pen.globalAlpha = this.tensor < 0 || this.tensor === tensor ? 1 : 0.25;
      pen.fillStyle = colors[tensor];
      pen.fillRect(this.gutter + left, y, width, height);
      if (width > 3 && height > 3) {
        pen.strokeStyle = edge;
        pen.strokeRect(this.gutter + left + 0.5, y + 0.5, width - 1, height - 1);
      }
      if (width > 40 && height > 11) {
        pen.fillStyle = ink;
        const x = Math.max(left, 0) + 4, room = left + width - x - 4;
        pen.fillText(this.fitted(this.trace.tensors[tensor].name, room), this.gutter + x,
          y + Math.min(height / 2, ROW / 2));
      }
    }
    pen.globalAlpha = 1;
  }

  tensorColor(tensor) {
    return `hsl(${(tensor * 137.5 + 200) % 360} ${this.color("tensor-tone")})`;
  }

  drawPath(band) {
    const {path} = this.trace, {pen, from, scale} = this, count = Math.ceil(this.width) + 1;
    const waiting = this.color("wait");
    const colors = [0, 1, 2, 3, 4, 5].map((engine) => this.color(`e${engine}`));
    const sums = colors.map(() => new Float32Array(count));
    for (let i = firstAbove(path.ended, from - 1, 0, path.ended.length);
      i < path.ended.length && path.waited[i] <= this.to; i++) {
      const x = (path.waited[i] - from) * scale, begin = (path.began[i] - from) * scale;
      const end = (path.ended[i] - from) * scale, engine = this.engineOf(path, i);
      if (begin - x >= 0.5) {
        pen.fillStyle = waiting;
        pen.fillRect(this.gutter + x, band.y + ROW / 2 - 1, begin - x, 3);
      }
      if (end - begin >= WIDE) {
        pen.fillStyle = colors[engine];
        pen.fillRect(this.gutter + begin, band.y, end - begin, band.height);
      } else {
        addShare(sums[engine], begin, end);
      }
    }
    sums.forEach((shares, engine) => this.drawColumns(band, shares, colors[engine]));
  }

  engineOf(path, step) {
    const c = this.trace.cores[path.core[step]].columns, {at} = this.trace.cores[path.core[step]];
    return this.trace.kinds[c.kind[at[path.number[step]]]].engine;
  }

  // The kept instruction, and a line from the one that it waited for.
  drawKept() {
    if (!this.kept) return;
    const [number, index] = this.kept, core = this.trace.cores[number], c = core.columns;
    const pen = this.pen, band = this.bandOf(number, index);
    const x = this.x(c.start[index]);
    pen.strokeStyle = this.color("ink");
    pen.lineWidth = 2;
    pen.strokeRect(x, band.y, Math.max(this.x(c.end[index]) - x, 2), band.height);
    if (c.cause[index] >= 0) {
      const before = core.at[c.cause[index]], from = this.bandOf(number, before);
      pen.beginPath();
      pen.moveTo(this.x(c.end[before]), from.y + from.height / 2);
      pen.lineTo(x, band.y + band.height / 2);
      pen.stroke();
    }
    pen.lineWidth = 1;
  }

  bandOf(core, index) {
    return this.bands.find((band) => band.kind === "lane" && band.core === core &&
      band.lane.first <= index && index < band.lane.end);
  }

  // What is at a point of the canvas: {core, index}, or {text} in a chart, or null.
  at(x, y) {
    const band = this.bands.find((b) => b.y <= y && y < b.y + b.height);
    if (!band || x < this.gutter) return null;
    const ticks = this.ticks(x), near = 3 / this.scale;
    if (band.kind === "memory") {
      const {time, size, limit, name, unit} = band.memory;
      const i = firstAbove(time, ticks, 0, time.length) - 1;
      const value = (i < 0 ? 0 : size[i]).toLocaleString("en");
      const ns = ticks / this.trace.ticks_per_ns;
      return {text: `${name}: ${value} of ${limit.toLocaleString("en")} ${unit}\n` +
        `at ${shownTime(ns)}`};
    }
    if (band.kind === "map") {
      const {lives} = band.memory;
      for (let i = lives.start.length - 1; i >= 0; i--) {
        const [top, height] = this.rowsOf(band, i);
        if (lives.start[i] <= ticks + near && ticks - near <= lives.end[i] && top <= y &&
          y < top + Math.max(height, 2)) {
          const tensor = lives.tensor[i];
          return {tensor, text: describeTensor(this.trace, tensor, lives, i)};
        }
      }
      return null;
    }
    if (band.kind === "path") {
      const {path} = this.trace;
      const i = Math.min(firstAbove(path.ended, ticks, 0, path.ended.length),
        path.ended.length - 1);
      if (i < 0) return null;
      return {core: path.core[i], index: this.trace.cores[path.core[i]].at[path.number[i]]};
    }
    const c = this.trace.cores[band.core].columns, {lane} = band;
    const i = firstAbove(c.end, ticks - near, lane.first, lane.end);
    return i < lane.end && c.start[i] <= ticks + near ? {core: band.core, index: i} : null;
  }
}
