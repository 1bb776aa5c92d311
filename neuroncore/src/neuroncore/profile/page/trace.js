"use strict";
// The trace that the page holds: JSON about it, and arrays that the browser inflates.

const ARRAYS = {uint8: Uint8Array, uint32: Uint32Array, int32: Int32Array};

async function readTrace() {
  const trace = JSON.parse(document.getElementById("about").textContent);
  const raw = atob(document.getElementById("arrays").textContent.trim());
  const packed = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) packed[i] = raw.charCodeAt(i);
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(inflated).arrayBuffer();
  const unpack = (columns) => {
    const found = {};
    for (const [name, {type, offset, count}] of Object.entries(columns)) {
      found[name] = new ARRAYS[type](bytes, offset, count);
    }
    return found;
  };
  for (const core of trace.cores) {
    core.columns = unpack(core.columns);
    core.at = new Uint32Array(core.columns.number.length);  // where an instruction is drawn
    core.columns.number.forEach((number, index) => { core.at[number] = index; });
    for (const memory of core.memories) {
      Object.assign(memory, unpack({time: memory.time, size: memory.size}));
      memory.lives = unpack(memory.lives);
      memory.top = memory.lives.byte_end.reduce((most, end) => Math.max(most, end), 0);
    }
  }
  trace.path = unpack(trace.path);
  return trace;
}

// The first index of [first, end) at which `values` is above `limit`; values rise.
function firstAbove(values, limit, first, end) {
  while (first < end) {
    const middle = (first + end) >> 1;
    if (values[middle] > limit) end = middle;
    else first = middle + 1;
  }
  return first;
}

// Nanoseconds as text, with as many digits as a step of `step` ns needs.
function shownTime(ns, step = 0) {
  const [unit, scale] = ns >= 1e6 ? ["ms", 1e6] : ns >= 1e3 ? ["us", 1e3] : ["ns", 1];
  const digits = step ? Math.max(0, Math.ceil(-Math.log10(step / scale) - 1e-9)) : 3;
  return `${(ns / scale).toFixed(Math.min(digits, 6))} ${unit}`;
}

// One instruction in words, a line each.
function describe(trace, coreNumber, index) {
  const core = trace.cores[coreNumber], c = core.columns;
  const kind = trace.kinds[c.kind[index]], place = trace.places[c.place[index]];
  const ns = (ticks) => ticks / trace.ticks_per_ns;
  const where = trace.cores.length > 1 ? ` of core ${coreNumber}` : "";
  const cause = c.cause[index];
  let waited = trace.waits[c.wait[index]];
  if (cause >= 0) waited += `, until instruction ${cause} (${opcodeOf(trace, core, cause)})`;
  const lines = [
    `${kind.opcode}, instruction ${c.number[index]}${where}`,
    `${place.place}  ${place.text}`,
    `from ${shownTime(ns(c.start[index]), 1)}, for ${shownTime(ns(c.end[index] - c.start[index]))}`,
    `writes ${kind.writes.join(", ") || "nothing"}`,
    `reads  ${kind.reads.join(", ") || "nothing"}`,
  ];
  if (kind.work) lines.push(kind.work);
  lines.push(`waited for ${waited}`);
  if (c.critical[index]) lines.push("on the critical path");
  return lines.join("\n");
}

// A kind of tensor in words, and the place and time of one of its lives.
function describeTensor(trace, tensor, lives = null, i = -1) {
  const {name, memory, type, place, writes, reads} = trace.tensors[tensor];
  const lines = [`${name}: ${type} in ${memory}${place && `, made at ${place}`}`];
  if (lives) {
    const shown = (ticks) => shownTime(ticks / trace.ticks_per_ns, 1);
    const size = lives.byte_end[i] - lives.byte[i];
    lines.push(`bytes ${lives.byte[i].toLocaleString("en")} to ` +
      `${(lives.byte_end[i] - 1).toLocaleString("en")} (${size.toLocaleString("en")}) of ` +
      `partitions ${lives.partition[i]} to ${lives.partition_end[i] - 1}`,
      `from ${shown(lives.start[i])} to ${shown(lives.end[i])}`);
  }
  const at = (numbers) => numbers.map((n) => `${trace.places[n].place}  ${trace.places[n].text}`);
  const list = (word, found) => found.forEach((text, n) =>
    lines.push(`${n ? " ".repeat(word.length) : word} ${text}`));
  list("written", at(writes));
  list("read   ", at(reads));
  return lines.join("\n");
}

function opcodeOf(trace, core, number) {
  const index = core.at[number];
  return `${trace.kinds[core.columns.kind[index]].opcode}, ` +
    trace.places[core.columns.place[index]].place;
}
