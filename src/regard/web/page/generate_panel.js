// Translate and generate
const output = { ids: [], steps: [], run: 0, chosen: -1 };
function showOutput() {
  at("output").replaceChildren(...output.steps.map((step, i) => {
    const word = element("button", step.word, { type: "button" });
    word.setAttribute("aria-pressed", i === output.chosen);
    word.addEventListener("click", () => { output.chosen = i; showOutput(); at("output").children[i].focus(); });
    return word;
  }));
  const step = output.steps[output.chosen];
  at("looked-box").hidden = !step;
  if (!step) return;
  at("looked-title").textContent = "What it attended to for “" + step.word + "”";
  const mean = step.keys.map((_, j) => step.attention.reduce((sum, row) => sum + (row[j] || 0), 0) / step.attention.length), most = Math.max(...mean, 1e-9);
  at("looked").replaceChildren(...step.keys.map((key, j) => { const span = element("span", key, { title: mean[j].toFixed(4) }); span.style.setProperty("--w", (mean[j] / most).toFixed(3)); return span; }));
  distribution("choices", step.top, (t) => { const i = output.chosen; output.ids.length = output.steps.length = i; generate(t); });
}
async function generate(forced) {
  const mine = ++output.run;
  at("generate-stop").disabled = false;
  at("beam-box").classList.add("stale");
  const text = at("source").value;
  at("python-generate").textContent = model.translates ? `regard.translate(${quoted(text)}, strategy=regard.greedy())` : `regard.generate(model, [${model.reads === "ids" ? "[" + text + "]" : "tokens.encode([" + quoted(text) + "])[0]"}], max_new_tokens=40)`;
  remember();
  while (output.ids.length < 60 && mine === output.run) {
    const found = await ask("/api/next", { text, after: output.ids }, at("generate-error"));
    if (mine !== output.run) break;
    at("generate-result").classList.toggle("stale", !found);
    if (!found) break;
    const next = forced || found.top[0];
    forced = null;
    output.ids.push(next.id);
    output.steps.push({ ...found, word: next.id === found.end ? END_NAME : next.token });
    output.chosen = output.steps.length - 1;
    showOutput();
    if (next.id === found.end) break;
  }
  if (mine === output.run) at("generate-stop").disabled = true;
}
function restart() { output.ids = []; output.steps = []; return generate(); }
async function beamTree() {
  at("beam-box").hidden = false;
  const width = +at("beam-width").value, found = await ask("/api/beams", { text: at("source").value, width }, at("generate-error"), ["beam-box"]);
  if (!found) return;
  at("beam-title").textContent = "Beam tree of width " + width;
  at("python-generate").textContent = `regard.translate(${quoted(at("source").value)}, strategy=regard.beam(${width}))`;
  const { nodes, best } = found, levels = [], path = new Set();
  for (let k = best; k >= 0; k = nodes[k].parent) path.add(k);
  nodes.forEach((node, k) => { (levels[node.depth] ||= []).push(k); });
  const wide = 92, high = 22, tall = Math.max(...levels.map((l) => l.length)) * high + 20, place = {}, made = [];
  levels.forEach((level, depth) => level.forEach((k, row) => { place[k] = [10 + depth * wide, 18 + row * high]; }));
  nodes.forEach((node, k) => {
    const [x, y] = place[k];
    if (node.parent >= 0) { const [px, py] = place[node.parent]; made.unshift(svgNode("path", { d: `M${px + 66} ${py - 4}C${px + 82} ${py - 4} ${x - 20} ${y - 4} ${x - 3} ${y - 4}`, class: path.has(k) ? "best" : "" })); }
    const text = svgNode("text", { x, y, class: path.has(k) ? "best" : node.kept ? "" : "dropped" }, node.end ? END_NAME : short(node.token, 9));
    text.append(svgNode("title", {}, (node.end ? END_NAME : node.token) + ": log probability so far " + node.score + (node.kept ? "" : ", dropped")));
    made.push(text);
  });
  at("beams").setAttribute("width", levels.length * wide + 40); at("beams").setAttribute("height", tall);
  at("beams").replaceChildren(...made);
}
