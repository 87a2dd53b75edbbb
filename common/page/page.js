"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const root = document.documentElement;

// A browser that keeps nothing for a file still shows the page.
const kept = { get: (k) => { try { return localStorage.getItem(k); } catch { return null; } },
               set: (k, v) => { try { localStorage.setItem(k, v); } catch {} } };

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// ---- dark and light -------------------------------------------------------------------------------------------

const system = matchMedia("(prefers-color-scheme: dark)");
function theme(name) {
  root.dataset.theme = name;
  $("theme").setAttribute("aria-pressed", name === "dark");
}
theme(kept.get("lesson-theme") || (system.matches ? "dark" : "light"));
system.addEventListener("change", () => { if (!kept.get("lesson-theme")) theme(system.matches ? "dark" : "light"); });
$("theme").addEventListener("click", () => {
  theme(root.dataset.theme === "dark" ? "light" : "dark");
  kept.set("lesson-theme", root.dataset.theme);
});

// ---- plots: drawn when they come near ---------------------------------------------------------------------------

async function draw(chart) {
  if (chart.dataset.drawn) return;
  chart.dataset.drawn = "yes";
  const options = { mode: "vega-lite", actions: false, renderer: "svg", tooltip: { theme: "custom" }, logLevel: 1 };
  const spec = JSON.stringify(data.plots[chart.dataset.plot]);
  const room = chart.clientWidth < 480 ? spec.replaceAll('"columns":2', '"columns":1').replaceAll('"columns":4', '"columns":2') : spec;
  const place = element("div");  // which gets a role and a name of its own
  chart.append(place);
  await vegaEmbed(place, JSON.parse(room), options);
}
const near = new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) { near.unobserve(one.target); draw(one.target); }
}, { rootMargin: "600px" });
document.querySelectorAll(".chart").forEach((chart) => near.observe(chart));
addEventListener("beforeprint", () => document.querySelectorAll(".machine:not([hidden]) .chart").forEach(draw));

// ---- the machine ------------------------------------------------------------------------------------------------

let chosen = false;  // by the reader: then another machine does not choose two other stages

function showMachine() {
  for (const part of document.querySelectorAll(".machine")) part.hidden = part.dataset.machine !== $("machine").value;
  const step = Object.entries(data.previous).find(([stage, before]) => before && shared(before, stage).length);
  if (step && !chosen) [$("stage-b").value, $("stage-a").value] = step;
  compare();
}
$("machine").addEventListener("change", showMachine);

// ---- two stages: their numbers ----------------------------------------------------------------------------------

function number(v) {  // three significant digits, as lesson's own tables have them
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  const size = Math.abs(v), digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.0005 || !size ? 3 : -Math.floor(Math.log10(size));
  return v.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
const times = (v) => (v ? number(v) + "×" : "–");
const metrics = { prompt: "TTFT", token: "ms/token" };

// Both stages' times wherever one record has both at a shape; of two records only where no record does.
// [{model, at, metric, a, b, ratio, expected, verdict}]: first what runs in turns show to have changed, among those the
// climb's shape and then the largest change; so a step that pays after a long text leads with one.
const opposite = { faster: "slower", slower: "faster" };
const turned = (p) => p && { ...p, ratio: 1 / p.ratio, expected: p.expected && 1 / p.expected, verdict: opposite[p.verdict] || p.verdict };
function shared(a, b, machine = $("machine").value) {
  const found = [], mine = (stage) => data.runs[machine].filter((run) => run.stage === stage);
  for (const left of mine(a)) for (const right of mine(b)) {
    if (left.model !== right.model || left.at !== right.at) continue;
    for (const metric of Object.keys(metrics)) {
      if (!left[metric] || !right[metric]) continue;
      const same = (p) => p.model === left.model && p.at === left.at && p.metric === metric;
      const of = (x, y) => left.file === right.file
        && data.pairs[machine].find((p) => same(p) && p.file === left.file && p.a === x && p.b === y);
      const pair = of(a, b) || turned(of(b, a));
      const wanted = left[metric + "_expected"] / right[metric + "_expected"];
      found.push({ model: left.model, at: left.at, metric, a: left[metric], b: right[metric],
        ratio: pair ? pair.ratio : left[metric] / right[metric], expected: pair ? pair.expected : wanted || null,
        verdict: pair ? pair.verdict : left.file === right.file ? "" : "two records, not runs in turns",
        together: left.file === right.file, paired: Boolean(pair) });
    }
  }
  const first = (r) => data.climbs[machine][r.metric] === `${r.model}, ${r.at}`;
  const alone = (r) => !found.some((q) => q.together && q.model === r.model && q.at === r.at && q.metric === r.metric);
  const changed = (r) => r.verdict in opposite, size = (r) => Math.abs(Math.log(r.ratio));
  return found.filter((r) => r.together || alone(r))
    .sort((p, q) => changed(q) - changed(p) || first(q) - first(p) || q.paired - p.paired || size(q) - size(p));
}

function kernels(a, b) {
  const rows = data.kernels[$("machine").value], found = [];
  for (const left of rows) for (const right of rows)
    if (left.stage === a && right.stage === b && left.at === right.at)
      found.push({ at: left.at, type: left.dtype === right.dtype ? left.dtype : left.dtype + ", " + right.dtype,
                   a: left.ms, b: right.ms, ratio: left.ms / right.ms, fast: right.tflops });
  const same = (r) => !r.type.includes(","), alone = (r) => !found.some((q) => same(q) && q.at === r.at);
  return found.filter((r) => same(r) || alone(r)).sort((p, q) => q.a - p.a);
}

function table(head, rows) {
  const box = element("div", undefined, { class: "scroll", tabindex: 0, role: "group", "aria-label": "Every shape" });
  const made = element("table"), top = element("tr"), body = element("tbody");
  head.forEach((title) => top.append(element("th", title, { scope: "col" })));
  for (const row of rows) {
    const line = element("tr");
    row.forEach((cell, i) => line.append(i ? element("td", cell) : element("th", cell, { scope: "row" })));
    body.append(line);
  }
  const thead = element("thead");
  thead.append(top);
  made.append(thead, body);
  box.append(made);
  return box;
}

function card(title, ratio, change, rest) {
  const made = element("div");
  made.append(element("span", title), element("b", ratio), change, element("br"), element("span", rest));
  return made;
}

function showNumbers(a, b) {
  const place = $("numbers"), cards = element("div", undefined, { class: "cards" });
  const machine = $("machine").selectedOptions[0].text;
  place.replaceChildren();
  if (a === b) return place.append(element("p", "The same stage twice: nothing differs."));
  if (a.includes("/") || b.includes("/")) {
    const rows = kernels(a, b);
    if (rows.length) {
      const top = rows[0];
      cards.append(card(`${top.at}, ${top.type}`, times(top.ratio), `${number(top.a)} → ${number(top.b)} ms`, machine));
      place.append(cards, table(["shape", "type", `${a} ms`, `${b} ms`, "×"],
        rows.map((r) => [r.at, r.type, number(r.a), number(r.b), times(r.ratio)])));
    }
  } else {
    const rows = shared(a, b);
    for (const metric of Object.keys(metrics)) {
      const top = rows.find((r) => r.metric === metric);
      if (!top) continue;
      const wanted = top.expected && `expected ${times(top.expected)}`;
      const rest = [wanted, top.verdict, `${top.model}, ${top.at}`].filter(Boolean).join(" · ");
      cards.append(card(metrics[metric], times(top.ratio), `${number(top.a)} → ${number(top.b)} ms`, rest));
    }
    if (rows.length) place.append(cards);
    if (rows.length > 2) {
      const more = element("details", undefined, { class: "numbers" });
      more.append(element("summary", "Every shape"), table(["model", "shape", "", `${a} ms`, `${b} ms`, "×", "expected ×", ""],
        rows.map((r) => [r.model, r.at, metrics[r.metric], number(r.a), number(r.b), times(r.ratio), times(r.expected), r.verdict])));
      place.append(more);
    }
  }
  if (!place.children.length) {
    const alike = a.split("/").slice(0, -1).join() === b.split("/").slice(0, -1).join();
    const said = element("p", alike ? `No record of ${machine} has both at one shape. ` : "These are of two ladders: nothing times one against the other.");
    if (alike) said.append(element("code", `lesson compare ${a} ${b}`), " makes one where both can run.");
    const others = [...$("machine").options].filter((one) => shared(a, b, one.value).length).map((one) => one.text);
    if (others.length) said.append(` Choose ${others.join(" or ")} above to see one.`);
    place.append(said);
  }
}

// ---- two stages: their code -------------------------------------------------------------------------------------

const plain = (html) => { const e = element("template"); e.innerHTML = html; return e.content.textContent; };
const texts = {};
const lines = (name) => (texts[name] ||= data.code[name].map(plain));

// The longest common subsequence of lines, as runs: [{same, a, b, n}] or {a, na, b, nb} where they differ.
function runs(a, b) {
  const n = a.length, m = b.length, best = Array.from({ length: n + 1 }, () => new Uint32Array(m + 1));
  const worth = a.map((line) => (line.trim() ? 4 + Math.min(line.length, 40) : 1));  // a blank line aligns nothing by itself
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      best[i][j] = a[i] === b[j] ? best[i + 1][j + 1] + worth[i] : Math.max(best[i + 1][j], best[i][j + 1]);
  const found = [];
  let i = 0, j = 0;
  while (i < n || j < m) {
    const at = { a: i, b: j };
    while (i < n && j < m && a[i] === b[j]) { i++; j++; }
    if (i > at.a) { found.push({ same: true, ...at, na: i - at.a, nb: i - at.a }); continue; }
    while ((i < n || j < m) && !(i < n && j < m && a[i] === b[j]))
      if (j >= m || (i < n && best[i + 1][j] >= best[i][j + 1])) i++; else j++;
    found.push({ same: false, ...at, na: i - at.a, nb: j - at.b });
  }
  return found;
}

const AROUND = 3;  // lines of what is the same, left standing around a difference
let marks;

function showCode(a, b) {
  const [left, right] = [lines(a), lines(b)], two = $("columns").checked;
  const made = element("table"), body = element("tbody"), head = element("tr"), group = element("colgroup");
  marks = { old: [], new: [] };
  for (const kind of two ? ["line", "", "line", ""] : ["line", "line", ""]) group.append(element("col", undefined, kind ? { class: kind } : {}));
  if (two) for (const name of [a, b]) head.append(element("th", name, { scope: "colgroup", colspan: 2 }));
  else head.append(element("th", `${a} → ${b}`, { scope: "colgroup", colspan: 3 }));
  const top = element("thead");
  top.append(head);
  made.append(group, top, body);
  const found = runs(left, right);
  found.forEach((run, k) => {
    const rows = run.same ? same(run, a, two) : changed(run, a, b, two);
    const before = k ? AROUND : 0, after = k < found.length - 1 ? AROUND : 0, hidden = rows.length - before - after;
    if (!run.same || $("whole").checked || hidden < 4) return body.append(...rows);
    const middle = rows.slice(before, rows.length - after), fold = element("tr", undefined, { class: "fold" });
    const cell = element("td", undefined, { colspan: two ? 4 : 3 }), button = element("button", `${hidden} lines that are the same`, { type: "button" });
    button.addEventListener("click", () => { fold.replaceWith(...middle); });
    cell.append(button);
    fold.append(cell);
    body.append(...rows.slice(0, before), fold, ...rows.slice(rows.length - after));
  });
  $("diff").replaceChildren(made);
  if (CSS.highlights) for (const kind of ["old", "new"]) CSS.highlights.set(kind, new Highlight(...marks[kind]));
}

function codeCell(name, at, kind, word) {
  const cell = element("td", undefined, { class: `code ${kind}` });
  cell.innerHTML = at === null ? "" : data.code[name][at] || "";
  cell.style.setProperty("--hang", cell.textContent.search(/\S|$/) + 2);  // a wrapped line goes on right of its start
  if (word && at !== null) cell.prepend(element("span", word, { class: "unseen" }));
  return cell;
}
const lineCell = (at, kind = "") => element("td", at === null ? "" : at + 1, { class: `line ${kind}` });
const row = (...cells) => { const made = element("tr"); made.append(...cells); return made; };

function same(run, a, two) {
  return Array.from({ length: run.na }, (_, k) => two
    ? row(lineCell(run.a + k), codeCell(a, run.a + k, ""), lineCell(run.b + k), codeCell(a, run.a + k, ""))
    : row(lineCell(run.a + k), lineCell(run.b + k), codeCell(a, run.a + k, "")));
}

function changed(run, a, b, two) {
  const found = [], olds = [], news = [];
  const gone = (k) => (k < run.na ? run.a + k : null), come = (k) => (k < run.nb ? run.b + k : null);
  for (let k = 0; k < Math.max(run.na, run.nb); k++) {
    const old = codeCell(a, gone(k), gone(k) === null ? "" : "old", "gone: ");
    const now = codeCell(b, come(k), come(k) === null ? "" : "new", "new: ");
    if (gone(k) !== null && come(k) !== null) within(old, now, lines(a)[gone(k)], lines(b)[come(k)]);
    if (two) found.push(row(lineCell(gone(k), old.className.slice(5)), old, lineCell(come(k), now.className.slice(5)), now));
    else {
      if (gone(k) !== null) olds.push(row(lineCell(gone(k), "old"), lineCell(null, "old"), old));
      if (come(k) !== null) news.push(row(lineCell(null, "new"), lineCell(come(k), "new"), now));
    }
  }
  return two ? found : [...olds, ...news];
}

// Two lines that begin and end alike: mark what lies between.
function within(old, now, a, b) {
  let start = 0, end = 0;
  const most = Math.min(a.length, b.length);
  while (start < most && a[start] === b[start]) start++;
  while (end < most - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  if (a.slice(0, start).trim().length + end < 0.4 * most) return;
  while (start && /\w/.test(a[start - 1])) start--;  // whole words
  while (end && /\w/.test(a[a.length - end])) end--;
  mark(old, start, a.length - end, "old");
  mark(now, start, b.length - end, "new");
}

function mark(cell, from, to, kind) {
  if (to <= from || !CSS.highlights) return;
  const range = new Range(), walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  let at = 0, begun = false;
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    if (node.parentElement.className === "unseen") continue;
    const length = node.data.length;
    if (!begun && from < at + length) { range.setStart(node, from - at); begun = true; }
    if (to <= at + length) { range.setEnd(node, to - at); break; }
    at += length;
  }
  marks[kind].push(range);
}

function compare() {
  const [a, b] = [$("stage-a").value, $("stage-b").value];
  showNumbers(a, b);
  showCode(a, b);
}
for (const id of ["stage-a", "stage-b", "whole", "columns"])
  $(id).addEventListener("change", () => { chosen ||= id.startsWith("stage"); compare(); });

// ---- the way around ---------------------------------------------------------------------------------------------

// #compare=a,b chooses two stages; a chapter's anchor opens it.
function follow() {
  const [name, two] = decodeURIComponent(location.hash.slice(1)).split("=");
  const place = $(name);
  if (two?.split(",").every((stage) => data.code[stage])) {
    chosen = true;
    [$("stage-a").value, $("stage-b").value] = two.split(",");
    compare();
  }
  if (!place) return;
  const of = place.closest(".machine")?.dataset.machine;  // what is of another machine is hidden
  if (of && of !== $("machine").value) { $("machine").value = of; showMachine(); }
  for (let e = place; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
  place.scrollIntoView();
  const focus = place.matches("details") ? place.querySelector("summary") : place.querySelector("h1, h2, select");
  if (focus && !focus.matches("summary, select")) focus.tabIndex = -1;
  focus?.focus({ preventScroll: true });
}
addEventListener("hashchange", follow);

const narrow = matchMedia("(max-width: 60rem)");
function layout() {
  $("contents").open = !narrow.matches;
  $("columns").checked = !narrow.matches;
}
narrow.addEventListener("change", () => { layout(); compare(); });
$("contents").addEventListener("click", (event) => { if (narrow.matches && event.target.matches("a")) $("contents").open = false; });

const links = [...document.querySelectorAll("nav > details > ul > li > a")];
const passing = new IntersectionObserver((seen) => {
  for (const one of seen) if (one.isIntersecting) for (const link of links)
    if (link.hash === "#" + one.target.id) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
}, { rootMargin: "-30% 0px -60% 0px" });
document.querySelectorAll("main > section").forEach((section) => passing.observe(section));

layout();
showMachine();
follow();
