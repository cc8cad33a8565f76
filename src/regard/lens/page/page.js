"use strict";
// Cividis, eleven of its colors: dark is 0, bright is the largest weight of the map.
const STOPS = [[0,34,78],[7,48,112],[44,61,110],[71,75,107],[94,89,108],[117,104,112],[138,119,115],[162,135,112],[188,152,106],[218,172,90],[253,231,55]];
const COLORS = new Uint32Array(256);
for (let i = 0; i < 256; i++) {
  const x = i / 25.5, k = Math.min(Math.floor(x), 9), t = x - k;
  const [r, g, b] = STOPS[k].map((c, j) => Math.round(c + t * (STOPS[k + 1][j] - c)));
  COLORS[i] = (255 << 24) | (b << 16) | (g << 8) | r;
}
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const state = { layer: -1, head: 0, query: 0, key: 0, side: "query", sort: "layer", down: false };
const rowOf = new Map(data.rows.map((r) => [r.layer + "/" + r.head, r]));

function bytes(layer, head) {
  const map = data.layers[layer].maps[head];
  if (!map) return null;
  if (!map.raw) map.raw = Uint8Array.from(atob(map.bytes), (c) => c.charCodeAt(0));
  return map;
}
function paint(canvas, layer, head) {
  const map = bytes(layer, head), [n, m] = data.layers[layer].shape;
  canvas.width = m; canvas.height = n;
  if (!map) return;
  const context = canvas.getContext("2d"), image = context.createImageData(m, n);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < pixels.length; i++) pixels[i] = COLORS[Math.round(Math.sqrt(map.raw[i] / 255) * 255)];  // so that small weights stay visible
  context.putImageData(image, 0, 0);
}
function element(tag, text, given = {}) {
  const node = Object.assign(document.createElement(tag), given);
  if (text !== undefined) node.textContent = text;  // text, never markup
  return node;
}

function overview() {
  const home = byId("overview");
  const maxHeads = Math.max(...data.rows.map((r) => r.head + 1));
  home.style.setProperty("--thumb", (maxHeads > 8 ? 40 : 52) + "px");
  data.layers.forEach((layer, l) => {
    const row = element("div", undefined, { className: "row" });
    row.dataset.layer = l;
    row.append(element("span", l + " " + (layer.role === "cross" ? "cross" : "self"), { title: layer.name }));
    data.rows.filter((r) => r.layer === l).forEach((r) => {
      const button = element("button", undefined, { className: "head", type: "button", title: r.kind + ": " + r.evidence });
      button.dataset.layer = l; button.dataset.head = r.head; button.dataset.kind = r.kind;
      button.setAttribute("aria-label", "layer " + l + ", head " + r.head + ", " + r.kind);
      const canvas = element("canvas");
      button.append(canvas, element("span", r.kind));
      paint(canvas, l, r.head);
      button.addEventListener("click", () => choose(l, r.head));
      row.append(button);
    });
    home.append(row);
  });
  home.addEventListener("keydown", (event) => {
    const at = document.activeElement;
    if (!at.classList.contains("head")) return;
    const shown = [...home.querySelectorAll(".head")].filter((b) => b.offsetParent !== null);
    const here = shown.indexOf(at), l = +at.dataset.layer, h = +at.dataset.head;
    const vertical = (step) => {
      const layers = [...new Set(shown.map((b) => +b.dataset.layer))], next = layers[layers.indexOf(l) + step];
      return shown.find((b) => +b.dataset.layer === next && +b.dataset.head === h) || shown.find((b) => +b.dataset.layer === next);
    };
    const to = { ArrowRight: shown[here + 1], ArrowLeft: shown[here - 1], ArrowDown: vertical(1), ArrowUp: vertical(-1) }[event.key];
    if (to) { event.preventDefault(); to.focus(); }
  });
}

function choose(layer, head) {
  const same = layer === state.layer;
  state.layer = layer; state.head = head;
  const { queries, keys, name, implementation } = data.layers[layer];
  if (!same || state.query >= queries.length) state.query = Math.max(queries.length - 1, 0);
  if (!same || state.key >= keys.length) state.key = 0;
  const row = rowOf.get(layer + "/" + head);
  byId("detail-title").textContent = name + ", head " + head + ": " + row.kind;
  byId("evidence").textContent = row.evidence + " (" + Math.round(100 * row.confidence) + " % confidence; implementation: " + implementation + ")";
  document.querySelectorAll(".head").forEach((b) => b.setAttribute("aria-pressed", +b.dataset.layer === layer && +b.dataset.head === head));
  document.querySelectorAll("tbody tr").forEach((tr) => tr.classList.toggle("chosen", tr.dataset.at === layer + "/" + head));
  paint(byId("map"), layer, head);
  const tall = data.layers[layer].shape;
  byId("map").style.aspectRatio = tall[1] + " / " + tall[0];
  words("queries", queries, (i) => { state.query = i; state.side = "query"; mark(); });
  words("keys", keys, (j) => { state.key = j; state.side = "key"; mark(); });
  mark();
}
function words(id, tokens, pick) {
  const home = byId(id);
  home.replaceChildren(...tokens.map((token, i) => {
    const span = element("span", token === "" ? "∅" : token, { tabIndex: 0 });
    span.addEventListener("mouseenter", () => pick(i));
    span.addEventListener("focus", () => pick(i));
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
  const best = weighted.slice(0, 3).map(([w, t]) => t + " " + w.toFixed(3)).join(", ");
  byId("reading").textContent = (from ? "“" + (queries[state.query] ?? "") + "” attends to " : "“" + (keys[state.key] ?? "") + "” is attended to by ") + best;
  picture();
}
function shade(id, tokens, value, chosen) {
  const values = tokens.map((_, i) => value(i)), top = Math.max(...values.map((v) => v ?? 0), 1e-9);
  [...byId(id).children].forEach((span, i) => {
    span.classList.toggle("chosen", i === chosen);
    span.style.background = values[i] === null ? "" : "rgba(230,159,0," + (values[i] / top * 0.85).toFixed(3) + ")";
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
  const point = (event) => {
    const box = canvas.getBoundingClientRect(), { queries, keys } = data.layers[state.layer];
    state.query = Math.min(Math.max(Math.floor((event.clientY - box.top) / box.height * queries.length), 0), queries.length - 1);
    state.key = Math.min(Math.max(Math.floor((event.clientX - box.left) / box.width * keys.length), 0), keys.length - 1);
    mark();
  };
  canvas.addEventListener("mousemove", point);
  canvas.addEventListener("keydown", (event) => {
    const { queries, keys } = data.layers[state.layer];
    const [dy, dx] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
    if (!dy && !dx) return;
    event.preventDefault();
    state.query = Math.min(Math.max(state.query + dy, 0), queries.length - 1);
    state.key = Math.min(Math.max(state.key + dx, 0), keys.length - 1);
    if (dx) state.side = "key"; else state.side = "query";
    mark();
  });
}

function table() {
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
  document.querySelector("thead").append(head);
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
  document.querySelectorAll("th").forEach((th) => {
    if (th.dataset.field === field) th.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
  });
  const kind = byId("kind").value, only = +byId("layer").value;
  document.querySelector("tbody").replaceChildren(...order.filter((r) => (!kind || r.kind === kind) && (only < 0 || r.layer === only)).map((r) => {
    const tr = element("tr");
    tr.dataset.at = r.layer + "/" + r.head;
    tr.classList.toggle("chosen", r.layer === state.layer && r.head === state.head);
    columns.forEach(([name]) => tr.append(element("td", r[name] === null || r[name] === undefined ? "–" : typeof r[name] === "number" && !Number.isInteger(r[name]) ? r[name].toPrecision(3) : r[name])));
    tr.addEventListener("click", () => choose(r.layer, r.head));
    return tr;
  }));
  return columns;
}

function controls() {
  const slider = byId("layer"), kinds = byId("kind"), columns = [["layer", "layer"], ["head", "head"], ["kind", "kind"], ...data.columns];
  slider.max = data.layers.length - 1;
  data.kinds.forEach((k) => kinds.append(element("option", k, { value: k })));
  const show = () => {
    const only = +slider.value, kind = kinds.value;
    byId("layer-name").textContent = only < 0 ? "all" : only + " " + data.layers[only].name;
    document.querySelectorAll(".row").forEach((row) => { row.hidden = only >= 0 && +row.dataset.layer !== only; });
    document.querySelectorAll(".head").forEach((b) => { b.hidden = kind !== "" && b.dataset.kind !== kind; });
    fill(columns);
  };
  slider.addEventListener("input", show);
  kinds.addEventListener("change", show);
  document.querySelectorAll('input[name="side"]').forEach((radio) => radio.addEventListener("change", () => { state.side = radio.value; mark(); }));
  if (data.missed.length) { byId("missed").hidden = false; byId("missed").textContent = "Not recorded: " + data.missed.join("; "); }
  byId("note").textContent = "Colors go from 0 to the largest weight of each map, by the square root of the weight." + (data.pooled ? " Long maps are shown as means over small blocks." : "");
}

overview(); enlarged(); patches(); table(); controls();
choose(data.rows[0].layer, data.rows[0].head);
