// Samples are written as text nodes only: they may hold markup.
const data = JSON.parse(document.getElementById("data").textContent);
const samples = data.samples, two = data.names.length > 1;
const flagNames = Object.keys(data.flags.meanings), words = name => name.replace("-", " ");
const at = id => document.getElementById(id);
const ROW = 62;

// Control characters, and those that change the direction of text, are shown as escapes, as in the terminal.
const CONTROLS = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;
const visible = text => text.replace(CONTROLS, one => one < "\u0100" ? "\\x" + one.charCodeAt(0).toString(16).padStart(2, "0") : `\\u{${one.codePointAt(0).toString(16)}}`);

function node(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter(child => child != null).map(child => typeof child === "string" ? visible(child) : child));
  return made;
}

// --- flags: those of the list, and those made here, which localStorage keeps where the browser allows it

const byName = new Map(samples.map((sample, row) => [`${sample.task}:${sample.key}`, row]));
const nameOf = sample => `${sample.task}:${sample.key}`;
const listed = samples.map(sample => sample.flag || null);
const flags = listed.slice();
let changes = new Map();
const storage = "smalti eval read " + data.key;

function sameFlag(a, b) {
  return a === b || (a && b && a.flag === b.flag && a.note === b.note && String(a.answers) === String(b.answers));
}

function change(row, flag, note, time) {
  const sample = samples[row], line = { task: sample.task };
  if (sample.id == null) line.index = sample.index; else line.id = sample.id;
  Object.assign(line, { digest: sample.digest, flag, note, time, version: data.flags.line_version });
  if (flag === "answer-acceptable") line.answer = sample.answer;
  const before = listed[row] && listed[row].flag === flag ? listed[row].answers : [];
  const answers = "answer" in line ? [...before.filter(text => text !== line.answer), line.answer] : [];
  flags[row] = flag === null ? null : { flag, note, answers };
  if (sameFlag(flags[row], listed[row])) { flags[row] = listed[row]; changes.delete(row); }
  else changes.set(row, line);
}

function restore() {
  try {
    for (const line of JSON.parse(localStorage.getItem(storage) || "[]")) {
      const row = byName.get(`${line.task}:${line.id ?? line.index}`);
      if (row != null && samples[row].digest === line.digest) change(row, line.flag, line.note, line.time);
    }
  } catch { /* no storage for files in this browser */ }
}

function store() {
  try { localStorage.setItem(storage, JSON.stringify([...changes.values()])); } catch { /* as above */ }
}

function setFlag(row, flag, note) {
  const sample = samples[row];
  if (flag === "answer-acceptable" && !canAccept(sample)) return;
  change(row, flag, flag === null ? "" : note, new Date().toISOString());
  store(); showScores(); showChanges(); showDetail(); showRows();
}

function press(flag) {
  const row = view[place];
  if (row == null) return;
  const now = flags[row], own = now && now.flag === flag && (flag !== "answer-acceptable" || accepts(now, samples[row]));
  setFlag(row, own ? null : flag, now ? now.note : "");
}

const excludes = flag => flag != null && flag.flag !== "answer-acceptable";
const canAccept = sample => sample.correct === false && sample.answer != null;
const accepts = (flag, result) => flag != null && !excludes(flag) && flag.answers.includes(result.answer);

// --- scores of the tasks

function taskScores(task, side) {
  const all = [], remaining = [];
  let excluded = 0, accepted = 0;
  for (const row of rowsOf.get(task)) {
    const sample = samples[row], result = side ? sample.other : sample;
    if (!result) continue;
    const item = { category: sample.category, cluster: sample.cluster, correct: result.correct, nats: result.nats, size: sample.n_bytes };
    all.push(item);
    if (excludes(flags[row])) { excluded += 1; continue; }
    const counts = result.correct === false && accepts(flags[row], result);
    accepted += counts;
    remaining.push(counts ? { ...item, correct: true } : item);
  }
  const before = data.scores[side][task];
  return { before, after: excluded || accepted ? scoreAfter(before, all, remaining) : before, excluded, accepted };
}

function allScores(side) {
  const scores = new Map();
  for (const [name, before] of Object.entries(data.scores[side])) {
    if (rowsOf.has(name)) { scores.set(name, taskScores(name, side)); continue; }
    const members = Object.keys(before.weights).map(task => scores.get(task));
    const [excluded, accepted] = ["excluded", "accepted"].map(effect => sum(members.map(each => each[effect])));
    scores.set(name, { before, after: excluded || accepted ? averageAfter(before, scores) : before, excluded, accepted });
  }
  return scores;
}

const rowsOf = new Map();
samples.forEach((sample, row) => {
  if (!rowsOf.has(sample.task)) rowsOf.set(sample.task, []);
  rowsOf.get(sample.task).push(row);
});

const number = value => value.toFixed(3);
const range = score => score && score.interval ? `${number(score.interval[0])} to ${number(score.interval[1])}` : "-";
const columns = ["task", ...(two ? ["model"] : []), "metric", "before", "95 % interval", "n", "after", "95 % interval", "n", "flags"];

function showScores() {
  const lines = [], chosen = [];
  const tables = data.names.map((_, side) => allScores(side));
  for (const task of new Set(tables.flatMap(table => [...table.keys()]))) for (let side = 0; side < data.names.length; side += 1) {
    const score = tables[side].get(task);
    if (!score) continue;
    const metric = score.before.metric.replaceAll("_", " ");
    const short = each => each ? `${number(each.value)} (n ${each.n.toLocaleString("en-US")})` : "-";
    if (task === state.task) chosen.push(`${two ? data.names[side] : metric} ${short(score.before)}, then ${short(score.after)}`);
    const moved = score.excluded || score.accepted ? " moved" : "";
    const effect = [[score.excluded, "excluded"], [score.accepted, "accepted"]].filter(each => each[0]).map(each => each.join(" "));
    const sides = [score.before, score.after].flatMap((each, late) => [
      [each ? number(each.value) : "-", late ? "n" + moved : "n"], [range(each), "n"],
      [each ? each.n.toLocaleString("en-US") : "0", "n"]]);
    const cells = [[task, "k"], ...(two ? [[data.names[side], "k"]] : []), [metric, ""], ...sides, [effect.join(", ") || "-", ""]];
    lines.push(node("tr", { class: task === state.task ? "on" : "", onclick: () => rowsOf.has(task) && set({ task: task === state.task ? "" : task }) },
      ...cells.map(([text, kind], index) => node("td", { class: kind, "data-of": columns[index] }, text))));
  }
  at("scores").tBodies[0].replaceChildren(...lines);
  const box = at("scores").parentElement, task = state.task || (place < 0 ? "" : samples[view[place]].task);
  const mark = lines.find(each => each.firstChild.textContent === task);
  if (mark) {
    const top = mark.offsetTop - at("scores").tHead.offsetHeight, end = mark.offsetTop + mark.offsetHeight;
    box.scrollTop = Math.min(top, Math.max(box.scrollTop, end - box.clientHeight));
  }
  const count = flags.filter(flag => flag).length;
  const summary = [`before and after ${count === 1 ? "1 flag" : count + " flags"}`, changes.size ? `${changes.size} made in this page` : "", ...chosen];
  at("score-line").textContent = summary.filter(text => text).join("; ");
}

// --- filters, order and address

const DEFAULTS = { task: "", show: "", flag: "", sort: data.order, q: "", item: "" };
let state = { ...DEFAULTS }, view = [], place = -1;
const shows = {
  "": ["all", () => true],
  right: ["correct", sample => sample.correct === true],
  wrong: ["wrong", sample => sample.correct === false],
  unparsed: ["unparsed", sample => sample.unparsed],
  truncated: ["truncated", sample => sample.truncated],
  ...(two ? { differ: ["answered differently", sample => sample.disagreement != null] } : {}),
};
const flagFilters = {
  "": ["any", () => true],
  flagged: ["flagged", row => flags[row] != null],
  none: ["not flagged", row => flags[row] == null],
  ...Object.fromEntries(flagNames.map(name => [name, [words(name), row => flags[row] && flags[row].flag === name]])),
  here: ["made here", row => changes.has(row)],
};
const sorts = {
  confident: ["wrong and confident", sample => sample.confident],
  ...(two ? { disagreement: ["disagreement", sample => sample.disagreement] } : {}),
  unparsed: ["unparsed", sample => sample.unparsed ? 1 : null],
  truncated: ["truncated", sample => sample.truncated ? 1 : null],
  index: ["index", () => 0],
};
const texts = [];
const textOf = row => texts[row] ??= [nameOf(samples[row]), samples[row].prompt, ...(samples[row].choices || []), samples[row].answer,
  samples[row].other && samples[row].other.answer, ...(samples[row].answers || [])].join("\n").toLowerCase();

function set(values) {
  state = { ...state, ...values };
  const words = state.q.toLowerCase(), item = state.item;
  const [, wanted] = shows[state.show] || shows[""], [, flagged] = flagFilters[state.flag] || flagFilters[""];
  const rows = state.task && rowsOf.has(state.task) ? rowsOf.get(state.task) : samples.map((_, row) => row);
  view = rows.filter(row => wanted(samples[row]) && flagged(row) &&
    (!words || textOf(row).includes(words) || (flags[row] && flags[row].note.toLowerCase().includes(words))));
  const key = (sorts[state.sort] || sorts.index)[1], keys = new Float64Array(samples.length);
  for (const row of view) keys[row] = key(samples[row]) ?? -1;
  view.sort((a, b) => keys[b] - keys[a] || a - b);
  place = view.length ? Math.max(0, view.indexOf(byName.get(item))) : -1;
  for (const name of ["task", "show", "flag", "sort"]) at(name).value = state[name];
  if (at("q").value !== state.q) at("q").value = state.q;
  at("count").textContent = `${view.length.toLocaleString("en-US")} of ${samples.length.toLocaleString("en-US")} samples`;
  at("space").style.height = `${view.length * ROW}px`;
  select(place);
  showScores();
}

function select(next) {
  place = view.length ? Math.min(Math.max(next, 0), view.length - 1) : -1;
  state.item = place < 0 ? "" : nameOf(samples[view[place]]);
  const list = at("list"), top = place * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  showRows(); showDetail(true);
  const address = new URLSearchParams(Object.entries(state).filter(([name, value]) => value && value !== DEFAULTS[name]));
  history.replaceState(null, "", "#" + address);
}

function readAddress() {
  const address = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  set({ ...DEFAULTS, ...Object.fromEntries(Object.entries(address).filter(([name]) => name in DEFAULTS)) });
}

// --- the list: only the rows in sight exist

function verdict(result) {
  const mark = result.correct == null ? ["", "–", "not graded"] : result.correct ? ["right", "✓", "correct"] : ["wrong", "✗", "wrong"];
  return node("span", { class: "mark " + mark[0], title: mark[2], "aria-label": mark[2] }, mark[1]);
}

function line(sample) {
  const prompt = sample.nats == null ? sample.prompt.trimEnd().slice(-60) : sample.prompt.slice(0, 160);
  const answer = sample.answer == null ? "" : " → " + sample.answer.trim().slice(0, 120);
  return (prompt + answer).replace(/\s+/g, " ");
}

function share(sample) {
  if (sample.bits_per_byte != null) return number(sample.bits_per_byte) + " b/B";
  return sample.confidence != null ? number(sample.confidence) : "";
}

function showRows() {
  const list = at("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 6);
  const last = Math.min(view.length, Math.ceil((list.scrollTop + (list.clientHeight || 600)) / ROW) + 6), rows = [];
  for (let index = first; index < last; index += 1) {
    const row = view[index], sample = samples[row], flag = flags[row];
    rows.push(node("div", { class: "row", role: "option", id: "row-" + index, "aria-selected": String(index === place), onclick: () => select(index) },
      node("div", {}, verdict(sample), sample.other ? verdict(sample.other) : null, node("span", { class: "name" }, `${sample.task} ${sample.key}`),
        flag ? node("span", { class: "chip" }, words(flag.flag)) : null, node("span", { class: "soft" }, share(sample))),
      node("div", {}, node("span", { class: "text" }, line(sample)))));
    rows[rows.length - 1].style.top = `${index * ROW}px`;
  }
  at("space").replaceChildren(...rows);
  list.setAttribute("aria-activedescendant", place < 0 ? "" : "row-" + place);
}

// --- the sample

function facts(result, title) {
  const shown = [title ? node("b", {}, title) : null];
  const add = (name, value) => value == null || shown.push(node("span", {}, name + " ", node("b", {}, number(value))));
  if (result.correct != null) shown.push(node("span", { class: result.correct ? "right" : "wrong" }, result.correct ? "correct" : "wrong"));
  for (const name of ["unparsed", "truncated"]) if (result[name]) shown.push(node("span", { class: "wrong" }, name));
  if (result.probabilities && result.probabilities.length > 1) add("P(answer)", result.confidence);
  add("P(gold)", result.gold_probability);
  add("bits per byte", result.bits_per_byte);
  return node("div", { class: "facts" }, ...shown);
}

function choices(sample) {
  const sides = [sample, sample.other].filter(each => each);
  const lines = sample.choices.map((text, index) => {
    const marks = [index === sample.gold ? "gold" : null,
      ...sides.map((each, side) => each.choice === index ? (sides.length > 1 ? data.names[side] : "answer") : null)].filter(mark => mark);
    const cells = sides.map(each => {
      const probability = each.probabilities ? each.probabilities[index] : null;
      if (probability == null) return node("td", { class: "n" }, "-");
      const bar = node("i", {});
      bar.style.width = `${100 * probability}%`;
      const detail = each.log_likelihoods && each.log_likelihoods[index] != null ? `${each.log_likelihoods[index]} nats` : null;
      return node("td", { class: "n", title: detail }, node("span", { class: "bar" }, bar), " " + number(probability));
    });
    const picked = index === sample.choice ? " picked" : "";
    return node("tr", { class: (index === sample.gold ? "gold" : "") + picked },
      ...cells, node("td", { class: "text" }, text.replace(/\n$/, ""), ...marks.map(mark => node("span", { class: "tag" }, mark))));
  });
  const head = sides.length > 1 ? node("thead", {}, node("tr", {}, ...data.names.map(name => node("th", {}, name)), node("th"))) : null;
  return node("table", { id: "choices" }, head, node("tbody", {}, ...lines));
}

function section(title, text) {
  return text == null || text === "" ? [] : [node("h3", {}, title), node("pre", {}, text)];
}

function answers(sample) {
  const sides = [sample, sample.other].filter(each => each);
  return [...sides.flatMap((each, side) => [
    ...section(sides.length > 1 ? `Answer of ${data.names[side]}` : "Answer", each.answer),
    ...(each.parsed !== each.answer ? section("Parsed answer", each.parsed) : [])]),
  ...section("Accepted answers", (sample.answers || []).join("\n"))];
}

function buttons(row) {
  const sample = samples[row], flag = flags[row];
  const made = flagNames.map((name, index) => node("button", {
    type: "button", title: data.flags.meanings[name], onclick: () => press(name), disabled: name === "answer-acceptable" && !canAccept(sample),
    "aria-pressed": String(flag != null && flag.flag === name && (excludes(flag) || accepts(flag, sample))),
  }, node("kbd", {}, String(index + 1)), " " + words(name)));
  const note = node("input", {
    id: "note", placeholder: flag ? "Note ( n )" : "Note: flag the sample first", "aria-label": "Note", disabled: !flag,
    onchange: event => setFlag(row, flags[row].flag, event.target.value),
  });
  note.value = flag ? flag.note : "";
  return node("div", { class: "buttons" }, ...made, note);
}

function showDetail(moved) {
  const detail = at("detail");
  if (place < 0) { detail.replaceChildren(node("p", { class: "empty" }, "No sample matches the filters.")); return; }
  const row = view[place], sample = samples[row], flag = flags[row], held = sample.nats != null;
  const accepted = flag && !excludes(flag) && !accepts(flag, sample) ? node("p", { class: "hint" }, "Another answer to this item is accepted: " + flag.answers.join(" | ")) : null;
  const others = Object.entries({ category: sample.category, cluster: sample.cluster, ...sample.more }).filter(([, value]) => value != null);
  const command = `${data.command} --flag '${nameOf(sample).replaceAll("'", "'\\''")}=${flag ? flag.flag : "ambiguous"}'`;
  const prompt = section(held ? `Beginning of the document, ${sample.n_bytes.toLocaleString("en-US")} bytes` : "Prompt", sample.prompt);
  detail.replaceChildren(
    node("h2", {}, `${sample.task} ${sample.key}`), facts(sample, sample.other ? data.names[0] : null),
    ...(sample.other ? [facts(sample.other, data.names[1])] : []), buttons(row), ...(accepted ? [accepted] : []),
    ...prompt,
    ...section("Continuation of each", sample.continuation),
    ...(sample.choices ? [node("h3", {}, "Answers and their probabilities"), choices(sample)] : answers(sample)),
    ...section("Other fields", others.map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join("\n")),
    node("p", { class: "hint" }, "In the terminal: ", node("code", {}, command)));
  if (moved) detail.scrollTop = 0;
  if (!held && prompt.length) prompt[1].scrollTop = prompt[1].scrollHeight; // the question is the end of the prompt
}

// --- export

function showChanges() {
  at("export-open").textContent = changes.size ? `Export ${changes.size === 1 ? "1 flag" : changes.size + " flags"}` : "Export flags";
  at("export-open").classList.toggle("main", changes.size > 0);
  at("export-open").disabled = changes.size === 0;
  at("lines").value = [...changes.values()].map(each => JSON.stringify(each) + "\n").join("");
}

at("export-open").addEventListener("click", () => at("export").showModal());
at("close").addEventListener("click", () => at("export").close());
at("download").addEventListener("click", () => {
  const url = URL.createObjectURL(new Blob([at("lines").value], { type: "application/jsonl" }));
  node("a", { href: url, download: "flags.jsonl" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
});
at("copy").addEventListener("click", async () => {
  try { await navigator.clipboard.writeText(at("lines").value); }
  catch { at("lines").select(); document.execCommand("copy"); }
  at("copy").textContent = "Copied";
});
at("discard").addEventListener("click", () => {
  for (const row of changes.keys()) flags[row] = listed[row];
  changes.clear(); store(); at("export").close(); showChanges(); set({});
});

// --- keys and start

document.addEventListener("keydown", event => {
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape" || (event.key === "Enter" && event.target.tagName === "INPUT")) event.target.blur();
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || at("export").open) return;
  const actions = {
    j: () => select(place + 1), ArrowDown: () => select(place + 1), k: () => select(place - 1), ArrowUp: () => select(place - 1),
    n: () => at("note") && at("note").focus(), "/": () => at("q").focus(), e: () => changes.size && at("export").showModal(),
  };
  flagNames.forEach((name, index) => { actions[String(index + 1)] = () => press(name); });
  if (!actions[event.key]) return;
  event.preventDefault();
  actions[event.key]();
});

function options(id, entries) {
  at(id).replaceChildren(...entries.map(([value, text]) => node("option", { value }, text)));
  at(id).addEventListener("change", event => set({ item: id === "sort" ? "" : state.item, [id]: event.target.value }));
}

at("title").textContent = data.names.join(" and ");
at("about").textContent = [...data.about, data.folder, `flags: ${data.flags.file}` + (data.flags.version ? ` (version ${data.flags.version})` : "")].join(" · ");
if (data.flags.changed.length) {
  at("changed").hidden = false;
  at("changed").textContent = `Flags not applied, because prompt or right answer has changed: ${data.flags.changed.join(", ")}`;
}
at("command").textContent = `${data.command} --import flags.jsonl`;
at("scores").tHead.replaceChildren(node("tr", {}, ...columns.map(name => node("th", { class: /before|after|^n$|95/.test(name) ? "n" : "" }, name))));
const total = samples.length.toLocaleString("en-US");
options("task", [["", `all (${total})`], ...[...rowsOf].map(([task, rows]) => [task, `${task} (${rows.length.toLocaleString("en-US")})`])]);
for (const [id, table] of [["show", shows], ["flag", flagFilters], ["sort", sorts]]) options(id, Object.entries(table).map(([value, [text]]) => [value, text]));
let waiting = 0;
at("q").addEventListener("input", event => { clearTimeout(waiting); waiting = setTimeout(() => set({ q: event.target.value }), 120); });
at("q").addEventListener("change", event => clearTimeout(waiting) || set({ q: event.target.value }));
at("list").addEventListener("scroll", () => requestAnimationFrame(showRows));
addEventListener("resize", showRows);
addEventListener("hashchange", readAddress);
at("score-box").open = innerWidth > 820;
restore(); showChanges(); readAddress();
