// Charts: a few lines with axes. log: logarithmic; at: a value of x that is marked.
function ticks(low, high, log) {
  if (log) {
    const all = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    for (let e = first; e <= last; e++) for (const k of high / low > 300 ? [1] : [1, 2, 5]) if (k * 10 ** e >= low * .999 && k * 10 ** e <= high * 1.001) all.push(k * 10 ** e);
    return all;
  }
  const raw = (high - low) / 5 || 1, unit = 10 ** Math.floor(Math.log10(raw)), step = unit * [1, 2, 5, 10].find((k) => k * unit >= raw), all = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-9; v += step) all.push(+v.toPrecision(12));
  return all;
}
function chart(svg, lines, { width, height, log, powers, x, y, at: marked }) {
  const left = 66, right = 22, top = 12, bottom = 36, all = lines.flatMap((l) => l.points).filter(([, v]) => !log || v > 0);
  if (!all.length) { svg.replaceChildren(svgNode("text", { class: "axis", x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values yet")); return null; }
  const f = log ? Math.log10 : (v) => v, g = powers ? Math.log2 : (v) => v, xs = all.map(([a]) => a), ys = all.map(([, v]) => v);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)], inner = width - left - right, tall = height - top - bottom;
  const px = (v) => left + (g(v) - g(x0)) / (g(x1) - g(x0) || 1) * inner, py = (v) => height - bottom - (f(v) - f(y0)) / (f(y1) - f(y0) || 1) * tall;
  const made = [], name = (v) => Math.abs(v) >= 1e6 ? shortNumber(v).replace(".00", "") : v.toLocaleString("en", { maximumSignificantDigits: 4 });
  ticks(y0, y1, log).forEach((v) => made.push(svgNode("line", { class: "grid", x1: left, x2: width - right, y1: py(v), y2: py(v) }), svgNode("text", { class: "axis", x: left - 6, y: py(v) + 4, "text-anchor": "end" }, name(v))));
  (powers ? xs.filter((v, i) => xs.indexOf(v) === i) : ticks(x0, x1)).forEach((v) => made.push(svgNode("text", { class: "axis", x: px(v), y: height - bottom + 16, "text-anchor": "middle" }, name(v))));
  made.push(svgNode("text", { class: "axis", x: left + inner / 2, y: height - 4, "text-anchor": "middle" }, x), svgNode("title", {}, y + " over " + x));
  lines.forEach((l) => {
    const color = LINES[l.color % LINES.length], places = l.points.filter(([, v]) => !log || v > 0).map(([a, v]) => [px(a).toFixed(1), py(v).toFixed(1)]);
    made.push(svgNode("path", { class: "curve", stroke: color, d: "M" + places.map((p) => p.join(" ")).join("L") }));
    if (places.length === 1) made.push(svgNode("circle", { class: "point", fill: color, cx: places[0][0], cy: places[0][1], r: 4 }));  // a path of one point is invisible
  });
  lines.forEach((l) => l.points.filter(([a]) => a === marked).forEach(([a, v]) => made.push(svgNode("circle", { class: "here", cx: px(a), cy: py(v), r: 5 }))));
  svg.replaceChildren(...made);
  return { px, py, x0, x1, left, inner, top, bottom: height - bottom, width, lines };
}

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
  at("layers-out").textContent = f.layers ?? (result.layers ? result.layers + ", as declared" : "as declared");
  at("tree").replaceChildren(branch(cost.tree, cost.tree.flops || 1, 0));
  at("cost-table").textContent = result.text;
  const spec = own ? "spec" : f.layers ? `dataclasses.replace(regard.preset(${quoted(at("model").value)}), layers=${f.layers})` : quoted(at("model").value);
  at("python-cost").textContent = `regard.cost(${spec}, n=${f.n}, batch=${f.batch}, dtype=${quoted(f.dtype)}, device=${quoted(f.device)}, train=${f.train ? "True" : "False"})`;
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
  const flops = found.points.map((p) => [p.n, p.flops]), here = costFields().n, growth = flops.at(-1)[1] / flops.at(-2)[1];
  chart(at("curve"), [{ name: "all parts", points: flops, color: 0 }], { width: 460, height: 250, log: true, powers: true, x: "positions", y: "FLOPs", at: here });
  at("curve-reading").textContent = `Forward pass, batch ${costFields().batch}, layers as declared. From ${flops.at(-2)[0].toLocaleString("en")} to ${flops.at(-1)[0].toLocaleString("en")} positions the FLOPs grow ${growth.toFixed(2)} × (2: linear, 4: quadratic).`;
}

// Runs
let runs = [], off = new Set(), drawn = null;
async function readRuns() {
  const found = await ask("/api/runs", null, { set textContent(_) {} });
  if (found && JSON.stringify(found) !== JSON.stringify(runs)) { runs = found; showRuns(); }
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
  drawn = chart(at("run-chart"), lines, { width: 900, height: 380, log: at("log-scale").checked, x: "update", y: metric });
  at("python-runs").textContent = `run = regard.train(${quoted(runs[0].folder + "/recipe.json")}, out=${quoted(runs[0].folder)}); run.losses`;
}
// The nearest value of every curve, beside the pointer or moved by the arrow keys.
function readRun(step) {
  if (!drawn) return;
  drawn.step = Math.min(Math.max(step, drawn.x0), drawn.x1);
  const near = drawn.lines.map((l) => [l, l.points.reduce((a, b) => Math.abs(b[0] - drawn.step) < Math.abs(a[0] - drawn.step) ? b : a)]);
  at("run-chart").querySelectorAll(".cursor").forEach((node) => node.remove());
  at("run-chart").append(svgNode("line", { class: "cursor", x1: drawn.px(near[0][1][0]), x2: drawn.px(near[0][1][0]), y1: drawn.top, y2: drawn.bottom }), ...near.map(([l, [x, y]]) => svgNode("circle", { class: "cursor", fill: LINES[l.color % LINES.length], cx: drawn.px(x), cy: drawn.py(y), r: 4 })));
  at("run-reading").textContent = near.map(([l, p]) => l.name + ": " + (+p[1].toPrecision(4)) + " at update " + p[0]).join("   ·   ");
}
at("run-chart").addEventListener("pointermove", (event) => {
  const box = at("run-chart").getBoundingClientRect();
  if (drawn) readRun(drawn.x0 + ((event.clientX - box.left) / box.width * drawn.width - drawn.left) / drawn.inner * (drawn.x1 - drawn.x0));
});
at("run-chart").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (by && drawn) { event.preventDefault(); readRun((drawn.step ?? drawn.x0) + by * (drawn.x1 - drawn.x0) / 50); }
});

