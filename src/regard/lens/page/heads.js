"use strict";
// Cividis, eleven of its colors: dark is 0, bright is the largest weight of the map.
const STOPS = [[0,34,78],[7,48,112],[44,61,110],[71,75,107],[94,89,108],[117,104,112],[138,119,115],[162,135,112],[188,152,106],[218,172,90],[253,231,55]];
const COLORS = new Uint32Array(256);
for (let i = 0; i < 256; i++) {
  const x = i / 25.5, k = Math.min(Math.floor(x), 9), t = x - k;
  const [r, g, b] = STOPS[k].map((c, j) => Math.round(c + t * (STOPS[k + 1][j] - c)));
  COLORS[i] = (255 << 24) | (b << 16) | (g << 8) | r;
}
const SHADES = COLORS.map((_, i) => COLORS[Math.round(Math.sqrt(i / 255) * 255)]);  // so that small weights stay visible
// One color for each kind of head, and what it means.
const KINDS = {
  self: ["#0072b2", "mostly attends to the query itself"], previous: ["#d55e00", "to the token before"], next: ["#009e73", "to the token after"],
  shift: ["#cc79a7", "to the token at one fixed offset"], first: ["#8c6d00", "to the first token"], induction: ["#7b3fb0", "to what followed the same token before"],
  "same token": ["#006d77", "to other occurrences of the same token"], separator: ["#5c6470", "to separators such as commas"], sink: ["#a33", "all queries attend to one key"],
  agreement: ["#2f7d32", "to the marked word that the query agrees with"], coreference: ["#b8860b", "to the marked word that the query refers to"],
  stride: ["#3b5bdb", "to every k-th key"], window: ["#0b8457", "to keys nearby"], uniform: ["#868e96", "to all keys about equally"], content: ["#c2255c", "sharply, at no fixed position: by content"], mixed: ["#adb5bd", "none of these"],
};
const byId = (id) => document.getElementById(id);
let data = null, rowOf = new Map();
const state = { layer: -1, head: 0, query: 0, key: 0, side: "query", sort: "layer", down: false, mode: "map", zoom: null, second: null, hooks: {} };

function bytes(layer, head, from = data) {
  const map = from.layers[layer].maps[head];
  if (!map) return null;
  if (!map.raw) map.raw = Uint8Array.from(atob(map.bytes), (c) => c.charCodeAt(0));
  return map;
}
function paint(canvas, layer, head, from = data) {
  const map = bytes(layer, head, from), [n, m] = from.layers[layer].shape;
  canvas.width = m; canvas.height = n;
  if (!map) return;
  if (!map.image) {
    map.image = new ImageData(m, n);
    const pixels = new Uint32Array(map.image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = SHADES[map.raw[i]];
  }
  canvas.getContext("2d").putImageData(map.image, 0, 0);
}
function element(tag, text, given = {}) {
  const node = Object.assign(document.createElement(tag), given);
  if (text !== undefined) node.textContent = text;  // text, never markup
  return node;
}

// A group has one tab stop: the arrow keys move inside it, and Tab leaves it.
function tabStop(home, to) {
  home.querySelectorAll('[tabindex="0"]').forEach((other) => { other.tabIndex = -1; });
  if (to) to.tabIndex = 0;
}
const GROUPS = { encoder: "Encoder", decoder: "Decoder", cross: "Decoder to encoder (cross-attention)", self: "Self-attention" };
function overview() {
  const home = byId("overview");
  home.replaceChildren();
  const maxHeads = Math.max(...data.rows.map((r) => r.head + 1));
  home.dataset.unseen = home.clientWidth ? "" : "yes";  // made while its panel was hidden, so without a width
  const room = ((home.clientWidth || 560) - 44) / maxHeads - 11;  // a head has 4 px of padding, 4 of border, 3 of gap
  home.style.setProperty("--thumb", Math.round(Math.min(Math.max(room, 36), 84)) + "px");
  let group = null;
  const order = ["encoder", "self", "decoder", "cross"];
  const sorted = data.layers.map((layer, l) => [layer, l]).sort((a, b) => order.indexOf(a[0].group) - order.indexOf(b[0].group) || a[1] - b[1]);
  sorted.forEach(([layer, l]) => {
    if (layer.group !== group) home.append(element("h3", GROUPS[group = layer.group]));
    const row = element("div", undefined, { className: "row" });
    row.dataset.layer = l;
    row.append(element("span", l, { title: "layer " + l + ": " + layer.name }));
    data.rows.filter((r) => r.layer === l).forEach((r) => {
      const button = element("button", undefined, { className: "head", type: "button", tabIndex: -1, title: r.kind + ": " + r.evidence });
      button.dataset.layer = l; button.dataset.head = r.head; button.dataset.kind = r.kind;
      button.setAttribute("aria-label", "layer " + l + ", head " + r.head + ", " + r.kind);
      const canvas = element("canvas");
      const name = element("span", r.kind);
      name.style.setProperty("--kind", (KINDS[r.kind] || KINDS.mixed)[0]);
      button.append(canvas, name);
      paint(canvas, l, r.head);
      button.addEventListener("click", () => choose(l, r.head));
      row.append(button);
    });
    home.append(row);
  });
  home.onkeydown = (event) => {
    const at = document.activeElement;
    if (!at.classList.contains("head")) return;
    const shown = [...home.querySelectorAll(".head")].filter((b) => b.offsetParent !== null);
    const here = shown.indexOf(at), l = +at.dataset.layer, h = +at.dataset.head;
    const vertical = (step) => {
      const layers = [...new Set(shown.map((b) => +b.dataset.layer))], next = layers[layers.indexOf(l) + step];
      return shown.find((b) => +b.dataset.layer === next && +b.dataset.head === h) || shown.find((b) => +b.dataset.layer === next);
    };
    const to = { ArrowRight: shown[here + 1], ArrowLeft: shown[here - 1], ArrowDown: vertical(1), ArrowUp: vertical(-1) }[event.key];
    if (to) { event.preventDefault(); tabStop(home, to); to.focus(); }
  };
}

function choose(layer, head) {
  const same = layer === state.layer;
  state.layer = layer; state.head = head;
  const { queries, keys, name, implementation } = data.layers[layer];
  if (!same || state.query >= queries.length) state.query = Math.max(queries.length - 1, 0);
  if (!same || state.key >= keys.length) state.key = 0;
  if (!same) state.zoom = null;
  const row = rowOf.get(layer + "/" + head);
  byId("detail-title").textContent = name + ", head " + head + ": " + row.kind;
  byId("evidence").textContent = "layer " + layer + "; " + row.evidence + " (" + Math.round(100 * row.confidence) + " % confidence; implementation: " + implementation + ")";
  document.querySelectorAll(".head").forEach((b) => b.setAttribute("aria-pressed", +b.dataset.layer === layer && +b.dataset.head === head));
  tabStop(byId("overview"), byId("overview").querySelector('.head[aria-pressed="true"]'));
  document.querySelectorAll("#table tbody tr").forEach((tr) => tr.classList.toggle("chosen", tr.dataset.at === layer + "/" + head));
  byId("words").hidden = byId("reading").hidden = !queries.length;  // as with keep=False
  byId("python-head").textContent = (queries.length ? "view.map(" + layer + ", " + head + ")" : "view.statistics[" + layer + "]") + "    # view = regard.look(model, inputs, tokenizer)";
  if (!same) {
    words("queries", queries, (i) => { state.query = i; state.side = "query"; mark(); });
    words("keys", keys, (j) => { state.key = j; state.side = "key"; mark(); });
  }
  show();
  if (state.hooks.chosen) state.hooks.chosen(layer, head);
}
function show() {
  byId("large").hidden = state.mode !== "map"; byId("line-box").hidden = state.mode !== "lines"; byId("compare-box").hidden = state.mode !== "compare";
  mark();
}
function words(id, tokens, pick) {
  const home = byId(id);
  home.replaceChildren(...tokens.map((token, i) => {
    const span = element("span", token === "" ? "∅" : token, { tabIndex: i ? -1 : 0 });
    span.addEventListener("mouseenter", () => pick(i));
    span.addEventListener("focus", () => pick(i));
    span.addEventListener("keydown", (event) => {
      const to = { ArrowRight: span.nextSibling, ArrowLeft: span.previousSibling }[event.key];
      if (to) { event.preventDefault(); tabStop(home, to); to.focus(); }
    });
    return span;
  }));
}
function weight(i, j) {
  const map = bytes(state.layer, state.head);
  if (!map) return 0;
  const { queries, keys, shape: [n, m] } = data.layers[state.layer];
  const y = Math.min(Math.floor(i * n / Math.max(queries.length, 1)), n - 1), x = Math.min(Math.floor(j * m / Math.max(keys.length, 1)), m - 1);
  return map.raw[y * m + x] / 255 * map.top;
}
function mark() {
  const { queries, keys } = data.layers[state.layer];
  document.querySelector('input[name="side"][value="' + state.side + '"]').checked = true;
  const from = state.side === "query";
  shade("queries", queries, (i) => from ? null : weight(i, state.key), from ? state.query : -1);
  shade("keys", keys, (j) => from ? weight(state.query, j) : null, from ? -1 : state.key);
  const weighted = from ? keys.map((_, j) => [weight(state.query, j), keys[j]]) : queries.map((_, i) => [weight(i, state.key), queries[i]]);
  weighted.sort((a, b) => b[0] - a[0]);
  const best = weighted.slice(0, 3).map(([w, t]) => t + " " + (w > 0 && w < .001 ? w.toPrecision(2) : w.toFixed(3))).join(", ");
  byId("reading").textContent = (from ? "“" + (queries[state.query] ?? "") + "” attends to " : "“" + (keys[state.key] ?? "") + "” is attended to by ") + best;
  if (state.mode === "map") draw(); else if (state.mode === "lines") lines(); else compare();
  picture();
  if (state.hooks.marked) state.hooks.marked(state);
}

// A map with its tokens: a square for each pair in the visible part, names on both axes, a color bar.
const frame = { left: 0, top: 0, width: 0, height: 0, view: null };
function visible() {
  const { queries, keys } = data.layers[state.layer];
  return state.zoom || { i: 0, j: 0, n: queries.length, m: keys.length };
}
const letters = (text) => [...text];  // by code points: a slice of a string may cut an emoji in two
function short(token, limit) { const t = letters(token === "" ? "∅" : token.replace(/\n/g, "↵")); return t.length > limit ? t.slice(0, limit - 1).join("") + "…" : t.join(""); }
const room = (tokens, each) => 14 + each * Math.max(0, ...tokens.map((t) => letters(short(t, 12)).length));
const round = (least) => { const unit = 10 ** Math.floor(Math.log10(Math.max(least, 1))); return Math.max(1, unit * [1, 2, 5, 10].find((k) => k * unit >= least)); };  // a step of 1, 2 or 5 times a power of ten
function drawMap(canvas, from, layer, head, view, most, chosen) {
  const { queries, keys, shape: [n, m] } = from.layers[layer], map = bytes(layer, head, from);
  const css = getComputedStyle(document.documentElement), ratio = window.devicePixelRatio || 1;
  const width = Math.min(canvas.parentElement.clientWidth || 600, most), bar = 46, labels = view.n <= 64 && view.m <= 64 && view.m * 8 + 140 < width;
  const left = labels ? room(queries.slice(view.i, view.i + view.n), 6.4) : 34, top = labels ? room(keys.slice(view.j, view.j + view.m), 5.2) : 22;
  const wide = Math.max(width - left - bar, 60), high = Math.min(Math.max(wide * view.n / Math.max(view.m, 1), 60), 560);
  canvas.style.height = (top + high + 6) + "px";
  canvas.width = Math.round(width * ratio); canvas.height = Math.round((top + high + 6) * ratio);
  canvas.style.width = width + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = css.getPropertyValue("--paper"); pen.fillRect(0, 0, width, top + high + 6);
  if (!map) { pen.fillStyle = css.getPropertyValue("--ink"); pen.fillText("maps were not stored for this layer", 10, 20); return { left, top, width: wide, height: high, view }; }
  const small = document.createElement("canvas");
  paint(small, layer, head, from);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, view.j * m / keys.length, view.i * n / queries.length, view.m * m / keys.length, view.n * n / queries.length, left, top, wide, high);
  const cellX = wide / view.m, cellY = high / view.n;
  pen.font = Math.max(8, Math.min(12, cellY * .8)) + "px system-ui"; pen.textBaseline = "middle";
  const step = labels ? Math.max(1, Math.ceil(9 / cellY)) : round(14 / cellY);
  pen.textAlign = "right";
  for (let i = 0; i < view.n; i += step) {
    pen.fillStyle = css.getPropertyValue(view.i + i === chosen.query ? "--mark" : "--ink");
    pen.fillText(labels ? short(queries[view.i + i], 12) : String(view.i + i), left - 5, top + (i + .5) * cellY);
  }
  pen.textAlign = "left"; pen.font = Math.max(8, Math.min(12, cellX * .8)) + "px system-ui";
  const across = labels ? Math.max(1, Math.ceil(9 / cellX)) : round(34 / cellX);
  for (let j = 0; j < view.m; j += across) {
    pen.save(); pen.translate(left + (j + .5) * cellX, top - 5);
    if (labels) pen.rotate(-Math.PI / 3.4);
    pen.fillStyle = css.getPropertyValue(view.j + j === chosen.key ? "--mark" : "--ink");
    pen.fillText(labels ? short(keys[view.j + j], 12) : String(view.j + j), 0, 0); pen.restore();
  }
  pen.strokeStyle = css.getPropertyValue("--mark"); pen.lineWidth = 1.5;
  const y = top + (chosen.query - view.i) * cellY, x = left + (chosen.key - view.j) * cellX;
  if (chosen.side === "query" && chosen.query >= view.i && chosen.query < view.i + view.n) pen.strokeRect(left, y, wide, cellY);
  if (chosen.side === "key" && chosen.key >= view.j && chosen.key < view.j + view.m) pen.strokeRect(x, top, cellX, high);
  for (let k = 0; k < 64; k++) {
    const c = COLORS[Math.round((1 - k / 63) * 255)];
    pen.fillStyle = "rgb(" + (c & 255) + " " + ((c >> 8) & 255) + " " + ((c >> 16) & 255) + ")";
    pen.fillRect(width - bar + 12, top + k * high / 64, 9, high / 64 + 1);
  }
  pen.fillStyle = css.getPropertyValue("--ink"); pen.font = "10px system-ui"; pen.textAlign = "left";
  [[1, 0], [.25, .5], [0, 1]].forEach(([share, at]) => pen.fillText((share * map.top).toFixed(2), width - bar + 23, top + 5 + at * (high - 10)));
  return { left, top, width: wide, height: high, view };
}
function draw() {
  const view = visible();
  Object.assign(frame, drawMap(byId("map"), data, state.layer, state.head, view, 620, state));
  byId("zoomed").textContent = state.zoom ? "queries " + view.i + " to " + (view.i + view.n - 1) + ", keys " + view.j + " to " + (view.j + view.m - 1) : "";
}
function zoom(factor, i = state.query, j = state.key) {
  const { queries, keys } = data.layers[state.layer], old = visible();
  const size = (x, all) => Math.min(Math.max(Math.round(x * factor), Math.min(4, all)), all);
  const n = size(old.n, queries.length), m = size(old.m, keys.length);
  const at = (x, s, all) => Math.min(Math.max(Math.round(x - s / 2), 0), all - s);
  state.zoom = n === queries.length && m === keys.length ? null : { i: at(i, n, queries.length), j: at(j, m, keys.length), n, m };
  mark();
}

// Queries on the left, keys on the right, a line for each weight: of the chosen token, or of all.
function lines() {
  const { queries, keys } = data.layers[state.layer], svg = byId("lines"), limit = 60, high = 20;
  const first = (at, all) => Math.min(Math.max(at - limit / 2, 0), Math.max(all - limit, 0));
  const i0 = first(state.query, queries.length), j0 = first(state.key, keys.length);
  const left = queries.slice(i0, i0 + limit), right = keys.slice(j0, j0 + limit), width = 520, a = 150, b = width - 150;
  svg.setAttribute("viewBox", "0 0 " + width + " " + (high * Math.max(left.length, right.length) + 8));
  const made = [], map = bytes(state.layer, state.head);
  const add = (tag, given, text) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [k, v] of Object.entries(given)) node.setAttribute(k, v); if (text !== undefined) node.textContent = text; made.push(node); return node; };
  left.forEach((_, i) => right.forEach((_, j) => {
    const chosen = state.side === "query" ? i0 + i === state.query : j0 + j === state.key, w = weight(i0 + i, j0 + j) / (map ? map.top : 1);
    if (w < (chosen ? .01 : .08)) return;
    add("line", { x1: a + 4, y1: high * (i + .6), x2: b - 4, y2: high * (j + .6), "stroke-width": chosen ? 1 + 3 * w : 1, "stroke-opacity": (chosen ? .15 + .85 * w : .3 * w).toFixed(3) });
  }));
  left.forEach((t, i) => { const node = add("text", { x: a, y: high * (i + .8), "text-anchor": "end", class: state.side === "query" && i0 + i === state.query ? "chosen" : "" }, short(t, 18)); node.addEventListener("mouseenter", () => pick(i0 + i, "query")); node.addEventListener("click", () => pick(i0 + i, "query")); });
  right.forEach((t, j) => { const node = add("text", { x: b, y: high * (j + .8), class: state.side === "key" && j0 + j === state.key ? "chosen" : "" }, short(t, 18)); node.addEventListener("mouseenter", () => pick(j0 + j, "key")); node.addEventListener("click", () => pick(j0 + j, "key")); });
  svg.replaceChildren(...made);
}
function pick(at, side) { if (state[side] === at && state.side === side) return; state[side] = at; state.side = side; mark(); }

// This head beside another head, or beside itself on a second text; how similar the maps are.
const NO_TOKEN = { side: "" };  // no token is marked
const TEXT = "text";  // the choice of the second text
function compare() {
  const text = byId("other").value === TEXT && state.second, from = text ? state.second.data : data;
  const [layer, head] = text ? [state.layer, state.head] : (byId("other").value || "0/0").split("/").map(Number);
  const rows = text ? state.second.rows : rowOf, row = rows.get(layer + "/" + head);
  for (const [id, source, l, h] of [["first-map", data, state.layer, state.head], ["other-map", from, layer, head]]) {
    const { queries, keys } = source.layers[l];
    drawMap(byId(id), source, l, h, { i: 0, j: 0, n: queries.length, m: keys.length }, 420, NO_TOKEN);
  }
  byId("first-name").textContent = (text ? "first text: " : "this head: ") + rowOf.get(state.layer + "/" + state.head).kind;
  byId("other-name").textContent = text ? "second text: " + row.kind : "layer " + layer + ", head " + head + ": " + row.kind;
  byId("changed-box").hidden = !text;
  if (text) { changes(); byId("difference").textContent = inWords(rowOf.get(layer + "/" + head), row); return; }
  const a = bytes(state.layer, state.head), b = bytes(layer, head, from);
  if (!a || !b || a.raw.length !== b.raw.length) { byId("difference").textContent = "These maps have different sizes."; return; }
  let dot = 0, x = 0, y = 0, far = 0;
  const [n] = data.layers[state.layer].shape;
  for (let i = 0; i < a.raw.length; i++) { const u = a.raw[i] * a.top / 255, v = b.raw[i] * b.top / 255; dot += u * v; x += u * u; y += v * v; far += Math.abs(u - v); }
  byId("difference").textContent = "cosine " + (dot / Math.sqrt(x * y || 1)).toFixed(3) + "; mean total variation distance of their rows " + (far / 2 / n).toFixed(3) + " (0: equal, 1: no key in common)";
}
// Statistics that mean the same for texts of any length: shares of the weight.
const SHARES = [["on_self", "on itself"], ["on_previous", "on the token before"], ["on_first", "on the first token"], ["induction", "on what followed the same token"]];
function largestChange(a, b) {
  const moved = SHARES.filter(([name]) => typeof a[name] === "number" && typeof b[name] === "number").map(([name, label]) => [Math.abs(a[name] - b[name]), label, a[name], b[name]]);
  return moved.sort((x, y) => y[0] - x[0])[0] || [0, "", 0, 0];
}
function inWords(a, b) {
  const [, label, x, y] = largestChange(a, b);
  return (a.kind === b.kind ? "The same kind on both texts" : "A " + a.kind + " head on the first text, " + b.kind + " on the second") + (label ? "; largest change: weight " + label + " " + x.toFixed(2) + " → " + y.toFixed(2) : "");
}
function changes() {
  const both = data.rows.map((a) => [a, state.second.rows.get(a.layer + "/" + a.head)]).filter(([, b]) => b).map(([a, b]) => ({ a, b, far: largestChange(a, b)[0] }));
  both.sort((x, y) => y.far - x.far);
  byId("changed").replaceChildren(...both.slice(0, 12).map(({ a, b }) => {
    const item = element("li"), button = element("button", "layer " + a.layer + ", head " + a.head, { type: "button" });
    button.addEventListener("click", () => choose(a.layer, a.head));
    item.append(button, " " + inWords(a, b));
    return item;
  }));
}
// A second text, of the studio: the same heads on other tokens.
function showSecond(given) {
  state.second = given && { data: given, rows: new Map(given.rows.map((r) => [r.layer + "/" + r.head, r])) };
  others();
  if (given) byId("other").value = TEXT;
  if (state.mode === "compare") compare();
}
function others() {
  const heads = data.rows.map((r) => element("option", "layer " + r.layer + ", head " + r.head + ": " + r.kind, { value: r.layer + "/" + r.head }));
  byId("other").replaceChildren(...(state.second ? [element("option", "the same head on the second text", { value: TEXT })] : []), ...heads);
  if (heads.length > 1 && !state.second) byId("other").selectedIndex = 1;  // not the head beside itself
}

function shade(id, tokens, value, chosen) {
  const values = tokens.map((_, i) => value(i)), top = Math.max(...values.map((v) => v ?? 0), 1e-9);
  [...byId(id).children].forEach((span, i) => {
    span.classList.toggle("chosen", i === chosen);
    span.style.setProperty("--w", values[i] === null ? 0 : (values[i] / top).toFixed(3));
    span.title = values[i] === null ? "" : values[i].toFixed(4);
  });
}

const photo = new Image();
function picture() {
  if (!data.grid) return;
  const [rows, columns] = data.grid, { queries, keys } = data.layers[state.layer], skip = data.skip;
  const fits = keys.length === rows * columns + skip;
  byId("patches").hidden = !fits;
  if (!fits) return;
  const canvas = byId("picture"), cell = Math.max(Math.floor(448 / Math.max(rows, columns)), 6), context = canvas.getContext("2d");
  canvas.width = columns * cell; canvas.height = rows * cell;
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (photo.complete && photo.naturalWidth) context.drawImage(photo, 0, 0, canvas.width, canvas.height);
  const all = keys.map((_, j) => weight(state.query, j)).slice(skip), top = Math.max(...all, 1e-9);
  all.forEach((w, p) => {
    context.fillStyle = "rgba(213,94,0," + (0.8 * w / top).toFixed(3) + ")";
    context.fillRect((p % columns) * cell, Math.floor(p / columns) * cell, cell, cell);
  });
  const at = state.query - skip;
  if (at >= 0 && queries.length === keys.length) {
    context.lineWidth = 3; context.strokeStyle = "#56b4e9";
    context.strokeRect((at % columns) * cell + 1.5, Math.floor(at / columns) * cell + 1.5, cell - 3, cell - 3);
  }
}
function patches() {
  if (!data.grid) return;
  const canvas = byId("picture"), [rows, columns] = data.grid;
  const pick = (p) => { state.query = p + data.skip; state.side = "query"; mark(); };
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect();
    const c = Math.floor((event.clientX - box.left) / box.width * columns), r = Math.floor((event.clientY - box.top) / box.height * rows);
    pick(Math.min(Math.max(r, 0), rows - 1) * columns + Math.min(Math.max(c, 0), columns - 1));
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    const to = state.query - data.skip + step;
    if (step && to >= 0 && to < rows * columns) { event.preventDefault(); pick(to); }
  });
  if (data.image) { photo.onload = picture; photo.src = data.image; }
}

function enlarged() {
  const canvas = byId("map");
  const at = (event) => {
    const box = canvas.getBoundingClientRect(), v = frame.view, limit = (x, all) => Math.min(Math.max(x, 0), all - 1);
    return { i: v.i + limit(Math.floor((event.clientY - box.top - frame.top) / frame.height * v.n), v.n), j: v.j + limit(Math.floor((event.clientX - box.left - frame.left) / frame.width * v.m), v.m), x: event.clientX, y: event.clientY };
  };
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { ...at(event), zoom: state.zoom && { ...state.zoom } }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!frame.view) return;
    const here = at(event);
    if (drag && drag.zoom && Math.hypot(here.x - drag.x, here.y - drag.y) > 4) {  // a drag moves the visible part
      const { queries, keys } = data.layers[state.layer], move = (start, by, s, all) => Math.min(Math.max(Math.round(start - by), 0), all - s);
      state.zoom = { ...drag.zoom, i: move(drag.zoom.i, (here.y - drag.y) / frame.height * drag.zoom.n, drag.zoom.n, queries.length), j: move(drag.zoom.j, (here.x - drag.x) / frame.width * drag.zoom.m, drag.zoom.m, keys.length) };
      mark();
      return;
    }
    state.query = here.i; state.key = here.j;
    mark();
    const { queries, keys } = data.layers[state.layer];
    byId("reading").textContent = "“" + queries[here.i] + "” (" + here.i + ") attends to “" + keys[here.j] + "” (" + here.j + ") with weight " + weight(here.i, here.j).toFixed(4);
  });
  canvas.addEventListener("wheel", (event) => { if (!event.ctrlKey && !state.zoom && event.deltaY > 0) return; event.preventDefault(); const here = at(event); zoom(event.deltaY < 0 ? .7 : 1.4, here.i, here.j); }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const { queries, keys } = data.layers[state.layer];
    if (event.key === "+" || event.key === "=") { zoom(.6); return; }
    if (event.key === "-") { zoom(1.6); return; }
    const [dy, dx] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
    if (!dy && !dx) return;
    event.preventDefault();
    state.query = Math.min(Math.max(state.query + dy, 0), queries.length - 1);
    state.key = Math.min(Math.max(state.key + dx, 0), keys.length - 1);
    state.side = dx ? "key" : "query";
    mark();
  });
  byId("zoom-in").addEventListener("click", () => zoom(.6));
  byId("zoom-out").addEventListener("click", () => zoom(1.6));
  byId("zoom-all").addEventListener("click", () => { state.zoom = null; mark(); });
  const tabs = [...byId("modes").children];
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => { state.mode = tab.dataset.mode; tabs.forEach((t) => { t.setAttribute("aria-selected", t === tab); t.tabIndex = t === tab ? 0 : -1; }); show(); });
    tab.addEventListener("keydown", (event) => { const to = tabs[(index + ({ ArrowRight: 1, ArrowLeft: tabs.length - 1 }[event.key] ?? NaN)) % tabs.length]; if (to) { event.preventDefault(); to.focus(); to.click(); } });
  });
  byId("other").addEventListener("change", compare);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", mark);
  addEventListener("resize", () => { if (data) { if (state.mode === "map") draw(); else if (state.mode === "compare") compare(); } });
}

function table() {
  document.querySelector("#table thead").replaceChildren();
  const head = element("tr"), columns = [["layer", "layer"], ["head", "head"], ["kind", "kind"], ...data.columns];
  columns.forEach(([field, label]) => {
    const th = element("th"), button = element("button", label, { type: "button" });
    th.dataset.field = field;
    button.addEventListener("click", () => {
      state.down = state.sort === field ? !state.down : field !== "kind" && field !== "layer" && field !== "head";
      state.sort = field;
      fill(columns);
    });
    th.append(button);
    head.append(th);
  });
  document.querySelector("#table thead").append(head);
  fill(columns);
}
function fill(columns) {
  const sign = state.down ? -1 : 1, field = state.sort;
  const order = [...data.rows].sort((a, b) => {
    const x = a[field], y = b[field];
    if (x === null || x === undefined) return 1;
    if (y === null || y === undefined) return -1;
    return sign * (typeof x === "string" ? x.localeCompare(y) : x - y) || a.layer - b.layer || a.head - b.head;
  });
  document.querySelectorAll("#table th").forEach((th) => {
    if (th.dataset.field === field) th.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
  });
  const kind = byId("kind").value, only = +byId("layer").value;
  document.querySelector("#table tbody").replaceChildren(...order.filter((r) => (!kind || r.kind === kind) && (only < 0 || r.layer === only)).map((r) => {
    const tr = element("tr");
    tr.dataset.at = r.layer + "/" + r.head;
    tr.classList.toggle("chosen", r.layer === state.layer && r.head === state.head);
    columns.forEach(([name]) => tr.append(element("td", r[name] === null || r[name] === undefined ? "–" : typeof r[name] === "number" && !Number.isInteger(r[name]) ? r[name].toPrecision(3) : r[name])));
    tr.addEventListener("click", () => choose(r.layer, r.head));
    return tr;
  }));
  return columns;
}

function filtered() {
  const only = +byId("layer").value, kind = byId("kind").value;
  byId("layer-name").textContent = only < 0 ? "all" : only + " " + data.layers[only].name;
  document.querySelectorAll(".row").forEach((row) => { row.hidden = only >= 0 && +row.dataset.layer !== only; });
  document.querySelectorAll(".head").forEach((b) => { b.hidden = kind !== "" && b.dataset.kind !== kind; });
  const shown = [...document.querySelectorAll(".head")].filter((b) => !b.hidden && !b.parentElement.hidden);
  tabStop(byId("overview"), shown.find((b) => b.getAttribute("aria-pressed") === "true") || shown[0]);
  fill([["layer", "layer"], ["head", "head"], ["kind", "kind"], ...data.columns]);
}
function controls() {
  const slider = byId("layer"), kinds = byId("kind");
  slider.max = data.layers.length - 1; slider.value = -1;
  kinds.replaceChildren(element("option", "all", { value: "" }), ...data.kinds.map((k) => element("option", k, { value: k })));
  byId("legend").replaceChildren(...data.kinds.flatMap((k) => {
    const name = element("dt"), dot = element("i");
    dot.style.setProperty("--kind", (KINDS[k] || KINDS.mixed)[0]);
    name.append(dot, k);
    return [name, element("dd", (KINDS[k] || KINDS.mixed)[1])];
  }));
  others();
  byId("missed").hidden = !data.missed.length; byId("missed").textContent = "Not recorded: " + data.missed.join("; ");
  byId("note").textContent = "Layers and heads are numbered from 0, as in Python. Colors go from 0 to the largest weight of each map, by the square root of the weight." + (data.pooled ? " Long maps are shown as means over small blocks." : "");
}

// The entry point: shows these heads; called again, it replaces them. hooks: functions that the studio adds.
let ready = false;
function reveal() {  // the chosen head in the list of all, which scrolls by itself
  const home = byId("overview"), button = home.querySelector('.head[aria-pressed="true"]');
  if (button) { home.scrollTop = button.offsetTop - home.offsetTop - home.clientHeight / 2; home.scrollLeft = button.offsetLeft - home.offsetLeft - home.clientWidth / 2; }
}
function showHeads(given, hooks = {}) {
  data = given; rowOf = new Map(data.rows.map((r) => [r.layer + "/" + r.head, r]));
  state.hooks = hooks; state.second = null;
  const [layer, head] = rowOf.has(state.layer + "/" + state.head) && ready ? [state.layer, state.head] : data.start;
  state.layer = -1; state.zoom = null;
  overview(); table(); controls();
  if (!ready) {
    enlarged(); patches();
    byId("layer").addEventListener("input", filtered);
    byId("kind").addEventListener("change", filtered);
    document.querySelectorAll('input[name="side"]').forEach((radio) => radio.addEventListener("change", () => { state.side = radio.value; mark(); }));
  }
  ready = true;
  choose(layer, head);
  reveal();
}
