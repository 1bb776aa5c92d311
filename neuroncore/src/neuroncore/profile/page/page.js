// The page around the canvas: facts, tables, mouse and keys.

const ENGINES = ["TensorE", "VectorE", "ScalarE", "GpSimdE", "SyncE", "DMA"];
const element = (id) => document.getElementById(id);

function make(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

function fillTable(table, titles, rows) {
  const classes = titles.map((title) => title.startsWith(">") ? "number" : "");
  const head = table.createTHead().insertRow();
  titles.forEach((title, i) => head.append(make("th", title.replace(/^>/, ""), classes[i])));
  const body = table.createTBody();
  return rows.map((cells) => {
    const row = body.insertRow();
    cells.forEach((cell, i) => {
      row.append(make("td", cell, classes[i]));
      row.lastChild.dataset.title = titles[i].replace(/^>/, "");
    });
    return row;
  });
}

function showFacts(trace) {
  for (const [name, text] of trace.facts) {
    const fact = make("div");
    fact.append(make("dt", name), make("dd", text));
    element("facts").append(fact);
  }
  element("help").textContent = trace.what_would_help;
  const used = new Set(trace.kinds.map((kind) => kind.engine));
  const entry = (name, color) => {
    const key = make("span"), box = make("i");
    box.style.background = `var(--${color})`;
    key.append(box, name);
    element("legend").append(key);
  };
  ENGINES.forEach((name, i) => used.has(i) && entry(name, `e${i}`));
  entry("critical path, or the marked line", "mark");
  entry("latency", "wait");
}

function showWhatIf(trace) {
  const us = (ms) => (ms * 1e3).toLocaleString("en", {maximumFractionDigits: 2});
  fillTable(element("what_if"), ["resource", "", ">us (modelled)", ">times as fast", "what to do"],
    trace.what_if.map(([name, freed, ms, speedup, advice]) =>
      [name, freed, us(ms), speedup === null ? "" : speedup.toFixed(2), advice]));
}

function showLines(trace, timeline) {
  const share = (ms) => trace.time_ns ? `${(ms / trace.time_ns * 1e8).toFixed(1)} %` : "";
  const us = (ms) => (ms * 1e3).toLocaleString("en", {maximumFractionDigits: 2});
  const titles = [">us (modelled)", ">share", ">latency", ">steps", "waited for", "opcode", "line",
    ""];
  const lines = trace.critical_lines;
  const rows = fillTable(element("lines"), titles, lines.map((line) => [
    us(line.time_ms), share(line.time_ms), us(line.latency_ms), line.steps.toLocaleString("en"),
    line.wait, line.opcode, line.place, line.text]));
  rows.forEach((row, i) => {
    row.lastChild.className = "code";
    const place = trace.places.findIndex(
      (p) => p.place === lines[i].place && p.text === lines[i].text);
    row.addEventListener("click", () => {
      timeline.marked = timeline.marked === place ? -1 : place;
      rows.forEach((r, j) => r.classList.toggle("chosen", timeline.marked >= 0 &&
        lines[j].place === lines[i].place && lines[j].text === lines[i].text));
      timeline.draw();
    });
  });
}

function showTensors(trace, timeline) {
  const number = (value) => value.toLocaleString("en");
  const at = (numbers) => numbers.map((n) => trace.places[n].place).join(", ");
  const order = [...trace.tensors.keys()].sort((a, b) => {
    const [one, other] = [trace.tensors[a], trace.tensors[b]];
    return one.memory.localeCompare(other.memory) || other.bytes - one.bytes;
  });
  const titles = ["tensor", "in", "type", ">bytes (on chip: of each partition)", ">times", "made at",
    "written at", "read at"];
  const rows = fillTable(element("tensors"), titles, order.map((n) => {
    const {name, memory, type, bytes, count, place, writes, reads} = trace.tensors[n];
    return [name, memory, type, number(bytes), number(count), place, at(writes), at(reads)];
  }));
  rows.forEach((row, i) => {
    row.dataset.tensor = order[i];
    row.addEventListener("click", () =>
      keep(timeline, timeline.tensor === order[i] ? null : {tensor: order[i]}));
  });
}

// Keep an instruction, with a way back along what it waited for, or a tensor: its description stays.
function keep(timeline, found) {
  const {trace} = timeline, shown = element("kept"), isTensor = found?.tensor !== undefined;
  timeline.kept = found && !isTensor ? [found.core, found.index] : null;
  timeline.tensor = isTensor ? found.tensor : -1;
  for (const row of element("tensors").querySelectorAll("tbody tr")) {
    row.classList.toggle("chosen", Number(row.dataset.tensor) === timeline.tensor);
  }
  shown.hidden = !found;
  shown.replaceChildren();
  if (isTensor) {
    shown.append(found.text || describeTensor(trace, found.tensor));
  } else if (found) {
    const core = trace.cores[found.core], cause = core.columns.cause[found.index];
    shown.append(describe(trace, found.core, found.index) + "\n");
    if (cause >= 0) {
      const back = make("button", `go to instruction ${cause}, which it waited for`);
      back.addEventListener("click", () => {
        const index = core.at[cause], {start, end} = core.columns;
        if (start[index] < timeline.from || end[index] > timeline.to) {
          const half = (timeline.to - timeline.from) / 2;
          timeline.show(end[index] - half, end[index] + half);
        }
        keep(timeline, {core: found.core, index});
      });
      shown.append(back);
    }
  }
  timeline.draw();
}

function showTip(timeline, x, y) {
  const tip = element("tip"), found = timeline.at(x, y);
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = found.text || describe(timeline.trace, found.core, found.index);
  const {clientWidth} = timeline.canvas;
  tip.style.left = `${Math.max(0, Math.min(x + 14, clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18}px`;
}

function listen(timeline) {
  const {canvas} = timeline, fingers = new Map();
  let dragged = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey) timeline.move(Math.sign(event.deltaY) * 0.1);
    else timeline.zoom(1.2 ** Math.sign(event.deltaY), event.offsetX);
  }, {passive: false});
  const grab = (x, moved) => { dragged = {x, from: timeline.from, to: timeline.to, moved}; };
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.offsetX);
    grab(event.offsetX, fingers.size > 1);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (fingers.size === 2 && fingers.has(event.pointerId)) {
      const [a, b] = fingers.values();
      fingers.set(event.pointerId, event.offsetX);
      const [c, d] = fingers.values(), before = Math.abs(a - b), now = Math.abs(c - d);
      if (before > 8 && now > 8) timeline.zoom(before / now, (c + d) / 2);
      element("tip").hidden = true;
      return;
    }
    if (dragged && Math.abs(event.offsetX - dragged.x) > 3) dragged.moved = true;
    if (dragged?.moved) {
      const by = (dragged.x - event.offsetX) / timeline.scale;
      timeline.show(dragged.from + by, dragged.to + by);
    }
    showTip(timeline, event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragged && !dragged.moved) {
      const found = timeline.at(event.offsetX, event.offsetY);
      keep(timeline, found && (found.tensor !== undefined || !found.text) ? found : null);
      showTip(timeline, event.offsetX, event.offsetY);
    }
  });
  const release = (event) => {  // a finger that stays goes on dragging
    fingers.delete(event.pointerId);
    if (fingers.size) grab([...fingers.values()][0], true);
    else dragged = null;
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") element("tip").hidden = true;
  });
  const actions = {
    in: ["w", () => timeline.zoom(0.7)], out: ["s", () => timeline.zoom(1 / 0.7)],
    left: ["a", () => timeline.move(-0.25)], right: ["d", () => timeline.move(0.25)],
    all: ["0", () => timeline.show(0, timeline.length)],
  };
  for (const [id, [key, act]] of Object.entries(actions)) {
    element(id).addEventListener("click", act);
    document.addEventListener("keydown", (event) => {
      if (event.key === key && !event.ctrlKey && !event.metaKey && !event.altKey) act();
    });
  }
}

// As the browser prefers, until the switch is used.
function chooseTheme(redraw) {
  const dark = matchMedia("(prefers-color-scheme: dark)"), {dataset} = document.documentElement;
  const choose = (theme) => {
    dataset.theme = theme;
    element("theme").textContent = theme === "dark" ? "light page" : "dark page";
    redraw();
  };
  const follow = () => choose(dark.matches ? "dark" : "light");
  dark.addEventListener("change", follow);
  element("theme").addEventListener("click", () => {
    dark.removeEventListener("change", follow);
    choose(dataset.theme === "dark" ? "light" : "dark");
  });
  follow();
}

let timeline;
chooseTheme(() => timeline?.draw());
readTrace().then((trace) => {
  timeline = new Timeline(element("canvas"), trace);
  showFacts(trace);
  showWhatIf(trace);
  showLines(trace, timeline);
  showTensors(trace, timeline);
  listen(timeline);
  timeline.draw();
  document.documentElement.dataset.ready = "yes";
}).catch((error) => {
  element("help").textContent = `No timeline: ${error.message}. It needs a browser from 2023 or ` +
    "later; the profile as text is below.";
  document.documentElement.dataset.ready = "failed";
});
