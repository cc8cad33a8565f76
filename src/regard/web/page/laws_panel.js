// Laws
// A counterexample: the allowed pairs, then each quantity, observed and expected.
function drawnCase(drawn) {
  const box = element("div", undefined, { className: "case" }), text = (x) => x === null ? "NaN" : String(+x.toPrecision(4));
  const grid = (name, rows) => {
    const figure = element("figure"), table = element("table");
    table.append(...rows.map((row) => { const tr = element("tr"); tr.append(...row.map(([value, mark]) => element("td", value, { className: mark }))); return tr; }));
    figure.append(element("figcaption", name), table);
    return figure;
  };
  if (drawn.allowed) box.append(grid("allowed pairs: a row per query", drawn.allowed.map((row) => row.map((on) => ["", on ? "on" : ""]))));
  drawn.tables.forEach((t) => box.append(grid(t.name + ", got", t.got.map((row, i) => row.map((x, j) => [text(x), t.wrong[i][j] ? "wrong" : ""]))), grid(t.name + ", expected", t.expected.map((row) => row.map((x) => [text(x), ""])))));
  return [element("div", drawn.title, { className: "note" }), box];
}
async function checkLaws() {
  const own = at("law-target").value === OWN;
  at("law-cause").textContent = "checking, a few seconds …";
  const result = await ask("/api/laws", own ? { code: at("code").value } : { target: at("law-target").value }, at("laws-error"), ["law-list"]);
  at("law-cause").textContent = "";
  if (!result) return;
  const count = (status) => result.outcomes.filter((o) => o.status === status).length;
  at("law-cause").textContent = `${count("holds")} of ${result.outcomes.length} laws passed` + (count("broken") + count("raised") ? `, ${count("broken") + count("raised")} broken.` : ".");
  if (result.cause) at("law-cause").textContent += " Likely cause: " + result.cause.headline + ". Fix: " + result.cause.fix;
  const order = { broken: 0, raised: 1, holds: 2 };
  at("law-list").replaceChildren(...result.outcomes.sort((a, b) => (order[a.status] ?? 3) - (order[b.status] ?? 3)).map((o) => {
    const box = element("div", undefined, { className: "law " + o.status.replace(" ", "-") });
    box.append(element("b", o.status === "holds" ? "passed" : o.status, { className: "status" }), element("b", o.number + " " + o.name), element("div", o.formula, { className: "note" }));
    if (o.worst !== null) box.append(element("div", "largest error " + Number(o.worst).toExponential(1) + ", allowed " + Number(o.tolerance).toExponential(1), { className: "note" }));
    if (o.message && o.status !== "holds") box.append(element("div", o.message));
    if (o.counterexample) box.append(element("div", "smallest case: " + o.counterexample));
    if (o.drawn && o.status !== "holds") box.append(...drawnCase(o.drawn));
    if (o.snippet) { const fold = element("details"); fold.append(element("summary", "code that shows it"), element("pre", o.snippet, { tabIndex: 0 })); box.append(fold); }
    return box;
  }));
  at("python-laws").textContent = own ? "print(regard.check(attention))" : "print(regard.check(" + result.name + "))";
}

