"use strict";
// Cividis, eleven of its colors: dark is nothing, bright is a weight of 1.
const STOPS = [[0,34,78],[7,48,112],[44,61,110],[71,75,107],[94,89,108],[117,104,112],[138,119,115],[162,135,112],[188,152,106],[218,172,90],[253,231,55]];
function color(share) {
  const x = Math.min(Math.sqrt(share), 1) * 10, k = Math.min(Math.floor(x), 9), t = x - k;  // small weights stay visible
  return STOPS[k].map((c, j) => Math.round(c + t * (STOPS[k + 1][j] - c)));
}
const sentences = JSON.parse(document.getElementById("data").textContent).maps;
const byId = (id) => document.getElementById(id);
const state = { sentence: 0, layer: 0, head: 0 };
const SVG = "http://www.w3.org/2000/svg";
function drawn(tag, given, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;  // text, never markup
  return made;
}
function option(text, value) { const made = document.createElement("option"); made.textContent = text; made.value = value; return made; }
function weights(layer, head) {
  const map = sentences[state.sentence].layers[layer].maps[head];
  if (!map.raw) map.raw = Uint8Array.from(atob(map.bytes), (c) => c.charCodeAt(0));
  return (i, j) => map.raw[i * sentences[state.sentence].keys.length + j] / 255 * map.top;
}

function heads() {
  const { queries, keys, layers } = sentences[state.sentence];
  byId("heads").replaceChildren(...layers[state.layer].maps.map((map, head) => {
    const button = document.createElement("button"), canvas = document.createElement("canvas"), at = weights(state.layer, head);
    canvas.width = keys.length; canvas.height = queries.length;
    const context = canvas.getContext("2d"), image = context.createImageData(keys.length, queries.length);
    queries.forEach((_, i) => keys.forEach((_, j) => image.data.set([...color(at(i, j)), 255], 4 * (i * keys.length + j))));
    context.putImageData(image, 0, 0);
    button.type = "button";
    button.append(canvas, map.name);
    button.setAttribute("aria-pressed", head === state.head);
    button.addEventListener("click", () => { state.head = head; show(); });
    return button;
  }));
}
function enlarged() {
  const { queries, keys } = sentences[state.sentence], at = weights(state.layer, state.head);
  const cell = Math.max(20, Math.min(56, Math.floor(640 / Math.max(keys.length, queries.length)))), left = 12 + 8 * Math.max(...queries.map((t) => t.length)), top = 12 + 6.5 * Math.max(...keys.map((t) => t.length));
  const svg = drawn("svg", { width: left + cell * keys.length + 70, height: top + cell * queries.length + 4, role: "img" });
  svg.setAttribute("aria-label", "weights: a row is a query, a column a key");
  keys.forEach((token, j) => svg.append(drawn("text", { transform: "translate(" + (left + cell * (j + .65)) + " " + (top - 6) + ") rotate(-50)" }, token)));
  queries.forEach((token, i) => {
    svg.append(drawn("text", { x: left - 8, y: top + cell * (i + .68), "text-anchor": "end" }, token));
    keys.forEach((key, j) => {
      const w = at(i, j), fill = "rgb(" + color(w).join(" ") + ")";
      const box = drawn("rect", { class: "cell", x: left + cell * j, y: top + cell * i, width: cell - 1, height: cell - 1, fill });
      box.addEventListener("mouseenter", () => { byId("reading").textContent = "“" + token.trim() + "” attends to “" + key.trim() + "” with " + (100 * w).toFixed(1) + " % of this head"; });
      svg.append(box);
    });
  });
  byId("map").replaceChildren(svg);
}
function show() { heads(); enlarged(); byId("reading").textContent = "Point at a square to read its weight."; }

function layers() {
  const named = sentences[state.sentence].layers;
  byId("layer").replaceChildren(...named.map((l, i) => option(l.name, i)));
  state.layer = named.length - 1;
  byId("layer").value = state.layer;
}
if (sentences.length) {
  byId("sentence").append(...sentences.map((s, i) => option(s.source, i)));
  layers();
  byId("sentence").addEventListener("change", (e) => { state.sentence = +e.target.value; state.head = 0; layers(); show(); });
  byId("layer").addEventListener("change", (e) => { state.layer = +e.target.value; state.head = 0; show(); });
  show();
}
