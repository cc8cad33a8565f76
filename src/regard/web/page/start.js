// Start
const start = {
  generate: () => { if (model) restart(); },
  patterns: askPattern, cost: askCost, runs: readRuns,
};
EXAMPLES.forEach((text) => { const button = element("button", text, { type: "button" }); button.addEventListener("click", () => { at("pattern").value = text; askPattern(); }); at("examples").append(button); });
for (const [form, run] of [["ask-pattern", askPattern], ["ask-cost", askCost]]) { at(form).addEventListener("input", run); at(form).addEventListener("submit", (event) => { event.preventDefault(); run(); }); }
at("declaration").addEventListener("input", askCost);
at("runs-form").addEventListener("input", showRuns); at("runs-form").addEventListener("submit", (event) => event.preventDefault());
at("ask-look").addEventListener("submit", (event) => { event.preventDefault(); lookAt(); });
at("ask-generate").addEventListener("submit", (event) => { event.preventDefault(); restart(); });
at("generate-stop").addEventListener("click", () => { output.run++; at("generate-stop").disabled = true; });
at("beam-start").addEventListener("click", beamTree);
at("remove-head").addEventListener("click", () => removed({ layer: state.layer, head: state.head }));
at("remove-key").addEventListener("click", () => removed({ layer: state.layer, key: state.key }));
at("step").addEventListener("click", stepThrough);
at("step-back").addEventListener("click", () => showStep(STEP.chosen - 1)); at("step-next").addEventListener("click", () => showStep(STEP.chosen + 1));
at("second-form").addEventListener("submit", (event) => { event.preventDefault(); secondText(); });
at("other").addEventListener("change", pythonHead); at("modes").addEventListener("click", () => { pythonHead(); remember(); });
at("example-look").addEventListener("click", () => open("heads", true)); at("example-generate").addEventListener("click", () => open("generate", true));
at("time-here").addEventListener("click", timeHere);
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
  const given = new URLSearchParams(location.hash.slice(1)), fields = { pattern: "pattern", n: "n", beside: "pattern-2", text: "text", target: "target", source: "source", positions: "cost-n", batch: "batch", layers: "layers", dtype: "dtype" };
  const known = [...Object.keys(fields), "device", "train", "i", "j", "size", "layer", "head", "mode", "second", "model", "panel"], unknown = [...given.keys()].filter((name) => !known.includes(name)).map((name) => `${name} is no field of this page`);
  const set = (id, name) => { const field = at(id), before = field.value, value = given.get(name); field.value = value; if (field.value !== value) { field.value = before; unknown.push(`${name}=${value} is not possible here`); } };
  for (const [name, id] of Object.entries(fields)) if (given.has(name)) set(id, name);
  if (given.has("device")) for (const id of ["pattern-device", "cost-device"]) set(id, "device");
  at("train").checked = given.get("train") === "1";
  for (const name of ["i", "j", "size"]) if (given.has(name)) zoomed[name] = +given.get(name) || zoomed[name];
  if (given.has("layer") || given.has("mode")) wanted = { head: given.get("layer") + "/" + given.get("head"), mode: given.get("mode"), second: given.get("second") };
  about = await ask("/api", null, at("model-error")) || {};
  at("version").textContent = about.version || "";
  at("model").append(...[...(about.presets || []), OWN].map((name) => new Option(name)));
  if (given.has("model")) set("model", "model");
  at("law-target").append(...[...(about.targets || []), ...(about.code ? [OWN] : [])].map((name) => new Option(name)));
  at("law-code").hidden = !!about.code;
  for (const tab of ["model", "heads", "generate"]) at("tab-" + tab).hidden = !about.reads;
  if (given.has("panel") && !panels.some((tab) => tab.dataset.panel === given.get("panel") && !tab.hidden)) unknown.push(`there is no panel ${given.get("panel")} here, only ${panels.filter((tab) => !tab.hidden).map((tab) => tab.dataset.panel).join(", ")}`);
  ignored(...unknown);
  open(given.get("panel") || (given.has("pattern") ? "patterns" : about.reads ? "model" : "patterns"));
  if (about.reads) {
    const lead = at("model-lead").textContent;
    at("model-lead").textContent = "Reading the model … " + lead; at("looking").hidden = false;
    model = await ask("/api/model", null, at("model-error"));
    at("model-lead").textContent = lead; at("looking").hidden = true;
    if (model) { showModel(); if (current === "generate") restart(); await lookAt(); }
  }
})();
