// Model
let about = {}, model = null;
function block(part, total, depth = 0) {
  const box = element("div", undefined, { className: "block" }), label = element("div", undefined, { className: "label" }), name = element("span"), size = part.parameters * part.times;
  name.append(part.name + (part.times > 1 ? " × " + part.times : "") + " ", element("em", part.class));
  label.append(name, element("span", shortNumber(size) + (part.shared ? part.shared === part.parameters ? ", shared with an earlier part" : ", " + shortNumber(part.shared * part.times) + " of them shared" : ""), { className: "size" }));
  const bar = element("div", undefined, { className: "bar" });
  bar.style.width = 100 * (size - part.shared * part.times) / Math.max(total, 1) + "%";
  box.append(label, bar);
  if (part.parts.length && part.parameters) {
    const inner = element("details"); inner.open = depth < 1;
    inner.append(element("summary", part.parts.length + (part.parts.length === 1 ? " part" : " parts") + (part.times > 1 ? " each" : "")), ...part.parts.map((p) => block(p, total / Math.max(part.times, 1), depth + 1)));
    box.append(inner);
  }
  return box;
}
function showModel() {
  at("model-name").textContent = model.name;
  at("model-lead").textContent = model.class + (model.translates ? ": reads a text and generates another" : model.generates ? ": predicts the next token" : "") + ". Everything is computed on this machine; nothing leaves it.";
  const cost = model.cost, list = [["parameters", shortNumber(model.parameters)], ["of memory for the weights", bytesText(model.bytes)]];
  if (cost.flops) list.push([`FLOPs for ${cost.n} positions`, shortNumber(cost.flops)]);
  if (cost.peak) list.push([`of memory at the peak, ${cost.n} positions`, bytesText(cost.peak)]);
  tiles("model-tiles", list);
  if (cost.error) at("model-error").textContent = "not priced: " + cost.error;
  at("architecture").replaceChildren(...model.parts.map((p) => block(p, model.parameters)));
  at("declared").textContent = model.declaration;
  at("python-model").textContent = (model.python || "model = …  # the model that was passed to regard serve") + `; print(${cost.python})`;
  at("reads").textContent = at("generate-reads").textContent = model.reads === "ids" ? "token ids, such as 5, 12, 7" : "text";
  if (!at("text").value) at("text").value = model.example;
  if (!at("source").value) at("source").value = model.example;
  at("target-label").hidden = !model.translates;
  at("tab-generate").hidden = !model.generates; at("tab-generate").textContent = at("example-generate").textContent = model.translates ? "Translate" : "Generate";
  at("generate-title").textContent = model.translates ? "Translate, token by token" : "Generate, token by token";
  at("example-generate").hidden = !model.generates;
  at("beam-go").hidden = !model.translates;
}
// The example on the model's panel: its text, the model's output, and how many heads are of each kind.
function showExample(found) {
  at("example-box").hidden = false;
  at("example-text").textContent = "“" + at("text").value + "”" + (found.said ? " → “" + found.said + "”" : "");
  const counts = new Map();
  found.rows.forEach((r) => counts.set(r.kind, [...(counts.get(r.kind) || []), r]));
  at("example-kinds").replaceChildren(...[...counts].sort((a, b) => b[1].length - a[1].length).map(([kind, rows]) => {
    const best = rows.reduce((a, b) => b.confidence > a.confidence ? b : a), button = element("button", undefined, { type: "button", title: (KINDS[kind] || KINDS.mixed)[1] + "; opens the clearest one, layer " + best.layer + ", head " + best.head }), dot = element("i");
    dot.style.background = (KINDS[kind] || KINDS.mixed)[0];
    button.append(dot, kind + " " + rows.length);
    button.addEventListener("click", () => { open("heads"); choose(best.layer, best.head); });
    return button;
  }));
  at("example-heads").textContent = found.rows.length + " heads in " + found.layers.length + " attention layers, by what they attend to in this text:";
}

// Heads
const asked = () => ({ text: at("text").value, target: at("target").value || null });
const REMOVE_HINT = "Runs the model once more, with zeros in place of the head, or without the key.";
async function lookAt() {
  at("looking").hidden = false;
  const found = await ask("/api/heads", asked(), at("look-error"), ["heads-box"]);
  at("looking").hidden = true;
  if (!found) return;
  at("heads-box").hidden = false;
  showHeads(found, { chosen: headChosen, marked: pythonHead });
  at("second-form").hidden = at("second-error").hidden = false;
  at("next-box").hidden = !found.next;
  distribution("next", found.next);
  showExample(found);
  if (wanted) await restore();
  remember();
}
function headChosen() { at("removed").textContent = REMOVE_HINT; at("after").replaceChildren(); at("steps-box").classList.toggle("stale", at("steps").childElementCount > 0); remember(); pythonHead(); }
// Fields of the address: a head, the mode in which it is shown, a second text.
let wanted = null;
async function restore() {
  const { head, mode, second } = wanted;
  wanted = null;
  if (rowOf.has(head)) choose(...head.split("/").map(Number));
  else if (head !== "null/null") ignored(`there is no head ${head} (layer/head)`);
  const button = mode && document.querySelector(`#modes [data-mode="${CSS.escape(mode)}"]`);
  if (button) button.click(); else if (mode) ignored(`there is no mode ${mode}`);
  if (second) { at("second-text").value = second; await secondText(); }
}
async function secondText() {
  const found = await ask("/api/heads", { text: at("second-text").value, target: null }, at("second-error"), ["compare-box"]);
  if (found) { showSecond(found); remember(); pythonHead(); }
}
function pythonHead() {
  const l = state.layer, h = state.head, tokens = data.layers[l];
  const same = data.layers.flatMap((other, k) => String(other.keys) === String(tokens.keys) ? [k] : []);  // these layers have the same keys
  const where = same.length === data.layers.length ? "" : `, layer=[${same.join(", ")}]`;
  at("python-remove").textContent = `view.remove_heads().effects[${l}, ${h}]; view.remove_key(${state.key}${where})`;
  at("python-steps").textContent = `view.scores(${l}, ${h})[${state.query}]; view.map(${l}, ${h})[${state.query}]`;
  if (state.mode === "compare") at("python-head").textContent = state.second ? `regard.look(model, first).map(${l}, ${h}), regard.look(model, second).map(${l}, ${h})` : `view.map(${l}, ${h}), view.map(${at("other").value.replace("/", ", ")})`;
  at("remove-head").textContent = `Remove head ${h} of layer ${l}`;
  at("remove-key").textContent = "Remove the key “" + short(tokens.keys[state.key] ?? "", 24) + "” everywhere";
  at("step").textContent = "Show the numbers of the query “" + short(tokens.queries[state.query] ?? "", 24) + "”";
}
async function removed(what) {
  at("removed").textContent = "running …";
  const found = await ask("/api/remove", { ...asked(), ...what }, at("look-error"));
  if (!found) { at("removed").textContent = ""; return; }
  const changed = found.before && found.after && found.before[0].token !== found.after[0].token, name = (t) => t.end ? END_NAME : "“" + t.token + "”";
  at("removed").textContent = "The output changes by " + (100 * found.effect).toPrecision(3) + " % of its norm" + (found.before ? "; the next token " + (changed ? "becomes " + name(found.after[0]) + " instead of " + name(found.before[0]) + ":" : "stays " + name(found.after[0]) + ":") : ".");
  distribution("after", found.after);
}

// One head, one query: a column for each step of the formula; the buttons explain a step and mark its column.
const STEP = { chosen: 0, columns: [] };
async function stepThrough() {
  const s = await ask("/api/steps", { ...asked(), layer: state.layer, head: state.head, query: state.query }, at("step-error"), ["steps-box"]);
  if (!s) return;
  const number = (x) => x === null || x === undefined ? "−∞" : Math.abs(x) >= 1e4 ? x.toExponential(2) : x.toFixed(4), few = (row) => row.slice(0, 4).map((x) => x.toFixed(2)).join("  ") + " …";
  const columns = [["key", (j) => s.keys[j], "", ""]];
  if (s.q) columns.push(
    ["k", (j) => few(s.k[j]), "", `The query “${s.query}” and every key are vectors of ${s.d_k} numbers. q begins with ${s.q.map((x) => x.toFixed(2)).join("  ")}; the first 4 numbers of each k are in this column.`],
    ["q · k", (j) => number(s.products[j]), "", `The product of q with each key: large where they point in the same direction.`],
    ["× " + s.scale.toFixed(4), (j) => number(s.scaled[j]), "", `Times the scale ${s.scale.toFixed(4)}` + (Math.abs(s.scale - s.d_k ** -.5) < 1e-6 ? ` = 1/√${s.d_k}, so that the products of wide vectors do not saturate the softmax.` : ".")],
    ["mask, bias", (j) => number(s.scores[j]), "", `The mask sets scores of keys that may not be attended to to −∞; a bias, where the model has one, is added.`],
    ["exp(s − " + s.top.toFixed(2) + ")", (j) => number(s.exp[j]), "Σ = " + s.sum.toFixed(4), `The exponential of each score minus the largest, ${s.top.toFixed(4)}, so that nothing overflows. Their sum is ${s.sum.toFixed(4)}.`]);
  columns.push(["weight", (j) => number(s.weights[j]), "Σ = " + s.weights.reduce((a, b) => a + b, 0).toFixed(4), "Divided by the sum: the weights of this query. They are not negative, and their sum is 1."]);
  if (s.v) columns.push(["v", (j) => few(s.v[j]), "Σ weight · v = " + few(s.output), `The output is the sum of the values v, each times its weight; the first 8 of its numbers: ${s.output.map((x) => x.toFixed(3)).join("  ")}.`]);
  STEP.columns = columns;
  const table = element("table"), parts = ["thead", "tbody", "tfoot"].map((tag) => element(tag)), best = s.weights.indexOf(Math.max(...s.weights));
  const row = (cells, tag, given = {}) => { const tr = element("tr", undefined, given); tr.append(...cells.map((c) => element(tag, c))); return tr; };
  parts[0].append(row(columns.map((c) => c[0]), "th"));
  s.keys.forEach((_, j) => parts[1].append(row(columns.map((c) => c[1](j)), "td", { className: j === best ? "chosen" : "" })));
  parts[2].append(row(columns.map((c) => c[2]), "td"));
  table.append(...parts);
  at("steps").replaceChildren(table);
  at("step-buttons").replaceChildren(...columns.slice(1).map(([name], k) => { const b = element("button", (k + 1) + " " + name, { type: "button" }); b.addEventListener("click", () => showStep(k + 1)); return b; }));
  at("step-move").hidden = false;
  showStep(1);
}
function showStep(k) {
  STEP.chosen = Math.min(Math.max(k, 1), STEP.columns.length - 1);
  [...at("step-buttons").children].forEach((b, i) => b.setAttribute("aria-pressed", i + 1 === STEP.chosen));
  at("step-text").textContent = STEP.columns[STEP.chosen][3];
  at("steps").querySelectorAll("tr").forEach((tr) => [...tr.children].forEach((cell, i) => { cell.classList.toggle("now", i === STEP.chosen); cell.classList.toggle("later", i > STEP.chosen); }));
  at("step-back").disabled = STEP.chosen === 1; at("step-next").disabled = STEP.chosen === STEP.columns.length - 1;
}
