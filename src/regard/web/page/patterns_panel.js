// Patterns
const EXAMPLES = ["causal()", "causal() & window(8)", "window(2) | every(8)", "dilated(12, 4)", "causal() & strided(8)", "causal() & (window(4) | sinks(2))", "blocks(8)", "full() - window(1)"];
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
  at("drawings").classList.toggle("alone", at("second").hidden);
  drawPattern(at("drawing"), shown[1]); drawPattern(at("drawing-2"), at("second").hidden ? null : shown[2]);
  const s = shown[1];
  if (s) { const to = (x) => `${x.toLocaleString("en")} to ${(x + s.size - 1).toLocaleString("en")}`; at("pattern-where").textContent = (s.i === s.j ? "positions " + to(s.i) : `queries ${to(s.i)}, keys ${to(s.j)}`) + (s.exact ? "" : "; a shade is the share of a cell's pairs, sampled"); }
}
function drawPattern(canvas, s) {
  if (!s || !canvas.parentElement.clientWidth) return;
  const css = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1, width = Math.min(canvas.parentElement.clientWidth, 560), left = 56, top = 34, side = width - left - 4;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round((top + side + 4) * ratio); canvas.style.height = top + side + 4 + "px"; canvas.style.width = width + "px";
  const pen = canvas.getContext("2d"), cell = side / s.rows.length, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  pen.scale(ratio, ratio);
  pen.fillStyle = css.getPropertyValue("--soft"); pen.fillRect(left, top, side, side);
  const gap = cell > 6 ? 1 : 0, color = dark ? "127,184,245" : "10,95,180";
  s.rows.forEach((row, i) => { for (let j = 0; j < row.length / 2; j++) { const share = parseInt(row.slice(2 * j, 2 * j + 2), 16) / 255; if (!share) continue; pen.fillStyle = `rgba(${color},${Math.sqrt(share).toFixed(3)})`; pen.fillRect(left + j * cell, top + i * cell, cell - gap + (gap ? 0 : .5), cell - gap + (gap ? 0 : .5)); } });
  pen.fillStyle = css.getPropertyValue("--quiet"); pen.font = "11px system-ui"; pen.textBaseline = "middle";
  const step = 10 ** Math.floor(Math.log10(Math.max(s.size / 4, 1))) || 1, ticks = s.size / step > 9 ? step * 2.5 : step;
  for (let t = 0; t < s.size; t += Math.max(1, Math.round(ticks))) {
    const label = (x) => x >= 1e4 ? shortTick(x) : String(x);
    pen.textAlign = "right"; pen.fillText(label(s.i + t), left - 4, top + (t + .5) * side / s.size);
    pen.textAlign = "center"; pen.fillText(label(s.j + t), left + (t + .5) * side / s.size, top - 9);
  }
  pen.textAlign = "left"; pen.fillText("keys j →", left, 8);
  pen.save(); pen.translate(8, top + 4); pen.rotate(-Math.PI / 2); pen.textAlign = "right"; pen.fillText("← queries i", 0, 0); pen.restore();
  if (point.i >= s.i && point.i < s.i + s.size && point.j >= s.j && point.j < s.j + s.size && point.shown) {
    const one = Math.max(side / s.size, 3);
    pen.strokeStyle = css.getPropertyValue("--mark"); pen.lineWidth = 2;
    pen.strokeRect(left + (point.j - s.j) * side / s.size, top + (point.i - s.i) * side / s.size, one, one);
  }
  canvas.frame = { left, top, side, s };
}
const shortTick = (x) => x >= 1e9 ? (x / 1e9).toFixed(1) + "G" : x >= 1e6 ? (x / 1e6).toFixed(1) + "M" : (x / 1e3).toFixed(x < 1e5 ? 1 : 0) + "k";
const point = { i: 0, j: 0, shown: false };
const showPair = latest(async (fresh) => {
  point.shown = true;
  drawAll();
  const texts = [];
  for (const which of [1, 2]) {
    const pattern = at(which === 1 ? "pattern" : "pattern-2").value;
    if (!pattern.trim()) continue;
    const found = await ask("/api/pair", { pattern, i: point.i, j: point.j }, at("pattern-error"));
    if (!found || !fresh()) return;
    const words = Object.entries(found.words), yes = words.filter(([, ok]) => ok).map(([w]) => w), no = words.filter(([, ok]) => !ok).map(([w]) => w);
    texts.push((which === 1 ? `(i, j) = (${point.i}, ${point.j}): query ${point.i}` : "By the second pattern it") + ` ${found.allowed ? "may attend" : "may not attend"} to key ${point.j}` + (yes.length ? "; " + yes.join(", ") + (yes.length === 1 ? " allows it" : " allow it") : "") + (no.length ? "; " + no.join(", ") + (no.length === 1 ? " does not" : " do not") : ""));
  }
  at("pair").textContent = texts.join(". ");
}, 40);
function move(size, i, j) {
  const n = Math.max(1, +at("n").value || 1);
  zoomed.size = Math.min(Math.max(Math.round(size), 8), n, 2 ** 30);
  zoomed.i = Math.round(Math.min(Math.max(i, 0), n - zoomed.size)); zoomed.j = Math.round(Math.min(Math.max(j, 0), n - zoomed.size));
  regions();
}
// Zoom around the selected pair if it is visible, else around the center.
function center(size) {
  const inside = (p, from) => point.shown && p >= from && p < from + zoomed.size ? p : from + zoomed.size / 2;
  move(size, inside(point.i, zoomed.i) - size / 2, inside(point.j, zoomed.j) - size / 2);
}
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
// FLOPs and time of a pattern beside attention without a mask.
function compared(table, e, measured) {
  table.replaceChildren();
  table.hidden = !e;
  if (!e) return;
  const ratio = (a, b) => a === null || b === null ? "–" : b / a >= 1 ? (b / a).toPrecision(3) + " × less" : (a / b).toPrecision(3) + " × more";
  const where = at("pattern-device").value === "cuda" ? "an H200" : "two cores", passes = at("pattern-train").checked ? "forward and backward" : "forward";
  const rows = [["", "pattern", "full attention", ""], ["FLOPs of the pairs", shortNumber(e.flops), shortNumber(e.dense_flops), ratio(e.flops, e.dense_flops)], ["time, estimated for " + where, secondsText(e.seconds), secondsText(e.dense_seconds), ratio(e.seconds, e.dense_seconds)]];
  if (measured) rows.push([`time, measured here, ${measured.threads} thread${measured.threads > 1 ? "s" : ""}`, secondsText(measured.seconds), secondsText(measured.dense_seconds), ratio(measured.seconds, measured.dense_seconds)]);
  table.append(element("caption", `${e.heads} heads of width ${e.width}, ${passes}`), ...rows.map((cells, k) => { const tr = element("tr"); tr.append(...cells.map((c) => element(k ? "td" : "th", c))); return tr; }));
  table.estimate = e;
}
async function timeHere() {
  const n = +at("n").value;
  at("time-note").textContent = "running …";
  for (const [field, suffix] of [["pattern", ""], ["pattern-2", "-2"]]) {
    const pattern = at(field).value;
    if (!pattern.trim()) continue;
    const found = await ask("/api/timing", { pattern, n, train: at("pattern-train").checked }, at("pattern-error"));
    if (found) compared(at("times" + suffix), at("times" + suffix).estimate, found);
  }
  at("time-note").textContent = "";
}
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
    at("explained" + suffix).textContent = result.explained ?? "at this length patterns are only counted here; regard.explain plans them";
    compared(at("times" + suffix), result.estimate);
  }
  if (zoomed.size > n || zoomed.i + zoomed.size > n || zoomed.j + zoomed.size > n) move(Math.min(zoomed.size, n), zoomed.i, zoomed.j); else regions();
});

