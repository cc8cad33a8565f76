// The studio: one panel for each question. Requests go to this server alone; what they return is inserted as text.
const at = (id) => document.getElementById(id);
const OWN = "your own …";
const EXAMPLES = ["causal()", "causal() & window(8)", "window(2) | every(8)", "dilated(12, 4)", "causal() & strided(8)", "causal() & (window(4) | sinks(2))", "blocks(8)", "full() - window(1)"];
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a07800", "#7b3fb0", "#5c6470", "#c2255c"];
const exact = (x) => BigInt(x).toLocaleString("en");
const bytesText = (x) => x < 2 ** 10 ? x + " B" : x < 2 ** 20 ? (x / 2 ** 10).toFixed(1) + " KiB" : x < 2 ** 30 ? (x / 2 ** 20).toFixed(1) + " MiB" : (x / 2 ** 30).toFixed(2) + " GiB";
const shortNumber = (x) => x < 1e6 ? x.toLocaleString("en") : x < 1e9 ? (x / 1e6).toFixed(2) + " M" : x < 1e12 ? (x / 1e9).toFixed(2) + " G" : (x / 1e12).toFixed(2) + " T";
const svgNode = (tag, given, text) => { const node = document.createElementNS("http://www.w3.org/2000/svg", tag); for (const [k, v] of Object.entries(given)) node.setAttribute(k, v); if (text !== undefined) node.textContent = text; return node; };
const quoted = (text) => JSON.stringify(text);

async function ask(path, given, message, stale) {
  let answer;
  (stale || []).forEach((id) => at(id).classList.add("stale"));
  try {
    answer = await fetch(path, given && { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(given) });
  } catch {
    message.textContent = "no response: is `regard serve` still running?";
    return null;
  }
  if (answer.ok) { message.textContent = ""; (stale || []).forEach((id) => at(id).classList.remove("stale")); return answer.json(); }
  const failed = await answer.json().catch(() => ({}));
  message.textContent = failed.error || `${answer.status} ${answer.statusText}`;
  return null;  // what is dimmed stays dimmed: it does not belong to this request
}
// Only the latest request counts: responses to earlier ones are dropped.
function latest(run, delay = 150) {
  let wait, turn = 0;
  return (...given) => { clearTimeout(wait); const mine = ++turn; wait = setTimeout(() => run(() => mine === turn, ...given), delay); };
}
function tiles(id, pairs) {
  at(id).replaceChildren(...pairs.map(([name, value]) => { const tile = element("div"), number = element("b", value); tile.append(number, name); return tile; }));
}
function distribution(id, tokens, pick) {
  at(id).replaceChildren(...(tokens || []).map((t) => {
    const row = element("li"), bar = element("div", undefined, { className: "bar" });
    bar.style.width = Math.max(1, 100 * t.p) + "%";
    const name = pick ? element("button", t.token, { type: "button" }) : element("span", t.token);
    if (pick) name.addEventListener("click", () => pick(t));
    const track = element("div"); track.append(bar);
    row.append(name, track, element("span", (100 * t.p).toFixed(1) + " %"));
    return row;
  }));
}

// Panels
const panels = [...document.querySelectorAll("#tabs button")];
let current = "model";
const opened = {};
function open(panel, focus) {
  current = panel;
  panels.forEach((tab) => { const on = tab.dataset.panel === panel; tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1; at(tab.dataset.panel + "-panel").hidden = !on; if (on && focus) tab.focus(); });
  if (!opened[panel]) { opened[panel] = true; (start[panel] || (() => {}))(); }
  if (panel === "heads" && data) mark();
  if (panel === "patterns") drawAll();
  remember();
}
panels.forEach((tab, i) => {
  tab.addEventListener("click", () => open(tab.dataset.panel));
  tab.addEventListener("keydown", (event) => { const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]; if (step) { event.preventDefault(); const shown = panels.filter((t) => !t.hidden); open(shown[(shown.indexOf(tab) + step + shown.length) % shown.length].dataset.panel, true); } });
});
// The address holds the panel and what it shows, so that a view can be shared.
function remember() {
  const kept = { panel: current };
  if (current === "patterns") { Object.assign(kept, { pattern: at("pattern").value, n: at("n").value }); if (at("pattern-2").value) kept.beside = at("pattern-2").value; if (zoomed.size) Object.assign(kept, { i: zoomed.i, j: zoomed.j, size: zoomed.size }); }
  if (current === "heads" && at("text").value) { kept.text = at("text").value; if (data) { kept.layer = state.layer; kept.head = state.head; } }
  if (current === "cost") kept.model = at("model").value;
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
}

// Model
let about = {}, model = null;
function block(part, total, depth = 0) {
  const box = element("div", undefined, { className: "block" }), label = element("div", undefined, { className: "label" }), name = element("span");
  name.append(part.name + (part.times > 1 ? " × " + part.times : "") + " ", element("em", part.class));
  label.append(name, element("span", shortNumber(part.parameters * part.times), { className: "size" }));
  const bar = element("div", undefined, { className: "bar" });
  bar.style.width = 100 * part.parameters * part.times / Math.max(total, 1) + "%";
  box.append(label, bar);
  if (part.parts.length && part.parameters) {
    const inner = element("details"); inner.open = depth < 1;
    inner.append(element("summary", part.parts.length + (part.parts.length === 1 ? " part" : " parts")), ...part.parts.map((p) => block(p, part.parameters, depth + 1)));
    box.append(inner);
  }
  return box;
}
function showModel() {
  at("model-name").textContent = model.name;
  at("model-lead").textContent = model.class + (model.translates ? ": reads a text and generates another" : model.generates ? ": predicts the next token" : "") + ". Everything is computed on this machine; nothing leaves it.";
  tiles("model-tiles", [["parameters", shortNumber(model.parameters)], ["memory for weights", bytesText(model.bytes)], ["reads", model.reads === "ids" ? "token ids" : "text"]]);
  at("architecture").replaceChildren(...model.parts.map((p) => block(p, model.parameters)));
  at("declared").textContent = model.declaration;
  at("reads").textContent = at("generate-reads").textContent = model.reads === "ids" ? "token ids, such as 5, 12, 7" : "text";
  if (!at("text").value) at("text").value = model.example;
  at("source").value = model.example;
  at("target-label").hidden = !model.translates;
  at("tab-generate").hidden = !model.generates; at("tab-generate").textContent = model.translates ? "Translate" : "Generate";
  at("generate-title").textContent = model.translates ? "Translate, token by token" : "Generate, token by token";
  at("beam-go").hidden = !model.translates;
}

// Heads
const lookAt = async () => {
  const given = { text: at("text").value, target: at("target").value || null };
  const found = await ask("/api/heads", given, at("look-error"), ["heads-box"]);
  if (!found) return;
  at("heads-box").hidden = false;
  showHeads(found, { chosen: () => { at("removed").textContent = "One more run of the model, with zeros in place of the head, or without the key."; at("after").replaceChildren(); at("steps").replaceChildren(); remember(); pythonHead(); }, marked: pythonHead });
  at("next-box").hidden = !found.next;
  distribution("next", found.next);
  if (wanted) { if (rowOf.has(wanted)) choose(...wanted.split("/").map(Number)); wanted = null; }
  remember();
};
let wanted = null;
function pythonHead() {
  const l = state.layer, h = state.head, tokens = data.layers[l];
  at("python-remove").textContent = `view.remove_heads().effects[${l}, ${h}]; view.remove_key(${state.key})`;
  at("python-steps").textContent = `view.scores(${l}, ${h})[${state.query}]; view.map(${l}, ${h})[${state.query}]`;
  at("remove-key").textContent = "Remove the key “" + (tokens.keys[state.key] ?? "") + "” everywhere";
  at("step").textContent = "Show the numbers of the query “" + (tokens.queries[state.query] ?? "") + "”";
}
async function removed(what) {
  const given = { text: at("text").value, target: at("target").value || null, ...what };
  at("removed").textContent = "running …";
  const found = await ask("/api/remove", given, at("look-error"));
  if (!found) { at("removed").textContent = ""; return; }
  const changed = found.before && found.after && found.before[0].token !== found.after[0].token;
  at("removed").textContent = "The output changes by " + (100 * found.effect).toPrecision(3) + " % of its norm" + (found.before ? "; the next token " + (changed ? "becomes “" + found.after[0].token + "” instead of “" + found.before[0].token + "”:" : "stays “" + found.after[0].token + "”:") : ".");
  distribution("after", found.after);
}
async function stepThrough() {
  const given = { text: at("text").value, target: at("target").value || null, layer: state.layer, head: state.head, query: state.query };
  const s = await ask("/api/steps", given, at("step-error"));
  if (!s) return;
  const table = element("table"), head = element("tr"), has = !!s.q, number = (x) => x === null || x === undefined ? "−∞" : Math.abs(x) >= 1e4 ? x.toExponential(2) : x.toFixed(4);
  const columns = [["key", (j) => s.keys[j]]];
  if (has) columns.push(["k · q", (j) => number(s.products[j])], ["· " + s.scale.toFixed(4), (j) => number(s.scaled[j])], ["mask and bias", (j) => number(s.scores[j])], ["exp(s − " + s.top.toFixed(3) + ")", (j) => number(s.exp[j])]);
  columns.push(["weight", (j) => number(s.weights[j])]);
  if (s.v) columns.push(["v, first 4 of its numbers", (j) => s.v[j].slice(0, 4).map((x) => x.toFixed(3)).join("  ")]);
  columns.forEach(([name]) => head.append(element("th", name)));
  const top = element("thead"), body = element("tbody"), best = s.weights.indexOf(Math.max(...s.weights));
  top.append(head);
  s.keys.forEach((_, j) => { const tr = element("tr", undefined, { className: j === best ? "chosen" : "" }); columns.forEach(([, value]) => tr.append(element("td", value(j)))); body.append(tr); });
  table.append(top, body);
  const lines = [];
  if (has) lines.push(element("p", "q of “" + s.query + "”, first 8 of its " + s.d_k + " numbers: " + s.q.map((x) => x.toFixed(3)).join("  "), { className: "formula" }), element("p", "scores = q·k / √" + s.d_k + "; the mask puts −∞ where attention is not allowed; exp(score − largest); divided by their sum " + s.sum.toFixed(4) + "; the output is the mix of the values by these weights.", { className: "formula" }));
  const tail = s.output ? [element("p", "output = Σ weight · v, first 8 of its numbers: " + s.output.map((x) => x.toFixed(3)).join("  "), { className: "formula" })] : [];
  at("steps").replaceChildren(...lines, table, ...tail);
}

// Translate and generate
const output = { ids: [], steps: [], run: 0, chosen: -1 };
function showOutput() {
  at("output").replaceChildren(...output.steps.map((step, i) => {
    const word = element("button", step.word, { type: "button" });
    word.setAttribute("aria-pressed", i === output.chosen);
    word.addEventListener("click", () => { output.chosen = i; showOutput(); });
    return word;
  }));
  const step = output.steps[output.chosen];
  if (!step) { at("looked").replaceChildren(); at("choices").replaceChildren(); return; }
  at("looked-title").textContent = "Where it looked for “" + step.word + "”";
  const mean = step.keys.map((_, j) => step.attention.reduce((sum, row) => sum + (row[j] || 0), 0) / step.attention.length), most = Math.max(...mean, 1e-9);
  at("looked").replaceChildren(...step.keys.map((key, j) => { const span = element("span", key, { title: mean[j].toFixed(4) }); span.style.setProperty("--w", (mean[j] / most).toFixed(3)); return span; }));
  distribution("choices", step.top, (t) => { const i = output.chosen; output.ids.length = output.steps.length = i; generate(t); });
}
async function generate(forced) {
  const mine = ++output.run;
  at("generate-stop").disabled = false;
  const text = at("source").value;
  at("python-generate").textContent = model.translates ? `regard.translate(${quoted(text)})` : "regard.generate(model, [[5, 12, 7]], max_new_tokens=40)";
  while (output.ids.length < 60 && mine === output.run) {
    const found = await ask("/api/next", { text, after: output.ids }, at("generate-error"));
    if (!found || mine !== output.run) break;
    const next = forced || found.top[0];
    forced = null;
    output.ids.push(next.id);
    output.steps.push({ ...found, word: next.id === found.end ? "⏎" : next.token });
    output.chosen = output.steps.length - 1;
    showOutput();
    if (next.id === found.end) break;
  }
  if (mine === output.run) at("generate-stop").disabled = true;
}
async function beamTree() {
  const found = await ask("/api/beams", { text: at("source").value }, at("generate-error"));
  if (!found) return;
  const { nodes, best } = found, levels = [], path = new Set();
  for (let k = best; k >= 0; k = nodes[k].parent) path.add(k);
  nodes.forEach((node, k) => { (levels[node.depth] ||= []).push(k); });
  const wide = 92, high = 22, tall = Math.max(...levels.map((l) => l.length)) * high + 20, place = {};
  const made = [];
  levels.forEach((level, depth) => level.forEach((k, row) => { place[k] = [10 + depth * wide, 18 + row * high]; }));
  nodes.forEach((node, k) => {
    const [x, y] = place[k];
    if (node.parent >= 0) { const [px, py] = place[node.parent]; made.unshift(svgNode("path", { d: `M${px + 60} ${py - 4}C${px + 80} ${py - 4} ${x - 20} ${y - 4} ${x - 3} ${y - 4}`, class: path.has(k) ? "best" : "" })); }
    const text = svgNode("text", { x, y, class: path.has(k) ? "best" : node.kept ? "" : "dropped" }, node.end ? "⏎" : short(node.token, 11));
    text.append(svgNode("title", {}, "log probability " + node.score + (node.kept ? "" : ", dropped")));
    made.push(text);
  });
  at("beams").setAttribute("width", levels.length * wide + 40); at("beams").setAttribute("height", tall);
  at("beams").replaceChildren(...made);
  at("beam-box").hidden = false;
}

// Patterns
const zoomed = { i: 0, j: 0, size: 64 };
const shown = { 1: null, 2: null };
const regions = latest(async (fresh) => {
  for (const which of [1, 2]) {
    const pattern = at(which === 1 ? "pattern" : "pattern-2").value;
    if (!pattern.trim()) { shown[which] = null; continue; }
    const found = await ask("/api/region", { pattern, n: Math.max(1, +at("n").value || 1), ...zoomed }, at("pattern-error"), which === 1 ? ["drawings"] : []);
    if (!fresh()) return;
    if (found) shown[which] = { ...found, pattern };
  }
  drawAll(); remember();
}, 60);
function drawAll() {
  at("second").hidden = !at("pattern-2").value.trim();
  drawPattern(at("drawing"), shown[1]); drawPattern(at("drawing-2"), at("second").hidden ? null : shown[2]);
  const s = shown[1];
  if (s) at("pattern-where").textContent = `positions ${s.i.toLocaleString("en")} to ${(s.i + s.size - 1).toLocaleString("en")}` + (s.exact ? "" : "; a shade is the share of a cell's pairs, sampled");
}
function drawPattern(canvas, s) {
  if (!s || !canvas.parentElement.clientWidth) return;
  const css = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1, width = Math.min(canvas.parentElement.clientWidth, 560), left = 44, top = 20, side = width - left - 4;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round((top + side + 4) * ratio); canvas.style.height = top + side + 4 + "px"; canvas.style.width = width + "px";
  const pen = canvas.getContext("2d"), cell = side / s.rows.length, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  pen.scale(ratio, ratio);
  pen.fillStyle = css.getPropertyValue("--soft"); pen.fillRect(left, top, side, side);
  const gap = cell > 6 ? 1 : 0, color = dark ? "127,184,245" : "10,95,180";
  s.rows.forEach((row, i) => { for (let j = 0; j < row.length; j++) if (row[j] !== "0") { pen.fillStyle = `rgba(${color},${(.12 + .88 * parseInt(row[j], 16) / 15).toFixed(2)})`; pen.fillRect(left + j * cell, top + i * cell, cell - gap + (gap ? 0 : .5), cell - gap + (gap ? 0 : .5)); } });
  pen.fillStyle = css.getPropertyValue("--quiet"); pen.font = "11px system-ui"; pen.textBaseline = "middle";
  const step = 10 ** Math.floor(Math.log10(Math.max(s.size / 4, 1))) || 1, ticks = s.size / step > 9 ? step * 2.5 : step;
  for (let t = 0; t < s.size; t += Math.max(1, Math.round(ticks))) {
    const label = (x) => x >= 1e4 ? shortTick(x) : String(x);
    pen.textAlign = "right"; pen.fillText(label(s.i + t), left - 4, top + (t + .5) * side / s.size);
    pen.textAlign = "center"; pen.fillText(label(s.j + t), left + (t + .5) * side / s.size, top - 9);
  }
  canvas.frame = { left, top, side, s };
}
const shortTick = (x) => x >= 1e9 ? (x / 1e9).toFixed(1) + "G" : x >= 1e6 ? (x / 1e6).toFixed(1) + "M" : (x / 1e3).toFixed(x < 1e5 ? 1 : 0) + "k";
const point = { i: 0, j: 0 };
const showPair = latest(async (fresh) => {
  const texts = [];
  for (const which of [1, 2]) {
    const pattern = at(which === 1 ? "pattern" : "pattern-2").value;
    if (!pattern.trim()) continue;
    const found = await ask("/api/pair", { pattern, ...point }, at("pattern-error"));
    if (!found || !fresh()) return;
    const words = Object.entries(found.words), yes = words.filter(([, ok]) => ok).map(([w]) => w), no = words.filter(([, ok]) => !ok).map(([w]) => w);
    texts.push(`(i, j) = (${point.i}, ${point.j}): query ${point.i} ${found.allowed ? "may attend" : "may not attend"} to key ${point.j}` + (yes.length ? "; allowed by " + yes.join(", ") : "") + (no.length ? "; not by " + no.join(", ") : ""));
  }
  at("pair").textContent = texts.join("   |   ");
}, 40);
function move(size, i, j) {
  const n = Math.max(1, +at("n").value || 1);
  zoomed.size = Math.min(Math.max(Math.round(size), 8), n, 2 ** 30);
  zoomed.i = Math.round(Math.min(Math.max(i, 0), n - zoomed.size)); zoomed.j = Math.round(Math.min(Math.max(j, 0), n - zoomed.size));
  regions();
}
const center = (size) => move(size, zoomed.i + (zoomed.size - size) / 2, zoomed.j + (zoomed.size - size) / 2);
for (const id of ["drawing", "drawing-2"]) {
  const canvas = at(id);
  let drag = null;
  const where = (event) => { const f = canvas.frame, box = canvas.getBoundingClientRect(), limit = (x) => Math.min(Math.max(x, 0), f.s.size - 1); return { i: f.s.i + limit(Math.floor((event.clientY - box.top - f.top) / f.side * f.s.size)), j: f.s.j + limit(Math.floor((event.clientX - box.left - f.left) / f.side * f.s.size)) }; };
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.clientX, y: event.clientY, i: zoomed.i, j: zoomed.j }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!canvas.frame) return;
    if (drag && Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4) { const per = canvas.frame.s.size / canvas.frame.side; move(zoomed.size, drag.i - (event.clientY - drag.y) * per, drag.j - (event.clientX - drag.x) * per); return; }
    Object.assign(point, where(event)); showPair();
  });
  canvas.addEventListener("wheel", (event) => { if (!canvas.frame) return; event.preventDefault(); const p = where(event), size = Math.max(8, zoomed.size * (event.deltaY < 0 ? .7 : 1.4)); move(size, p.i - size / 2, p.j - size / 2); }, { passive: false });
}
at("drawing").addEventListener("keydown", (event) => {
  if (event.key === "+" || event.key === "=") return center(zoomed.size / 2);
  if (event.key === "-") return center(zoomed.size * 2);
  const [dy, dx] = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] }[event.key] || [0, 0];
  if (!dy && !dx) return;
  event.preventDefault();
  const n = +at("n").value;
  point.i = Math.min(Math.max(point.i + dy, 0), n - 1); point.j = Math.min(Math.max(point.j + dx, 0), n - 1);
  showPair();
});
const askPattern = latest(async (fresh) => {
  const n = Math.max(1, +at("n").value || 1);
  at("python-pattern").textContent = `p = ${at("pattern").value.replace(/\b([a-z]+)\(/g, "regard.$1(")}; p.count(${n}); regard.explain(p, n=${n}, device=${quoted(at("pattern-device").value)})`;
  for (const [field, suffix] of [["pattern", ""], ["pattern-2", "-2"]]) {
    const pattern = at(field).value;
    if (!pattern.trim()) continue;
    const result = await ask("/api/pattern", { pattern, n, device: at("pattern-device").value, train: at("pattern-train").checked }, at("pattern-error"), ["drawings"]);
    if (!result || !fresh()) return;
    at("count" + suffix).textContent = exact(result.count);
    at("share" + suffix).textContent = `of ${exact(result.pairs)} pairs (${(100 * result.share).toPrecision(3)} %; dense attention computes ${(1 / Math.max(result.share, 1e-18)).toPrecision(3)} × as many)`;
    at("explained" + suffix).textContent = result.explained ?? "at this length patterns are only counted here; rg.explain plans them";
  }
  if (zoomed.size > n || zoomed.i + zoomed.size > n || zoomed.j + zoomed.size > n) move(Math.min(zoomed.size, n), zoomed.i, zoomed.j); else regions();
});

// Cost
const costFields = () => ({ n: 2 ** +at("cost-n").value, batch: 2 ** +at("batch").value, layers: +at("layers").value || null, dtype: at("dtype").value, device: at("cost-device").value, train: at("train").checked });
const askCost = latest(async (fresh) => {
  const own = at("model").value === OWN, f = costFields();
  at("own").hidden = !own;
  at("cost-n-out").textContent = f.n.toLocaleString("en"); at("batch-out").textContent = f.batch; at("layers-out").textContent = f.layers ?? "as declared";
  at("layers").disabled = own;
  let result;
  if (own) {
    let declared;
    try { declared = JSON.parse(at("declaration").value); } catch (error) { at("cost-error").textContent = "not JSON: " + error.message; ["totals", "tree"].forEach((id) => at(id).classList.add("stale")); return; }
    const { layers, ...rest } = f;
    result = await ask("/api/cost", { model: declared, ...rest }, at("cost-error"), ["totals", "tree"]);
  } else result = await ask("/api/resized", { name: at("model").value, ...f }, at("cost-error"), ["totals", "tree"]);
  if (!result || !fresh()) return;
  const cost = result.cost, list = [["parameters", shortNumber(cost.total.parameters)], ["FLOPs, forward", shortNumber(cost.total.flops)]];
  if (f.train) list.push(["FLOPs, backward", shortNumber(cost.total.backward_flops)]);
  if (cost.memory) list.push(["memory for weights", bytesText(cost.memory.weights)], f.train ? ["peak memory, training step", bytesText(cost.memory.training_peak)] : ["peak memory, inference", bytesText(cost.memory.inference_peak)]);
  tiles("totals", list);
  at("tree").replaceChildren(branch(cost.tree, cost.tree.flops || 1, 0));
  at("cost-table").textContent = result.text;
  at("python-cost").textContent = `regard.cost(${own ? "spec" : quoted(at("model").value)}, n=${f.n}, batch=${f.batch}, dtype=${quoted(f.dtype)}, device=${quoted(f.device)}, train=${f.train ? "True" : "False"})`;
  remember();
  if (!own) curve(fresh);
});
function branch(part, total, depth) {
  const label = (node) => { const bar = element("div", undefined, { className: "bar" }); bar.style.width = 100 * part.flops / total + "%"; node.append(part.name + (part.times > 1 ? " × " + part.times : ""), element("span", shortNumber(part.flops) + " · " + (100 * part.flops / total).toFixed(1) + " %", { className: "share" }), bar); return node; };
  if (!part.parts) return label(element("div", undefined, { className: "leaf" }));
  const box = element("details");
  box.open = depth < 2;
  const times = typeof part.times === "number" ? part.times : 1;
  box.append(label(element("summary")), ...part.parts.filter((p) => p.flops > 0).sort((a, b) => b.flops - a.flops).map((p) => branch({ ...p, flops: p.flops * times }, total, depth + 1)));
  return box;
}
async function curve(fresh) {
  const found = await ask("/api/curve", { name: at("model").value, batch: costFields().batch }, { set textContent(_) { at("curve").replaceChildren(); } });
  if (!found || !fresh()) return;
  const flops = found.points.map((p) => [p.n, p.flops]);
  chart(at("curve"), [{ name: "all parts", points: flops, color: 0 }], { width: 460, height: 250, log: true, logX: true, x: "positions", y: "FLOPs" });
  const here = costFields().n, growth = Math.log2(flops.at(-1)[1] / flops.at(-2)[1]);
  at("curve-reading").textContent = `at ${flops.at(-1)[0].toLocaleString("en")} positions, doubling the length multiplies the FLOPs by ${(2 ** growth).toFixed(2)}; chosen: ${here.toLocaleString("en")}`;
}

// Charts: a few lines with axes; log: powers of ten.
function chart(svg, lines, { width, height, log, logX, x, y }) {
  const left = 62, right = 12, top = 10, bottom = 34, all = lines.flatMap((l) => l.points).filter(([, v]) => !log || v > 0);
  if (!all.length) { svg.replaceChildren(); return null; }
  const f = log ? Math.log10 : (v) => v, g = logX ? Math.log2 : (v) => v, xs = all.map(([a]) => g(a)), ys = all.map(([, v]) => f(v));
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const px = (v) => left + (g(v) - x0) / (x1 - x0 || 1) * (width - left - right), py = (v) => height - bottom - (f(v) - y0) / (y1 - y0 || 1) * (height - top - bottom);
  const made = [], tick = (v) => Math.abs(v) >= 1e4 ? shortNumber(Math.round(v)) : Number.isInteger(v) ? String(v) : String(+v.toPrecision(3));
  for (let k = 0; k <= 4; k++) {
    const v = log ? 10 ** (y0 + k * (y1 - y0) / 4) : y0 + k * (y1 - y0) / 4, w = logX ? 2 ** (x0 + k * (x1 - x0) / 4) : x0 + k * (x1 - x0) / 4;
    made.push(svgNode("line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) }), svgNode("text", { class: "axis", x: left - 6, y: py(v) + 4, "text-anchor": "end" }, tick(v)), svgNode("text", { class: "axis", x: px(w), y: height - bottom + 15, "text-anchor": "middle" }, tick(Math.round(w))));
  }
  made.push(svgNode("text", { class: "axis", x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, x), svgNode("title", {}, y + " over " + x));
  lines.forEach((l) => made.push(svgNode("path", { class: "curve", stroke: LINES[l.color % LINES.length], d: "M" + l.points.filter(([, v]) => !log || v > 0).map(([a, v]) => px(a).toFixed(1) + " " + py(v).toFixed(1)).join("L") })));
  svg.replaceChildren(...made);
  return { px, x0, x1, left, right, width };
}

// Laws
async function checkLaws() {
  const own = at("law-target").value === OWN;
  at("law-cause").textContent = "checking …";
  const result = await ask("/api/laws", own ? { code: at("code").value } : { target: at("law-target").value }, at("laws-error"), ["law-list"]);
  at("law-cause").textContent = "";
  if (!result) return;
  if (result.cause) at("law-cause").textContent = "Likely cause: " + result.cause.headline + ". Fix: " + result.cause.fix;
  const order = { broken: 0, raised: 1, holds: 2 };
  at("law-list").replaceChildren(...result.outcomes.sort((a, b) => (order[a.status] ?? 3) - (order[b.status] ?? 3)).map((o) => {
    const box = element("div", undefined, { className: "law " + o.status.replace(" ", "-") });
    box.append(element("b", o.status === "holds" ? "passed" : o.status, { className: "status" }), element("b", o.number + " " + o.name), element("div", o.formula, { className: "note" }));
    if (o.worst !== null) box.append(element("div", "largest error " + Number(o.worst).toExponential(1) + ", allowed " + Number(o.tolerance).toExponential(1), { className: "note" }));
    if (o.message && o.status !== "holds") box.append(element("div", o.message));
    if (o.counterexample) box.append(element("div", "smallest case: " + o.counterexample));
    if (o.snippet) { const fold = element("details"); fold.append(element("summary", "code that shows it"), element("pre", o.snippet, { tabIndex: 0 })); box.append(fold); }
    return box;
  }));
  at("python-laws").textContent = own ? "print(regard.check(attention))" : "print(regard.check(" + result.name + "))";
}

// Runs
let runs = [], off = new Set(), drawn = null;
async function readRuns() {
  const found = await ask("/api/runs", null, { set textContent(_) {} });
  if (found) { runs = found; showRuns(); }
  if (current === "runs") setTimeout(readRuns, 3000); else opened.runs = false;
}
function smoothed(points, s) { let mean = null; return points.map(([x, y]) => [x, mean = mean === null ? y : s * mean + (1 - s) * y]); }
function showRuns() {
  at("runs-none").hidden = runs.length > 0; at("runs-box").hidden = !runs.length;
  if (!runs.length) return;
  at("run-names").replaceChildren(...runs.map((r, i) => { const b = element("button", r.name + (r.state === "finished" ? "" : " (unfinished)"), { type: "button" }); b.style.borderBottom = "4px solid " + LINES[i % LINES.length]; b.setAttribute("aria-pressed", !off.has(r.name)); b.addEventListener("click", () => { if (off.has(r.name)) off.delete(r.name); else off.add(r.name); showRuns(); }); return b; }));
  const s = +at("smooth").value, metric = at("metric").value;
  at("smooth-out").textContent = s;
  const lines = runs.map((r, i) => ({ name: r.name, color: i, points: smoothed(r.curves[metric], s) })).filter((l) => l.points.length && !off.has(l.name));
  drawn = chart(at("run-chart"), lines, { width: 720, height: 340, log: at("log-scale").checked, x: "update", y: metric });
  if (drawn) drawn.lines = lines;
}
at("run-chart").addEventListener("pointermove", (event) => {
  if (!drawn) return;
  const box = at("run-chart").getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 720, step = drawn.x0 + (x - drawn.left) / (drawn.width - drawn.left - drawn.right) * (drawn.x1 - drawn.x0);
  at("run-reading").textContent = drawn.lines.map((l) => { const p = l.points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a); return l.name + ": " + (+p[1].toPrecision(4)) + " at update " + p[0]; }).join("   ·   ");
});

// Start
const start = {
  heads: () => { if (model) lookAt(); },
  generate: () => { if (model) { output.ids = []; output.steps = []; generate(); } },
  patterns: askPattern, cost: askCost, runs: readRuns,
};
EXAMPLES.forEach((text) => { const button = element("button", text, { type: "button" }); button.addEventListener("click", () => { at("pattern").value = text; askPattern(); }); at("examples").append(button); });
for (const [form, run] of [["ask-pattern", askPattern], ["ask-cost", askCost]]) { at(form).addEventListener("input", run); at(form).addEventListener("submit", (event) => { event.preventDefault(); run(); }); }
at("declaration").addEventListener("input", askCost);
at("runs-form").addEventListener("input", showRuns); at("runs-form").addEventListener("submit", (event) => event.preventDefault());
at("ask-look").addEventListener("submit", (event) => { event.preventDefault(); lookAt(); });
at("ask-generate").addEventListener("submit", (event) => { event.preventDefault(); output.ids = []; output.steps = []; at("beam-box").hidden = true; generate(); });
at("generate-stop").addEventListener("click", () => { output.run++; at("generate-stop").disabled = true; });
at("beam-go").addEventListener("click", beamTree);
at("remove-head").addEventListener("click", () => removed({ layer: state.layer, head: state.head }));
at("remove-key").addEventListener("click", () => removed({ key: state.key }));
at("step").addEventListener("click", stepThrough);
at("pattern-in").addEventListener("click", () => center(zoomed.size / 2)); at("pattern-out").addEventListener("click", () => center(zoomed.size * 2));
at("pattern-first").addEventListener("click", () => move(64, 0, 0)); at("pattern-all").addEventListener("click", () => move(+at("n").value, 0, 0));
at("share-link").addEventListener("click", async () => { remember(); try { await navigator.clipboard.writeText(location.href); at("shared").textContent = "copied"; } catch { at("shared").textContent = location.href; } });
at("ask-laws").addEventListener("submit", (event) => { event.preventDefault(); checkLaws(); });
at("law-target").addEventListener("change", () => { at("code-label").hidden = at("law-target").value !== OWN; });
at("fits-go").addEventListener("click", async () => {
  const f = costFields();
  if (at("model").value === OWN) { at("fits").textContent = "choose a preset"; return; }
  at("fits").textContent = "…";
  const found = await ask("/api/fitting", { name: at("model").value, n: f.n, gib: +at("gib").value, train: f.train, dtype: f.dtype }, at("cost-error"));
  at("fits").textContent = found ? `batch ${found.batch.toLocaleString("en")} of ${f.n.toLocaleString("en")} positions on a GPU` : "";
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("resize", () => { if (current === "patterns") drawAll(); });

(async () => {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, id] of [["pattern", "pattern"], ["n", "n"], ["beside", "pattern-2"], ["text", "text"]]) if (given.has(name)) at(id).value = given.get(name);
  for (const name of ["i", "j", "size"]) if (given.has(name)) zoomed[name] = +given.get(name) || zoomed[name];
  if (given.has("layer")) wanted = given.get("layer") + "/" + given.get("head");
  about = await ask("/api", null, at("model-error")) || {};
  at("version").textContent = about.version || "";
  at("model").append(...[...(about.presets || []), OWN].map((name) => new Option(name)));
  if (given.has("model")) at("model").value = given.get("model");
  at("law-target").append(...[...(about.targets || []), ...(about.code ? [OWN] : [])].map((name) => new Option(name)));
  for (const tab of ["model", "heads", "generate"]) at("tab-" + tab).hidden = !about.reads;
  open(given.get("panel") || (given.has("pattern") ? "patterns" : about.reads ? "model" : "patterns"));
  if (about.reads) {
    model = await ask("/api/model", null, at("model-error"));
    if (model) { showModel(); if (current === "heads") lookAt(); if (current === "generate") generate(); }
  }
})();
