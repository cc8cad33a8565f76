// The studio, one panel for each subject. Requests go to this server only; their results are inserted as text.
const at = (id) => document.getElementById(id);
const OWN = "your own …";
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a07800", "#7b3fb0", "#5c6470", "#c2255c"];
const exact = (x) => BigInt(x).toLocaleString("en");
const bytesText = (x) => x < 2 ** 10 ? x + " B" : x < 2 ** 20 ? (x / 2 ** 10).toFixed(1) + " KiB" : x < 2 ** 30 ? (x / 2 ** 20).toFixed(1) + " MiB" : (x / 2 ** 30).toFixed(2) + " GiB";
const shortNumber = (x) => x < 1e6 ? x.toLocaleString("en") : x < 1e9 ? (x / 1e6).toFixed(2) + " M" : x < 1e12 ? (x / 1e9).toFixed(2) + " G" : (x / 1e12).toFixed(2) + " T";
const secondsText = (x) => x === null ? "not estimated" : x >= 1 ? x.toPrecision(3) + " s" : x >= 1e-3 ? (x * 1e3).toPrecision(3) + " ms" : (x * 1e6).toPrecision(3) + " µs";
const percent = (p) => p > 0 && p < .0005 ? "< 0.1 %" : (100 * p).toFixed(1) + " %";
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
  return null;  // outdated parts stay dimmed: they do not belong to this request
}
// Only the latest request counts: responses to earlier ones are dropped.
function latest(run, delay = 150) {
  let wait, turn = 0;
  return (...given) => { clearTimeout(wait); const mine = ++turn; wait = setTimeout(() => run(() => mine === turn, ...given), delay); };
}
function tiles(id, pairs) {
  at(id).replaceChildren(...pairs.map(([name, value]) => { const tile = element("div"), number = element("b", value); tile.append(number, name); return tile; }));
}
const END_NAME = "(end)";
function distribution(id, tokens, pick) {
  at(id).replaceChildren(...(tokens || []).map((t) => {
    const row = element("li"), bar = element("div", undefined, { className: "bar" }), label = t.end ? END_NAME : t.token;
    bar.style.width = Math.max(.5, 100 * t.p) + "%";
    const name = pick ? element("button", label, { type: "button" }) : element("span", label);
    if (pick) name.addEventListener("click", () => pick(t));
    const track = element("div"); track.append(bar);
    row.append(name, track, element("span", percent(t.p)));
    return row;
  }));
}

// Panels
const panels = [...document.querySelectorAll("#tabs button")];
let current = "model";
const opened = {};
function open(panel, focus) {
  current = panels.some((tab) => tab.dataset.panel === panel && !tab.hidden) ? panel : "patterns";
  panels.forEach((tab) => { const on = tab.dataset.panel === current; tab.setAttribute("aria-selected", on); tab.tabIndex = on ? 0 : -1; at(tab.dataset.panel + "-panel").hidden = !on; if (on && focus) tab.focus(); });
  if (!opened[current]) { opened[current] = true; (start[current] || (() => {}))(); }
  if (current === "heads" && data) { if (at("overview").dataset.unseen) { overview(); choose(state.layer, state.head); reveal(); } else mark(); }
  if (current === "patterns") drawAll();
  remember();
}
panels.forEach((tab) => {
  tab.addEventListener("click", () => open(tab.dataset.panel));
  tab.addEventListener("keydown", (event) => {
    const shown = panels.filter((t) => !t.hidden), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], end = { Home: shown[0], End: shown.at(-1) }[event.key];
    const to = end || (step && shown[(shown.indexOf(tab) + step + shown.length) % shown.length]);
    if (to) { event.preventDefault(); open(to.dataset.panel, true); }
  });
});
// The address has the panel and its fields, so that a view can be shared.
// What the address asks for and this page does not have.
function ignored(...found) { if (found.length) { const line = at("address-error"); line.hidden = false; line.textContent = (line.textContent || "In the address:") + " " + [...new Set(found)].join("; ") + "."; } }
at("tabs").addEventListener("click", () => { at("address-error").hidden = true; });
function remember() {
  const kept = { panel: current };
  if (current === "patterns") { Object.assign(kept, { pattern: at("pattern").value, n: at("n").value, device: at("pattern-device").value }); if (at("pattern-2").value) kept.beside = at("pattern-2").value; if (zoomed.size) Object.assign(kept, { i: zoomed.i, j: zoomed.j, size: zoomed.size }); }
  if (current === "heads" && at("text").value) { kept.text = at("text").value; if (at("target").value) kept.target = at("target").value; if (data) { kept.layer = state.layer; kept.head = state.head; if (state.mode !== "map") kept.mode = state.mode; if (state.second) kept.second = at("second-text").value; } }
  if (current === "generate") kept.source = at("source").value;
  if (current === "cost") Object.assign(kept, { model: at("model").value, positions: at("cost-n").value, batch: at("batch").value, layers: at("layers").value, dtype: at("dtype").value, device: at("cost-device").value, train: at("train").checked ? 1 : 0 });
  history.replaceState(null, "", "#" + new URLSearchParams(kept));
}
