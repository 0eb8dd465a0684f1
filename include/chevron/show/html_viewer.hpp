#pragma once

/// \file
/// The viewer of a report's page as text. Written by `examples/playground/embed.py --write` from the files beside
/// it: change those.
// long: a script, not to be read here

namespace chevron::show::detail {

/// How a report looks.
inline constexpr char const* viewer_style = R"js(:root { color-scheme: light; --page: #f5f6f8; --sheet: #fff; --ink: #1f2630; --soft: #5b6472; --line: #dfe3e9; --hover: #edf0f4;
--accent: #5b2bc0; --alarm: #c0182b; }
:root[data-theme=dark] { color-scheme: dark; --page: #0e1217; --sheet: #151a21; --ink: #e6e9ee; --soft: #9aa4b2;
--line: #2b323c;
--hover: #222932; --accent: #b79bff; --alarm: #ff6b76; }
body { margin: 0 auto; padding: 24px; max-width: 1180px; background: var(--page); color: var(--ink);
font: 15px/1.5 system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 2px; } h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 0 0 14px; color: var(--soft); }
.sheet { background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.timeline { position: relative; }
.timeline canvas { display: block; }
.timeline .over { position: absolute; left: 0; top: 0; touch-action: pan-y; cursor: default; }
.card { position: absolute; z-index: 9; max-width: 460px; padding: 8px 12px; border: 1px solid var(--line); border-radius: 8px;
background: var(--sheet); box-shadow: 0 4px 16px rgb(0 0 0 / 18%); font-size: 13px; line-height: 1.45; pointer-events: none; }
.card span { color: var(--soft); }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: 6px; margin-bottom: 10px; }
.bar .gap { flex: 1; }
button, select, .button { font: inherit; font-size: 13px; color: var(--ink); background: var(--sheet);
border: 1px solid var(--line);
border-radius: 6px; padding: 3px 10px; cursor: pointer; }
button:hover, .button:hover { background: var(--hover); }
button[aria-pressed=true] { border-color: var(--accent); color: var(--accent); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0 62px; font-size: 12.5px; color: var(--soft); }
.legend i { display: inline-block; width: 13px; height: 12px; margin-right: 2px; vertical-align: -1px; }
.legend i.thin { height: 5px; vertical-align: 2px; }
.legend i:last-of-type { margin-right: 6px; }
.hint { font-size: 12.5px; color: var(--soft); margin: 8px 0 0 62px; }
table { border-collapse: collapse; background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; }
th, td { padding: 5px 16px; text-align: right; font-variant-numeric: tabular-nums; border-top: 1px solid var(--hover); }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child { text-align: left; }
tr:first-child th { border-top: 0; } th.group { text-align: center; border-left: 1px solid var(--hover); }
summary { cursor: pointer; color: var(--soft); margin-top: 20px; }
pre { background: var(--sheet); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; white-space: pre-wrap;
font-size: 13px; }
.scroll { overflow-x: auto; }
@media print { body { background: #fff; padding: 0; } .sheet, table, pre { border: 0; } .bar, .hint { display: none; } }
)js";

/// `chevron` in a page: reads models, draws them, says what is under the pointer.
inline constexpr char const* viewer_script = R"js("use strict";
const chevron = (() => {
const letters = [
"F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B", "REDUCE_GRAD", "OPTIMIZER_STEP"
];
const meanings = [
"forward", "backward", "input gradient", "weight gradient", "send an output", "receive an input", "send a gradient",
"receive a gradient", "wait for a send", "wait for a send", "sum of gradients", "optimizer"
];
const FORWARD = 0, WEIGHT = 3, COMPUTE = 4, SUM = 10;
const palettes = {
usual: [
["#9cc0f2", "#6b9be0", "#3f74c8", "#2858a6"], ["#f8c182", "#eb9f4d", "#cf7a22", "#b06012"],
["#83d3cd", "#4db5ae", "#26918a", "#16716b"], ["#b4d996", "#8dbf68", "#629a3c", "#467a26"]
],
safe: [
["#6db3e2", "#3d93d0", "#0072b2", "#00517f"], ["#f0a071", "#e57f42", "#d55e00", "#a34800"],
["#fbf3a0", "#f5e96c", "#eede33", "#d6c40f"], ["#b9bdc4", "#999ea7", "#777d87", "#595f69"]
],
};
const themes = {
light: {
sheet: "#ffffff",
ink: "#1f2630",
soft: "#5b6472",
grid: "#dfe3e9",
idle: "#eaedf2",
memory: "#a9b6c8",
alarm: "#c0182b",
accent: "#5b2bc0",
other: ["#8b94a3", "#c3c9d3", "#8b94a3", "#c3c9d3", "#a8b0bd", "#a8b0bd", "#5b6472", "#2b313b"]
},
dark: {
sheet: "#151a21",
ink: "#e6e9ee",
soft: "#9aa4b2",
grid: "#2b323c",
idle: "#222932",
memory: "#5a6a80",
alarm: "#ff6b76",
accent: "#b79bff",
other: ["#76808f", "#4d5664", "#76808f", "#4d5664", "#5f6876", "#5f6876", "#a3acb9", "#d5dae1"]
},
};
const font = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
const text_on = (hex) => {
const [r, g, b] = rgb(hex);
return 0.3 * r + 0.59 * g + 0.11 * b > 130 ? "#10192a" : "#ffffff";
};
const shade = (chunk, chunks) => chunks > 1 ? Math.min(3, Math.floor(chunk * 3 / (chunks - 1))) : 0;
const number = (value, digits = 6) => {
if (Math.abs(value) < 1e-9) return "0";
return String(Number(value.toPrecision(digits)));
};
const digit_of = new Uint8Array(128);
[..."ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"].forEach((c, i) => {
digit_of[c.charCodeAt(0)] = i;
});
class Numbers {
constructor(text) {
this.text = text;
this.at = 0;
}
get done() { return this.at >= this.text.length; }
next() {
let value = 0;
for (let unit = 1;; unit *= 32) {
const digit = digit_of[this.text.charCodeAt(this.at++)];
value += (digit & 31) * unit;
if (digit < 32) return value;
}
}
next_signed() {
const value = this.next();
return value % 2 === 0 ? value / 2 : -(value - 1) / 2 - 1;
}
}
function halves_of(p, i) { return p.half[i] === 1 ? [i, i + 1] : p.half[i] === 2 ? [i - 1, i] : [i]; }
function decode_picture(p, tick) {
const most = p.lists.reduce((sum, [, list]) => sum + list.length, 0);
const out = {
...p,
row: new Int32Array(most),
kind: new Uint8Array(most),
half: new Uint8Array(most),
stage: new Int32Array(most),
chunk: new Int32Array(most),
step: new Int32Array(most),
micro_batch: new Int32Array(most),
start: new Float64Array(most),
end: new Float64Array(most),
begin: [0],
makespan: 0
};
let at = 0;
p.lists.forEach(([works, list], r) => {
const kinds = [];
for (const n = new Numbers(works); !n.done;)
kinds.push(
{kind: n.next(), half: n.next(), stage: n.next(), chunk: n.next(), step: n.next(), micro_batch: -1, length: 0});
let begin = 0, end = 0;
for (const n = new Numbers(list); !n.done; ++at) {
const token = n.next();
const work = kinds[token >> 1];
const differs = token % 2 === 1;
work.micro_batch += 1 + (differs ? n.next_signed() : 0);
begin = (work.half === 2 ? begin : end) + (differs ? n.next_signed() : 0);
work.length += differs ? n.next_signed() : 0;
end = begin + work.length;
out.row[at] = r;
out.kind[at] = work.kind;
out.half[at] = work.half;
out.stage[at] = work.stage;
out.chunk[at] = work.chunk;
out.step[at] = work.step;
out.micro_batch[at] = work.micro_batch;
out.start[at] = begin * tick;
out.end[at] = end * tick;
if (work.kind < COMPUTE && out.end[at] > out.makespan) out.makespan = out.end[at];
}
out.begin.push(at);
});
const count = out.count = at;
delete out.lists;
out.critical = [];
let before = 0;
for (const n = new Numbers(p.path); !n.done;) out.critical.push(before += n.next_signed());
out.is_critical = new Uint8Array(count);
for (const i of out.critical) out.is_critical[i] = 1;
index(out);
return out;
}
function index(p) {
const by_start = (a, b) => p.start[a] - p.start[b] || a - b;
p.lanes = [];
p.has = [true, false, false];
p.kinds = new Set();
for (let r = 0; r < p.rows; ++r) {
const lanes = [[], [], []];
for (let i = p.begin[r]; i < p.begin[r + 1]; ++i) {
const lane = p.kind[i] < COMPUTE ? 0 : p.kind[i] < SUM ? 1 : 2;
lanes[lane].push(i);
p.has[lane] = true;
p.kinds.add(p.kind[i]);
}
p.lanes.push(lanes.map((lane) => {
const sorted = lane.every((i, k) => k === 0 || p.start[lane[k - 1]] <= p.start[i]);
return Int32Array.from(sorted ? lane : lane.sort(by_start));
}));
}
const ranks = Math.max(1, p.ranks);
p.replicas = Math.max(1, Math.ceil(p.rows / ranks));
let steps = 1, stages = Math.max(1, p.stages), micro_batches = Math.max(1, p.micro_batches);
for (let i = 0; i < p.count; ++i) {
steps = Math.max(steps, p.step[i] + 1);
stages = Math.max(stages, p.stage[i] + 1);
micro_batches = Math.max(micro_batches, p.micro_batch[i] + 1);
}
let first = Infinity;
for (let i = 0; i < p.count; ++i) first = Math.min(first, p.step[i]);
if (!(first < Infinity)) first = 0;
const size = stages * micro_batches, runs = (steps - first) * p.replicas;
const where = new Int32Array(3 * size * runs).fill(-1);
const cell = (type, i, stage) => {
if (stage < 0 || stage >= stages) return -1;
const run = (p.step[i] - first) * p.replicas + Math.floor(p.row[i] / ranks);
return (run * 3 + type) * size + stage * micro_batches + p.micro_batch[i];
};
const type_of = (kind) => kind === FORWARD ? 0 : kind === WEIGHT ? 2 : 1;
for (let i = 0; i < p.count; ++i)
if (p.kind[i] < COMPUTE) where[cell(type_of(p.kind[i]), i, p.stage[i])] = i;
const find = (type, i, stage) => {
const at = cell(type, i, stage);
return at < 0 ? -1 : where[at];
};
const there = (list) => list.filter((i) => i >= 0);
p.needs = (i) => there(halves_of(p, i).flatMap((h) => {
const s = p.stage[h];
if (p.kind[h] >= COMPUTE) return [];
if (p.kind[h] === FORWARD) return [find(0, h, s - 1)];
if (p.kind[h] === WEIGHT) return [find(1, h, s)];
return [find(0, h, s), find(1, h, s + 1)];
}));
p.serves = (i) => there(halves_of(p, i).flatMap((h) => {
const s = p.stage[h];
if (p.kind[h] >= COMPUTE || p.kind[h] === WEIGHT) return [];
if (p.kind[h] === FORWARD) return [find(0, h, s + 1), find(1, h, s)];
return [find(1, h, s - 1), find(2, h, s)];
}));
p.flight = [];
p.peak = [];
for (let r = 0; r < p.rows; ++r) {
const times = new Float64Array(p.begin[r + 1] - p.begin[r]), levels = new Int32Array(times.length);
let used = 0, now = 0, peak = 0;
for (let i = p.begin[r]; i < p.begin[r + 1] && !p.forward_only; ++i) {
const kind = p.kind[i];
if (kind !== FORWARD && kind !== 1 && kind !== WEIGHT) continue;
now += kind === FORWARD ? 1 : -1;
times[used] = kind === FORWARD ? p.start[i] : p.end[i];
levels[used++] = now;
if (now > peak) peak = now;
}
p.flight.push({times: times.subarray(0, used), levels: levels.subarray(0, used)});
p.peak.push(peak);
}
}
const decode = (model) => model.pictures.map((p) => decode_picture(p, model.tick));
const spelled = (p, i) => {
const one = (h) =>
p.kind[h] === 11 ? letters[11] : p.stage[h] + letters[p.kind[h]] + (p.kind[h] === SUM ? "" : p.micro_batch[h]);
if (p.half[i] === 1) return one(i) + " with " + one(i + 1);
if (p.half[i] === 2) return one(i - 1) + " with " + one(i);
return one(i);
};
const rank_name = (p, r) => "rank " + (r + p.first_rank);
const timed = (p, value) => number(value, p.unit ? 5 : 6) + (p.unit ? " " + p.unit : "");
const arrives = (p, i, r) => {
if (p.row[i] === r || p.kind[i] === WEIGHT) return p.end[i];
const boundary = p.kind[i] === FORWARD ? p.stage[i] : p.stage[i] - 1;
const each = p.message.length > p.stages - 1 ? p.micro_batches : 1;  // microbatches of unequal length
return p.end[i] + (p.message[boundary * each + (each > 1 ? p.micro_batch[i] : 0)] || 0);
};
const first_after = (p, lane, time) => {
let low = 0, high = lane.length;
while (low < high) {
const middle = (low + high) >> 1;
if (p.end[lane[middle]] > time)
high = middle;
else
low = middle + 1;
}
return low;
};
function about_box(p, i) {
const r = p.row[i], lines = [];
const halves = halves_of(p, i);
const what =
halves
.map(
(h) => p.kind[h] >= SUM ? meanings[p.kind[h]] :
meanings[p.kind[h]] + " of stage " + p.stage[h] + ", microbatch " + p.micro_batch[h])
.join("; with it, ");
lines.push(["", what + " on " + rank_name(p, r) + (p.steps > 1 ? ", step " + p.step[i] : "")]);
lines.push(["when", timed(p, p.start[i]) + " to " + timed(p, p.end[i]) + ", takes " + timed(p, p.end[i] - p.start[i])]);
const needs = p.needs(i);
const place = (n) => p.row[n] === r ? "here" : "on " + rank_name(p, p.row[n]);
if (needs.length > 0)
lines.push([
"needs",
needs
.map(
(n) => spelled(p, n) + " " + place(n) + ", ended at " + timed(p, p.end[n]) +
(arrives(p, n, r) > p.end[n] ? ", there at " + timed(p, arrives(p, n, r)) : ""))
.join("; ")
]);
const serves = p.serves(i);
if (serves.length > 0)
lines.push(
["lets go on", serves.map((n) => spelled(p, n) + " " + place(n) + ", starts at " + timed(p, p.start[n])).join("; ")]);
if (halves.some((h) => p.is_critical[h])) lines.push(["critical", "the makespan hangs on it"]);
return {title: spelled(p, i), lines, needs, serves, boxes: halves};
}
function about_idle(p, r, time) {
const lane = p.lanes[r][0];
const at = first_after(p, lane, time);
const next = at < lane.length ? lane[at] : -1;
let from = 0;
if (at > 0) from = p.end[lane[at - 1]];
const to = next >= 0 ? p.start[next] : p.makespan;
const lines = [["when", timed(p, from) + " to " + timed(p, to) + ", lasts " + timed(p, to - from)]];
const out = {title: rank_name(p, r) + " is idle", lines, needs: [], serves: [], boxes: [], gap: [r, from, to]};
if (next < 0) {
let last = -1;
for (let i = 0; i < p.count; ++i)
if (p.kind[i] < COMPUTE && (last < 0 || p.end[i] > p.end[last])) last = i;
lines.push([
"why",
p.stopped             ? "this rank or those that it needs wait for ever: a law is broken" :
lane.length === 0 ? "it has nothing to do" :
"it has done all its work"
]);
if (last >= 0 && !p.stopped)
lines.push([
"the step ends", "with " + spelled(p, last) + " on " + rank_name(p, p.row[last]) + " at " + timed(p, p.end[last])
]);
if (last >= 0 && !p.stopped) out.needs = [last];
return out;
}
let waiter = next, begins = from;
for (let depth = 0; depth < 4; ++depth) {
let cause = -1;
for (const n of p.needs(waiter)) {
if (p.row[n] !== p.row[waiter] && (cause < 0 || arrives(p, n, p.row[waiter]) > arrives(p, cause, p.row[waiter])))
cause = n;
}
const there = cause < 0 ? 0 : arrives(p, cause, p.row[waiter]);
if (cause < 0 || there <= begins + 1e-9 * p.makespan) {
if (depth === 0)
lines.push([
"why", "nothing that " + spelled(p, next) + " needs came later: its rank was kept by something else, as by messages"
]);
break;
}
const words = spelled(p, cause) + " of " + rank_name(p, p.row[cause]) + ", which ends at " + timed(p, p.end[cause]) +
(there > p.end[cause] ? " and is there at " + timed(p, there) : "");
lines.push(depth === 0 ? ["waits for", words + "; then " + spelled(p, next) + " begins"] : ["that waited for", words]);
out.needs.push(cause);
const others = p.lanes[p.row[cause]][0];
const place = others.indexOf(cause);
begins = place > 0 ? p.end[others[place - 1]] : 0;
if (depth === 0) {
const meanwhile = [];
for (let k = first_after(p, others, from); k < others.length && p.start[others[k]] < p.end[cause]; ++k) {
if (p.half[others[k]] !== 2) meanwhile.push(spelled(p, others[k]));
}
if (meanwhile.length > 1)
lines.push([
"meanwhile",
rank_name(p, p.row[cause]) + " runs " +
(meanwhile.length > 5 ? meanwhile.slice(0, 4).join(", ") + " and " + (meanwhile.length - 4) + " more" :
meanwhile.join(", "))
]);
}
if (p.start[cause] <= begins + 1e-9 * p.makespan) break;
waiter = cause;
}
out.boxes = [];
out.next = next;
return out;
}
function pixel_rows(p, t0, t1, width, fills, idle) {
const image = new ImageData(width, Math.max(1, p.rows));
const per = width / (t1 - t0);
const colours = fills.map((list) => list.map(rgb));
const ground = rgb(idle);
const sum = new Float32Array(4 * width);
for (let r = 0; r < p.rows; ++r) {
sum.fill(0);
const lane = p.lanes[r][0];
for (let k = first_after(p, lane, t0); k < lane.length; ++k) {
const i = lane[k];
if (p.start[i] >= t1) break;
const [red, green, blue] = colours[p.kind[i]][shade(p.chunk[i], p.chunks)];
const weight = p.half[i] ? 0.5 : 1;
const x0 = Math.max(0, (p.start[i] - t0) * per), x1 = Math.min(width, (p.end[i] - t0) * per);
for (let x = Math.floor(x0); x < x1; ++x) {
const part = (Math.min(x + 1, x1) - Math.max(x, x0)) * weight;
sum[4 * x] += part * red;
sum[4 * x + 1] += part * green;
sum[4 * x + 2] += part * blue;
sum[4 * x + 3] += part;
}
}
const stop = Math.ceil((p.makespan - t0) * per);
for (let x = 0; x < Math.min(width, stop); ++x) {
const rest = Math.max(0, 1 - sum[4 * x + 3]);
const to = 4 * (r * width + x);
for (let c = 0; c < 3; ++c) image.data[to + c] = sum[4 * x + c] + rest * ground[c];
image.data[to + 3] = 255;
}
}
const canvas = document.createElement("canvas");
canvas.width = width;
canvas.height = Math.max(1, p.rows);
canvas.getContext("2d").putImageData(image, 0, 0);
return canvas;
}
const axis_step = (length, wanted) => {
const rough = length / Math.max(1, wanted);
const power = Math.pow(10, Math.floor(Math.log10(rough)));
for (const factor of [1, 2, 5])
if (factor * power >= rough * (1 - 1e-9)) return factor * power;
return 10 * power;
};
class Timeline {
constructor(host, options = {}) {
this.options = {theme: "light", palette: "usual", critical: false, memory: true, edit: false, ...options};
this.host = host;
host.classList.add("timeline");
host.setAttribute("role", "img");
this.base = host.appendChild(document.createElement("canvas"));
this.over = host.appendChild(document.createElement("canvas"));
this.over.className = "over";
this.card = host.appendChild(document.createElement("div"));
this.card.className = "card";
this.card.hidden = true;
this.pictures = [];
this.view = [0, 1];
this.listen();
new ResizeObserver(() => this.draw_soon()).observe(host);
}
show(pictures, keep_view = false) {
const whole = this.is_whole();
this.pictures = pictures;
this.length = Math.max(0, ...pictures.map((p) => Math.max(p.makespan, p.bound || 0, ...last_ends(p))));
if (!(this.length > 0)) this.length = 1;
if (!keep_view || whole) this.view = [0, this.length];
this.view[1] = Math.min(this.view[1], this.length);
if (!(this.view[1] > this.view[0])) this.view = [0, this.length];
this.told = null;
this.card.hidden = true;
const first = pictures[0];
if (first)
this.host.setAttribute(
"aria-label",
"Timeline of " + first.schedule + ": " + first.rows + " rows, makespan " + timed(first, first.makespan));
this.draw_soon();
}
is_whole() { return !(this.length > 0) || (this.view[0] <= 0 && this.view[1] >= this.length * (1 - 1e-9)); }
set(options) {
Object.assign(this.options, options);
this.draw_soon();
}
fit() { this.look_at(0, this.length); }
look_at(from, to) {
const least = this.length / 1e5, wide = Math.max(least, Math.min(this.length, to - from));
const start = Math.max(0, Math.min(this.length - wide, from));
this.view = [start, start + wide];
this.draw_soon();
}
zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
this.look_at(at - (at - this.view[0]) / factor, at + (this.view[1] - at) / factor);
}
pan(share) {
const by = share * (this.view[1] - this.view[0]);
const width = this.view[1] - this.view[0];
const start = Math.max(0, Math.min(this.length - width, this.view[0] + by));
this.look_at(start, start + width);
}
draw_soon() {
if (this.pending) return;
this.pending = requestAnimationFrame(() => {
this.pending = 0;
this.draw();
});
}
layout() {
const width = this.host.clientWidth || 900;
const most = Math.max(1, ...this.pictures.map((p) => p.rows));
const row = most <= 8 ? 26 : most <= 16 ? 22 : most <= 32 ? 14 : 8;
const strip = 5, gap = row > 20 ? 8 : row > 10 ? 5 : 2;
const memory = this.options.memory ? (row > 20 ? 12 : row > 10 ? 7 : 3) : 0;
const several = this.pictures.length > 1;
const bounded = this.pictures.some((p) => p.bound > 0);
let y = 22 + (bounded ? 16 : 0);
const places = this.pictures.map((p) => {
if (several) y += 24;
const lanes = [0, row + 1.5, row + 1.5 + (p.has[1] ? strip + 1.5 : 0)];
const pitch = row + (p.has[1] ? strip + 1.5 : 0) + (p.has[2] ? strip + 1.5 : 0) + (memory ? memory + 2 : 0) + gap;
const top = y;
y += p.rows * pitch + 6;
return {p, top, bottom: y - 8, pitch, row, strip, memory, lanes, memory_at: pitch - memory - gap};
});
this.at = {width, left: 62, right: width - 14, height: y + 18, places, several, bounded};
return this.at;
}
x_of(time) { return this.at.left + (time - this.view[0]) * (this.at.right - this.at.left) / (this.view[1] - this.view[0]); }
time_of(x) { return this.view[0] + (x - this.at.left) * (this.view[1] - this.view[0]) / (this.at.right - this.at.left); }
ground() { return themes[this.options.theme] || themes.light; }
fills() { return palettes[this.options.palette] || palettes.usual; }
prepare(canvas) {
const ratio = window.devicePixelRatio || 1;
const width = Math.round(this.at.width * ratio), height = Math.round(this.at.height * ratio);
if (canvas.width !== width || canvas.height !== height) {
canvas.width = width;
canvas.height = height;
canvas.style.width = this.at.width + "px";
canvas.style.height = this.at.height + "px";
}
const c = canvas.getContext("2d");
c.setTransform(ratio, 0, 0, ratio, 0, 0);
c.clearRect(0, 0, this.at.width, this.at.height);
return c;
}
draw() {
const at = this.layout(), theme = this.ground();
const c = this.prepare(this.base);
c.font = "12px " + font;
c.textBaseline = "middle";
const [t0, t1] = this.view;
const step = axis_step(t1 - t0, (at.right - at.left) / 75);
c.textAlign = "center";
const unit = this.pictures[0] && this.pictures[0].unit ? " " + this.pictures[0].unit : "";
for (let k = Math.ceil(t0 / step - 1e-9); k * step <= t1 * (1 + 1e-9); ++k) {
const x = this.x_of(k * step);
c.fillStyle = theme.soft;
c.fillText(number(k * step) + (k === 0 ? unit : ""), x, 10);
c.fillText(number(k * step) + (k === 0 ? unit : ""), x, at.height - 9);
c.fillStyle = theme.grid;
for (const place of at.places) c.fillRect(Math.round(x) - 0.5, place.top - 3, 1, place.bottom - place.top + 5);
}
for (const place of at.places) this.draw_picture(c, place, theme);
this.draw_over();
}
draw_picture(c, place, theme) {
const {p, top, pitch, row} = place, at = this.at, [t0, t1] = this.view, fills = this.fills();
const left = at.left, right = at.right, per = (right - left) / (t1 - t0);
if (at.several) {
c.textAlign = "left";
c.fillStyle = theme.ink;
c.font = "600 13px " + font;
c.fillText(p.title, 4, top - 15);
const words = c.measureText(p.title).width;
c.font = "12px " + font;
c.fillStyle = theme.soft;
c.fillText(
(p.rows ? "makespan " + timed(p, p.makespan) : "") + (p.note ? ", " + p.note : ""), Math.max(left, words + 16),
top - 15);
}
c.save();
c.beginPath();
c.rect(left, top - 2, right - left + 1, place.bottom - top + 4);
c.clip();
const end = Math.min(right, this.x_of(p.makespan));
const computations = p.lanes.reduce((sum, lanes) => sum + lanes[0].length, 0);
const average = computations > 0 ? p.makespan * p.rows / computations * per : 100;
const ratio = window.devicePixelRatio || 1;
c.fillStyle = theme.idle;
for (let r = 0; r < p.rows; ++r) c.fillRect(left, top + r * pitch, Math.max(0, end - left), row);
if (average < 2.5) {
const lines = pixel_rows(p, t0, t1, Math.max(1, Math.round((right - left) * ratio)), fills, theme.idle);
c.imageSmoothingEnabled = false;
for (let r = 0; r < p.rows; ++r) c.drawImage(lines, 0, r, lines.width, 1, left, top + r * pitch, right - left, row);
} else {
this.draw_boxes(c, place, fills);
}
for (const lane of [1, 2]) {
if (!p.has[lane]) continue;
for (let r = 0; r < p.rows; ++r) {
const list = p.lanes[r][lane];
for (const i of list) {
if (p.end[i] < t0 || p.start[i] > t1) continue;
c.fillStyle = theme.other[p.kind[i] - COMPUTE];
const x0 = this.x_of(p.start[i]), x1 = this.x_of(p.end[i]);
c.fillRect(
x0, top + r * pitch + place.lanes[lane], Math.max(0.4, x1 - x0 - Math.min(1, 0.15 * (x1 - x0))), place.strip);
}
}
}
if (place.memory) this.draw_memory(c, place, theme);
if (p.steps > 1) this.draw_steps(c, place, theme);
if (this.options.critical && p.critical.length > 0) {
c.strokeStyle = theme.alarm;
c.lineWidth = 2;
c.lineJoin = "round";
c.beginPath();
p.critical.forEach((i, k) => {
const y = top + p.row[i] * pitch + row - 1;
if (k === 0)
c.moveTo(this.x_of(p.start[i]), y);
else
c.lineTo(this.x_of(p.start[i]), y);
c.lineTo(this.x_of(p.end[i]), y);
});
c.stroke();
}
const [row_at, position] = this.options.mark || [-1, -1];
if (row_at >= 0 && row_at < p.rows && p === this.pictures[0]) {
const i = p.begin[row_at] + Math.max(0, position), last = p.lanes[row_at][0].length - 1;
c.strokeStyle = c.fillStyle = theme.alarm;
c.lineWidth = 3;
if (position >= 0 && position <= last) {
c.strokeRect(
this.x_of(p.start[i]), top + row_at * pitch, Math.max(2, this.x_of(p.end[i]) - this.x_of(p.start[i])), row);
} else {
c.fillRect(this.x_of(last >= 0 ? p.end[p.lanes[row_at][0][last]] : 0), top + row_at * pitch - 2, 4, row + 4);
}
}
if (p.bound > 0) this.draw_mark(c, p.bound, top - 2, place.bottom + 2, theme.accent);
if (at.several) this.draw_mark(c, p.makespan, top - 2, place.bottom + 2, theme.ink);
c.restore();
c.textAlign = "left";
c.fillStyle = theme.soft;
c.font = (row > 10 ? 12 : 9) + "px " + font;
const every = pitch >= 11 ? 1 : 2;
for (let r = 0; r < p.rows; r += every) c.fillText(rank_name(p, r), 4, top + r * pitch + row / 2 + 0.5);
c.font = "12px " + font;
if (p.bound > 0 && p === this.pictures[0]) {
const x = this.x_of(p.bound);
if (x >= left && x <= right + 1) {
c.textAlign = x - left > 200 ? "right" : "left";
c.fillStyle = theme.accent;
c.fillText("lower bound " + timed(p, p.bound), x + (x - left > 200 ? -4 : 4), 26);
}
}
}
draw_mark(c, time, y0, y1, colour) {
c.strokeStyle = colour;
c.lineWidth = 1;
c.setLineDash([4, 3]);
c.beginPath();
c.moveTo(Math.round(this.x_of(time)) + 0.5, y0);
c.lineTo(Math.round(this.x_of(time)) + 0.5, y1);
c.stroke();
c.setLineDash([]);
}
draw_boxes(c, place, fills) {
const {p, top, pitch, row} = place, [t0, t1] = this.view;
const inks = fills.map((list) => list.map(text_on));
c.textAlign = "center";
let size = 0;
for (let r = 0; r < p.rows; ++r) {
const lane = p.lanes[r][0];
for (let k = Math.max(0, first_after(p, lane, t0) - 1); k < lane.length; ++k) {
const i = lane[k];
if (p.start[i] > t1) break;
const x0 = this.x_of(p.start[i]), x1 = this.x_of(p.end[i]);
const width = x1 - x0 - Math.min(1, 0.15 * (x1 - x0));
const height = p.half[i] ? row / 2 : row;
const y = top + r * pitch + (p.half[i] === 2 ? height : 0);
const level = shade(p.chunk[i], p.chunks);
c.fillStyle = fills[p.kind[i]][level];
if (width > 6 && row > 10 && !p.half[i]) {
c.beginPath();
c.roundRect(x0, y, width, height, 2);
c.fill();
} else {
c.fillRect(x0, y, width, height);
}
const words = String(p.micro_batch[i]);
const wanted = p.half[i] ? 9.5 : row > 10 ? 11 : 8;
if (wanted * 0.58 * words.length + 3 <= width && height >= 9) {
if (wanted !== size) c.font = (size = wanted) + "px " + font;
c.fillStyle = inks[p.kind[i]][level];
const from = Math.max(x0, this.at.left), to = Math.min(x0 + width, this.at.right);
if (to - from > wanted) c.fillText(words, (from + to) / 2, y + height / 2 + 0.5);
}
}
}
}
draw_memory(c, place, theme) {
const {p, top, pitch, memory} = place, left = this.at.left, wide = Math.round(this.at.right - left);
const most = Math.max(1, p.limit || 0, ...this.pictures.flatMap((q) => q.peak));
const usual = new Path2D(), full = new Path2D();
for (let r = 0; r < p.rows; ++r) {
const {times, levels} = p.flight[r];
const base = top + r * pitch + place.memory_at + memory;
const stop = Math.min(wide, Math.ceil(this.x_of(p.makespan) - left));
let k = 0, held = 0, run = -1, run_from = 0;
const close = (x) => {
if (run > 0)
(p.limit > 0 && run >= p.limit ? full : usual)
.rect(left + run_from, base - memory * run / most, x - run_from, memory * run / most);
};
for (let x = 0; x < stop; ++x) {
const until = this.time_of(left + x + 1);
let top_level = held;
while (k < times.length && times[k] < until) {
held = levels[k++];
top_level = Math.max(top_level, held);
}
if (x === 0) top_level = held;
if (top_level !== run) {
close(x);
run = top_level;
run_from = x;
}
}
close(Math.max(0, stop));
}
c.fillStyle = theme.memory;
c.fill(usual);
c.fillStyle = theme.alarm;
c.fill(full);
}
draw_steps(c, place, theme) {
const {p, top, pitch, row} = place;
c.fillStyle = theme.ink;
for (let r = 0; r < p.rows; ++r) {
let now = -1;
for (const i of p.lanes[r][0]) {
if (p.step[i] <= now) continue;
if (now >= 0) c.fillRect(this.x_of(p.start[i]) - 1.5, top + r * pitch - 2, 2, row + 4);
now = p.step[i];
}
}
}
find(x, y) {
if (!this.at || x < this.at.left || x > this.at.right) return null;
for (const place of this.at.places) {
const r = Math.floor((y - place.top) / place.pitch);
if (r < 0 || r >= place.p.rows) continue;
const time = this.time_of(x), inside = y - place.top - r * place.pitch, p = place.p;
const in_memory = place.memory > 0 && inside >= place.memory_at;
let lane = 0;
for (const l of [1, 2])
if (p.has[l] && inside >= place.lanes[l] && !in_memory) lane = l;
let box = -1;
if (lane === 0) {
const k = first_after(p, p.lanes[r][0], time);
const list = p.lanes[r][0];
if (k < list.length && p.start[list[k]] <= time) box = list[k];
if (box >= 0 && p.half[box] === 1 && inside > place.row / 2) box += 1;
} else {
for (const i of p.lanes[r][lane])
if (p.start[i] <= time && p.end[i] >= time) box = i;
}
return {place, p, row: r, time, box: in_memory ? -1 : box, lane, in_memory};
}
return null;
}
about(hit) {
if (!hit) return null;
const p = hit.p;
if (hit.in_memory) {
const {times, levels} = p.flight[hit.row];
let held = 0;
for (let k = 0; k < times.length && times[k] <= hit.time; ++k) held = levels[k];
const chunks = (n) => n + (n === 1 ? " chunk" : " chunks");
const lines = [["now", chunks(held) + " at " + timed(p, hit.time)], ["peak", chunks(p.peak[hit.row])]];
if (p.limit > 0) lines.push(["limit", chunks(p.limit)]);
return {title: rank_name(p, hit.row) + ": in flight", lines, needs: [], serves: [], boxes: []};
}
if (hit.box >= 0) return about_box(p, hit.box);
if (hit.lane > 0 || hit.time > p.makespan || hit.time < 0) return null;
return about_idle(p, hit.row, hit.time);
}
hover(x, y) {
const hit = this.find(x, y);
const about = this.about(hit);
this.told = about && {...about, place: hit.place};
this.draw_over();
this.card.hidden = !about;
if (!about) return;
this.card.textContent = "";
const title = this.card.appendChild(document.createElement("b"));
title.textContent = about.title;
for (const [label, words] of about.lines) {
const line = this.card.appendChild(document.createElement("div"));
if (label) {
const name = line.appendChild(document.createElement("span"));
name.textContent = label + " ";
}
line.appendChild(document.createTextNode(words));
}
const wide = this.card.offsetWidth, high = this.card.offsetHeight;
const box = this.host.getBoundingClientRect();
const below = box.top + y + 18 + high < window.innerHeight;
this.card.style.left = Math.max(0, Math.min(x + 14, this.at.width - wide - 4)) + "px";
this.card.style.top = (below ? y + 18 : y - high - 12) + "px";
}
outline(c, place, i, colour, width, dash = []) {
const p = place.p;
const lane = p.kind[i] < COMPUTE ? 0 : p.kind[i] < SUM ? 1 : 2;
const x0 = this.x_of(p.start[i]), x1 = this.x_of(p.end[i]);
const y = place.top + p.row[i] * place.pitch + place.lanes[lane];
c.strokeStyle = colour;
c.lineWidth = width;
c.setLineDash(dash);
c.strokeRect(x0, y, Math.max(1.5, x1 - x0), lane === 0 ? place.row : place.strip);
c.setLineDash([]);
}
draw_over() {
if (!this.at) return;
const c = this.prepare(this.over), theme = this.ground(), told = this.told;
const whole = this.is_whole();
if (!whole) {
const wide = this.at.right - this.at.left;
c.fillStyle = theme.grid;
c.fillRect(this.at.left, 0, wide, 3);
c.fillStyle = theme.soft;
c.fillRect(
this.at.left + wide * this.view[0] / this.length, 0,
Math.max(3, wide * (this.view[1] - this.view[0]) / this.length), 3);
}
c.save();
c.beginPath();
c.rect(this.at.left - 1, 4, this.at.right - this.at.left + 2, this.at.height);
c.clip();
if (told) {
const {place} = told, p = place.p;
const middle = (i, time) => [this.x_of(time), place.top + p.row[i] * place.pitch + place.row / 2];
const here = told.boxes[0] !== undefined ? told.boxes[0] : told.next;
for (const [list, forward] of [[told.needs, false], [told.serves, true]]) {
for (const n of list) {
this.outline(c, place, n, theme.accent, 2, forward ? [3, 2] : []);
if (here === undefined || p.row[n] === p.row[here]) continue;
const a = forward ? middle(here, p.end[here]) : middle(n, p.end[n]);
const b = forward ? middle(n, p.start[n]) : middle(here, p.start[here]);
if (told.gap && n !== told.needs[0]) continue;
c.strokeStyle = theme.accent;
c.lineWidth = 1.5;
c.beginPath();
c.moveTo(...a);
c.lineTo(...b);
c.stroke();
}
}
for (const i of told.boxes) this.outline(c, place, i, theme.ink, 2);
if (told.gap) {
const [r, from, to] = told.gap;
c.strokeStyle = theme.ink;
c.lineWidth = 1.5;
c.strokeRect(this.x_of(from), place.top + r * place.pitch, this.x_of(to) - this.x_of(from), place.row);
}
}
if (this.dragged) {
const {place, box, slot_x, x, row} = this.dragged;
const p = place.p, y = place.top + row * place.pitch;
const halves = halves_of(p, box), tall = place.row / halves.length;
halves.forEach((i, k) => {
const wide = Math.max(4, this.x_of(p.end[i]) - this.x_of(p.start[i])), top = y - 4 + k * tall;
this.outline(c, place, i, theme.accent, 2, [3, 2]);
c.globalAlpha = 0.9;
c.fillStyle = this.fills()[p.kind[i]][shade(p.chunk[i], p.chunks)];
c.fillRect(x - wide / 2, top, wide, tall);
c.globalAlpha = 1;
c.fillStyle = text_on(c.fillStyle);
c.font = (halves.length === 2 ? "9.5px " : "11px ") + font;
c.textAlign = "center";
c.textBaseline = "middle";
c.fillText(String(p.micro_batch[i]), x, top + tall / 2);
});
c.fillStyle = theme.accent;
c.fillRect(slot_x - 1.5, y - 3, 3, place.row + 6);
}
c.restore();
}
slot(place, row, time, box) {
const p = place.p;
const list = [...p.lanes[row][0]].filter((i) => !halves_of(p, box).includes(i));
let to = 0;
while (to < list.length && (p.start[list[to]] + p.end[list[to]]) / 2 < time) ++to;
const edge = to < list.length ? p.start[list[to]] : list.length > 0 ? p.end[list[list.length - 1]] : 0;
return {to, slot_x: this.x_of(edge)};
}
listen() {
const place = (e) => {
const box = this.host.getBoundingClientRect();
return [e.clientX - box.left, e.clientY - box.top];
};
this.over.addEventListener("pointerdown", (e) => {
if (e.button !== 0) return;
const [x, y] = place(e);
const hit = this.find(x, y);
try {
this.over.setPointerCapture(e.pointerId);
} catch { /* a pointer of a script */
}
this.held = {x, view: [...this.view], moved: false, hit};
if (this.options.edit && hit && hit.box >= 0 && hit.p.kind[hit.box] < COMPUTE)
this.held.box = halves_of(hit.p, hit.box)[0];  // a fused pair moves as one
});
this.over.addEventListener("pointermove", (e) => {
const [x, y] = place(e);
if (!this.held) return this.hover(x, y);
if (Math.abs(x - this.held.x) > 3) this.held.moved = true;
if (!this.held.moved) return;
this.card.hidden = true;
this.told = null;
if (this.held.box !== undefined) {
const {hit, box} = this.held;
this.dragged = {place: hit.place, box, row: hit.row, x, ...this.slot(hit.place, hit.row, this.time_of(x), box)};
this.over.style.cursor = "grabbing";
return this.draw_over();
}
const by = (this.held.x - x) * (this.held.view[1] - this.held.view[0]) / (this.at.right - this.at.left);
const width = this.held.view[1] - this.held.view[0];
const start = Math.max(0, Math.min(this.length - width, this.held.view[0] + by));
this.over.style.cursor = "grabbing";
this.look_at(start, start + width);
});
const let_go = () => {
const held = this.held, dragged = this.dragged;
this.held = this.dragged = null;
this.over.style.cursor = "";
if (held && dragged && this.options.moved) {
const from = [...dragged.place.p.lanes[dragged.row][0]].indexOf(dragged.box);
if (from !== dragged.to) this.options.moved(dragged.row, from, dragged.to);
}
this.draw_over();
};
this.over.addEventListener("pointerup", let_go);
this.over.addEventListener("pointercancel", let_go);
this.over.addEventListener("pointerleave", () => {
if (this.held) return;
this.told = null;
this.card.hidden = true;
this.draw_over();
});
this.over.addEventListener("dblclick", (e) => this.zoom(2, this.time_of(place(e)[0])));
this.over.addEventListener("wheel", (e) => {
if (e.ctrlKey || e.metaKey) {
e.preventDefault();
this.zoom(Math.exp(-e.deltaY * 0.004), this.time_of(place(e)[0]));
} else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) {
e.preventDefault();
this.pan((e.deltaX || e.deltaY) / (this.at.right - this.at.left));
}
}, {passive: false});
}
key(e) {
if (e.ctrlKey || e.metaKey || e.altKey) return false;
const does = {
"+": () => this.zoom(1.5),
"=": () => this.zoom(1.5),
"-": () => this.zoom(1 / 1.5),
"0": () => this.fit(),
"ArrowLeft": () => this.pan(-0.2),
"ArrowRight": () => this.pan(0.2),
"c": () => this.set({critical: !this.options.critical}),
"m": () => this.set({memory: !this.options.memory}),
"p": () => this.set({palette: this.options.palette === "usual" ? "safe" : "usual"}),
}[e.key];
if (!does) return false;
does();
return true;
}
}
function last_ends(p) {
let last = 0;
for (let i = 0; i < p.count; ++i) last = Math.max(last, p.end[i]);
return [last];
}
function legend(element, pictures, options) {
const theme = themes[options.theme] || themes.light, fills = palettes[options.palette] || palettes.usual;
element.textContent = "";
element.className = "legend";
const kinds = new Set(pictures.flatMap((p) => [...p.kinds]));
const chunks = Math.max(1, ...pictures.map((p) => p.chunks));
const add = (colours, words, thin) => {
const entry = element.appendChild(document.createElement("span"));
for (const colour of colours) {
const patch = entry.appendChild(document.createElement("i"));
patch.style.background = colour;
if (thin) patch.className = "thin";
}
entry.appendChild(document.createTextNode(words));
};
for (let k = 0; k < COMPUTE; ++k)
if (kinds.has(k)) add(chunks > 1 ? [fills[k][0], fills[k][3]] : [fills[k][0]], letters[k] + " " + meanings[k]);
const groups = [["send", 4, 6], ["receive", 5, 7], ["wait for a send", 8, 9], ["sum of gradients", 10], ["optimizer", 11]];
for (const [words, ...of] of groups)
if (of.some((k) => kinds.has(k))) add([theme.other[of[0] - COMPUTE]], words, true);
add([theme.idle], "idle" + (chunks > 1 ? "; darker: later chunk" : ""));
if (options.memory) {
add([theme.memory], "chunks in flight", true);
if (pictures.some((p) => p.limit > 0)) add([theme.alarm], "at the limit", true);
}
if (options.critical) add([theme.alarm], "critical path", true);
if (pictures.some((p) => p.bound > 0)) add([theme.accent], "lower bound", true);
}
const actions_text = (p) =>
p.lanes
.map(
(lanes, r) => rank_name(p, r) + ": " +
[...lanes[0]]
.filter((i) => p.half[i] !== 2)
.map((i) => p.half[i] === 1 ? "(" + spelled(p, i).replace(" with ", ";") + ")OVERLAP_F_B" : spelled(p, i))
.join(" "))
.join("\n");
return {decode, Timeline, legend, actions_text, pixel_rows, palettes, themes, number, spelled, about_box, about_idle};
})();
)js";

/// Ties a report's buttons to the viewer.
inline constexpr char const* report_script = R"js((() => {
"use strict";
const pictures = chevron.decode(JSON.parse(document.getElementById("model").textContent));
const by_id = (id) => document.getElementById(id);
const prefers_dark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = prefers_dark.matches ? "dark" : "light";
const timeline = new chevron.Timeline(by_id("timeline"), {theme});
const refresh = () => {
document.documentElement.dataset.theme = theme;
timeline.set({theme});
for (const name of ["critical", "memory"]) by_id(name).setAttribute("aria-pressed", String(timeline.options[name]));
by_id("palette").setAttribute("aria-pressed", String(timeline.options.palette === "safe"));
by_id("theme").setAttribute("aria-pressed", String(theme === "dark"));
chevron.legend(by_id("legend"), pictures, timeline.options);
};
by_id("critical").hidden = !pictures.some((p) => p.critical.length > 0);
const does = {
fit: () => timeline.fit(),
closer: () => timeline.zoom(1.5),
farther: () => timeline.zoom(1 / 1.5),
critical: () => timeline.set({critical: !timeline.options.critical}),
memory: () => timeline.set({memory: !timeline.options.memory}),
palette: () => timeline.set({palette: timeline.options.palette === "safe" ? "usual" : "safe"}),
theme: () => {
theme = theme === "dark" ? "light" : "dark";
},
};
for (const [id, act] of Object.entries(does))
by_id(id).addEventListener("click", () => {
act();
refresh();
});
prefers_dark.addEventListener("change", (e) => {
theme = e.matches ? "dark" : "light";
refresh();
});
document.addEventListener("keydown", (e) => {
if (e.target.closest("input, textarea, select")) return;
if (e.key === "t")
does.theme();
else if (!timeline.key(e))
return;
e.preventDefault();
refresh();
});
by_id("actions").addEventListener("toggle", (e) => {
const list = e.target.querySelector("pre");
if (e.target.open && list.textContent === "") list.textContent = chevron.actions_text(pictures[0]);
});
timeline.show(pictures);
refresh();
window.report = {pictures, timeline};
})();
)js";

}  // namespace chevron::show::detail
