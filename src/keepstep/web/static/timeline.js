// The timeline of a run: columns from the server, only the rows in view are in the page, the whole as a canvas above.
import { ask, made, plain, sign } from "./keepstep.js";

const ROW = 26; // height of a row in pixels, as in run.css
const MORE = 12; // rows drawn beyond the edges of the view
const LIVE_MS = 120; // pause between two questions for new records
const AGAIN_MS = 2000; // pause before a question that had no answer is asked again
const LATE_MS = 250; // a browser that draws no frames, as in a tab behind others, has the rows after this all the same
const FIRST = 2000; // records of the first page, so that something is shown at once
const NUMBERS = ["seq", "kind", "outcome", "call", "start", "took", "attempt", "flags"];
const TABLES = { step: "steps", branch: "branches", worker: "workers", agent: "agents", stage: "stages", error: "errors" };
const RETRIED = 1, BY_PERSON = 2, UNDO = 8, CACHED = 16;
const ENDS = new Set(["step completed", "step failed", "step cancelled"]);
const WAITS = new Set(["timer", "signal received", "child", "agent completed", "barrier", "reply"]);
const SHOWN = [["all", "All records"], ["open", "Not done"], ["failed", "Failures"], ["waits", "Waits and signals"], ["people", "By people"], ["steps", "Steps only"]];

const root = document.body.dataset.root ?? "";
function span(ms) {
  if (ms < 1000) return `${ms < 10 ? +ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
  const minutes = Math.floor(Math.round(ms / 1000) / 60), rest = Math.round(ms / 1000) % 60;
  if (minutes < 60) return rest && minutes < 10 ? `${minutes} min ${rest} s` : `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} days`;
}
class Timeline extends HTMLElement {
  connectedCallback() {
    this.began = performance.now();
    this.data = Object.fromEntries([...NUMBERS, ...Object.keys(TABLES)].map((name) => [name, []]));
    this.tables = Object.fromEntries(Object.keys(TABLES).map((name) => [name, { texts: [], places: new Map() }]));
    this.leases = []; this.marks = new Map(); this.details = new Map(); this.gone = []; this.doubt = new Set();
    this.head = {}; this.last = 0; this.from = 0; this.to = 1; this.zoom = null;
    this.rows = []; this.pool = []; this.chosen = null; this.open = new Set(); this.loading = false;
    const asked = new URLSearchParams(location.search);
    this.filter = { q: asked.get("q") ?? "", show: asked.get("show") ?? "all", fold: asked.get("fold") === "1" };
    this.build();
    this.listen();
    this.more(FIRST);
  }

  disconnectedCallback() { this.left?.abort(); }

  // -- parts ------------------------------------------------------------------------------------------------------

  build() {
    this.search = made("input", { type: "search", id: "tl-q", placeholder: "Filter by step, error, worker…", value: this.filter.q, autocomplete: "off", spellcheck: "false", "data-search": true });
    this.show = made("select", { id: "tl-show" }, ...SHOWN.map(([value, name]) => made("option", { value, selected: value === this.filter.show }, name)));
    this.fold = made("input", { type: "checkbox", id: "tl-fold", checked: this.filter.fold });
    this.count = made("output", { class: "dim", for: "tl-q tl-show" });
    this.fit = made("button", { type: "button", class: "button", hidden: true }, "Whole time");
    this.canvas = made("canvas", { "aria-hidden": "true" });
    this.brush = made("div", { class: "brush", hidden: true });
    this.axis = made("div", { class: "axis", "aria-hidden": "true" }, made("span"), made("span"), made("span"));
    this.space = made("div", { class: "space", role: "presentation" });
    this.view = made("div", { class: "view", tabindex: "0", role: "listbox", "aria-label": "Records" }, this.space);
    this.nothing = made("p", { class: "nothing dim", role: "status", hidden: true });
    this.pane = made("aside", { class: "record", "aria-label": "Record", hidden: true });
    this.append(
      made("div", { class: "tools", role: "search" },
        made("label", { class: "hidden", for: "tl-q" }, "Filter records"), this.search,
        made("label", { class: "hidden", for: "tl-show" }, "Records to show"), this.show,
        made("label", { class: "check", for: "tl-fold" }, this.fold, " Fold repeats"), this.fit, this.count),
      made("div", { class: "minimap" }, this.canvas, this.brush),
      this.axis,
      this.nothing,
      made("div", { class: "panes" }, this.view, this.pane));
  }

  listen() {
    this.left = new AbortController();
    const on = (target, kind, what, options = {}) => target.addEventListener(kind, what, { signal: this.left.signal, ...options });
    on(this.view, "scroll", () => this.later(), { passive: true });
    on(this.view, "click", (event) => {
      const row = event.target.closest(".row"), other = event.target.closest("[data-run]");
      if (other) location.assign(`${root}/runs/${encodeURIComponent(other.dataset.run)}`); // by keys: the link in the record
      else if (row) this.act(this.rows[+row.dataset.i]);
    });
    on(this.search, "input", () => { this.filter.q = this.search.value; this.refilter(); });
    on(this.show, "change", () => { this.filter.show = this.show.value; this.refilter(); });
    on(this.fold, "change", () => { this.filter.fold = this.fold.checked; this.refilter(); });
    on(this.fit, "click", () => { this.zoom = null; this.refilter(); });
    on(document, "keydown", (event) => this.key(event));
    on(window, "hashchange", () => this.fromHash());
    on(document, "ks:theme", () => this.later(true));
    on(matchMedia("(prefers-color-scheme: dark)"), "change", () => this.later(true));
    on(document, "ks:stream", (event) => this.heard(event.detail));
    const watcher = new ResizeObserver(() => this.later(true));
    watcher.observe(this.canvas);
    watcher.observe(this.view);
    this.left.signal.addEventListener("abort", () => watcher.disconnect());
    const at = (event) => Math.max(0, Math.min(1, (event.clientX - this.canvas.getBoundingClientRect().left) / this.canvas.clientWidth));
    on(this.canvas, "pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      this.drag = [at(event), at(event)];
    });
    on(this.canvas, "pointermove", (event) => { if (this.drag) { this.drag[1] = at(event); this.placeBrush(...this.drag); } });
    on(this.canvas, "pointerup", () => {
      if (!this.drag) return;
      const [a, b] = this.drag.sort((one, other) => one - other), length = this.to - this.from;
      this.drag = null;
      if (b - a > 0.005) this.zoom = [this.from + a * length, this.from + b * length];
      else if (!this.zoom) this.reveal(this.nearest(this.from + a * length));
      else this.zoom = null;
      this.refilter();
    });
  }

  // -- data -------------------------------------------------------------------------------------------------------

  // Fetch what is new: all pages after the last record. Further calls meanwhile make it look once more.
  async more(limit) {
    if (this.loading) { this.again = true; return; }
    this.loading = true;
    try {
      do {
        this.again = false;
        let next = this.last, size = limit;
        while (next !== null) {
          const page = await ask(`${this.getAttribute("src")}?after=${next}${size ? `&limit=${size}` : ""}`);
          next = page.next;
          size = limit = undefined;
          this.add(page);
        }
      } while (this.again);
      this.dataset.ready = Math.round(performance.now() - this.began);
      this.count.title = "";
    } catch (error) {
      this.count.textContent = error.status ? error.message : "The server does not answer; the page goes on when it does.";
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.more(), AGAIN_MS);
    } finally {
      this.loading = false;
    }
  }

  heard({ kind, data }) {
    if (kind === "changed") return;
    if (kind === "head") { this.head = { ...this.head, ...data }; if (this.kinds) this.refilter(true); }
    clearTimeout(this.timer);
    const wait = Math.max(0, LIVE_MS - (performance.now() - (this.asked ?? 0)));
    this.timer = setTimeout(() => { this.asked = performance.now(); this.more(); }, wait);
  }

  add(page) {
    const { columns, names } = page, data = this.data;
    const places = Object.fromEntries(Object.entries(TABLES).map(([name, table]) => [name, names[table].map((text) => this.place(name, text))]));
    const first = columns.seq.findIndex((seq) => seq > this.last); // a page that was asked for twice changes nothing
    this.kinds = names.kinds; this.outcomes = names.outcomes;
    if (first >= 0) {
      for (const name of NUMBERS) { const to = data[name], from = columns[name]; for (let i = first; i < from.length; i++) to.push(from[i]); }
      for (const name of Object.keys(TABLES)) { const to = data[name], from = columns[name], map = places[name]; for (let i = first; i < from.length; i++) to.push(map[from[i]]); }
      const before = this.last;
      this.last = columns.seq.at(-1);
      this.leases.push(...page.leases.filter((one) => one.seq > before));
      for (const one of page.details) this.details.set(one.seq, one);
    }
    this.zero = page.zero; this.gone = page.superseded; this.doubt = new Set(page.in_doubt); this.total = page.seq;
    if (page.worker !== this.head.worker || page.epoch !== this.head.epoch) this.head.alive = null; // of the worker before
    this.head = { ...this.head, status: page.status, epoch: page.epoch, worker: page.worker, recoveries: page.recoveries, seq: page.seq };
    this.marks = new Map(this.leases.filter((one, i) => i > 0 || one.recovery).map((one) => [one.seq, one]));
    this.times();
    this.refilter(true);
    if (this.chosen === null) this.fromHash();
  }

  place(name, text) {
    const table = this.tables[name];
    let place = table.places.get(text);
    if (place === undefined) { place = table.texts.length; table.places.set(text, place); table.texts.push(text); }
    return place;
  }

  text(name, i) { return this.tables[name].texts[this.data[name][i]]; }
  kind(i) { return this.kinds[this.data.kind[i]]; }
  outcome(i) { return this.outcomes[this.data.outcome[i]]; }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog, [contenteditable]")) return;
    const inside = this.contains(event.target) || event.target === document.body || event.target.id === "main";
    const step = { j: 1, k: -1, "[": -1, "]": 1 }[event.key] ?? (inside ? { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity }[event.key] : undefined);
    if (step !== undefined) {
      event.preventDefault();
      this.move(step, event.key === "[" || event.key === "]");
    } else if ((event.key === "Enter" || event.key === " ") && document.activeElement === this.view) {
      event.preventDefault();
      const row = this.rows[this.at()];
      if (row) this.act(row);
    } else if (event.key === "Escape" && !this.pane.hidden) this.close();
    else if (event.key === "0" && this.zoom) { this.zoom = null; this.refilter(); }
    else if (inside && (event.key === "+" || event.key === "-")) this.scale(event.key === "+" ? 0.5 : 2);
  }

  // Show a shorter or longer time around the chosen record.
  scale(factor) {
    const [from, to] = this.zoom ?? [this.from, this.to], i = this.rows[this.at()];
    const middle = typeof i === "number" ? this.data.start[i] + this.data.took[i] / 2 : (from + to) / 2, half = (to - from) * factor / 2;
    this.zoom = 2 * half >= this.to - this.from ? null : [middle - half, middle + half];
    this.refilter();
  }

  name(i) {
    const step = plain(this.text("step", i)), call = this.data.call[i], detail = this.details.get(this.data.seq[i]);
    const kind = this.kind(i);
    if (kind === "published") return `publish ${plain(detail?.key ?? "")}`;
    if (step) return call > 1 ? `${step}#${call}` : step;
    return detail?.act ? plain(detail.act) : kind;
  }

  // The key of a call, to find what belongs together.
  call(i) { return `${this.data.branch[i]}/${this.data.step[i]}#${this.data.call[i]}`; }
  isGone(seq) {
    let a = 0, b = this.gone.length - 1;
    while (a <= b) { const m = (a + b) >> 1; if (seq < this.gone[m][0]) b = m - 1; else if (seq > this.gone[m][1]) a = m + 1; else return true; }
    return false;
  }
  isInDoubt(i) {
    if (!this.doubt.size || this.kind(i) !== "step started") return false;
    const branch = this.text("branch", i);
    return this.doubt.has(`${branch ? `${branch}/` : ""}${this.text("step", i)}#${this.data.call[i]}`);
  }

  // The look of a record: a class, a sign, and words after its name.
  look(i) {
    const kind = this.kind(i), outcome = this.outcome(i), flags = this.data.flags[i];
    if (this.isInDoubt(i)) return ["doubt", "set-aside", "in doubt: a person must tell what happened"];
    if (flags & RETRIED) return ["retried", "recovering", `attempt ${this.data.attempt[i]} failed, is tried again`];
    if (kind === "superseded") return ["person", "fork", "records before it no longer count"];
    if (kind === "recovered") return ["recovered", "recovering", ""];
    if (outcome === "failure" || kind === "error") return ["failed", "failed", kind === "error" ? "set aside" : "failed"];
    if (outcome === "cancelled") return ["cancelled", "cancelled", "cancelled"];
    if (flags & UNDO && kind !== "step completed") return ["person", "fork", "undo"];
    if (kind === "step started") return ["started", "running", "started"];
    if (kind === "wait started") return ["waiting", "waiting", "begins to wait"];
    if (kind === "step completed") return ["done", "completed", flags & CACHED ? "result of another run" : ""];
    if (kind === "run started") return ["run", "running", ""];
    if (kind === "run finished") return ["run", "completed", ""];
    return [WAITS.has(kind) ? "wait" : "note", WAITS.has(kind) ? "waiting" : "info", kind];
  }

  times() {
    const { start, took } = this.data, n = start.length;
    let from = Infinity, to = 0;
    for (let i = 0; i < n; i++) { if (start[i] < from) from = start[i]; const end = start[i] + took[i]; if (end > to) to = end; }
    this.from = n ? from : 0;
    this.to = Math.max(to, this.from + 1);
  }

  // -- what is shown ----------------------------------------------------------------------------------------------

  refilter(keeps = false) {
    const { q, show, fold } = this.filter, n = this.data.seq.length, words = q.toLowerCase().split(/\s+/).filter(Boolean);
    if (!keeps) {
      const asked = new URLSearchParams({ ...(q && { q }), ...(show !== "all" && { show }), ...(fold && { fold: "1" }) });
      history.replaceState(history.state, "", `${location.pathname}${asked.size ? `?${asked}` : ""}${location.hash}`);
    }
    const found = words.length ? this.hits(words) : null;
    const done = show === "open" ? this.doneCalls() : null;
    const rows = [], groups = new Map();
    let some = 0;
    const isPlain = !found && show === "all" && !this.zoom;
    for (let i = 0; i < n; i++) {
      const mark = this.marks.get(this.data.seq[i]);
      if (mark && show !== "steps") rows.push({ mark });
      if (!isPlain && !this.isShown(i, found, done)) continue;
      some++;
      if (fold) this.addFolded(rows, groups, i);
      else rows.push(i);
    }
    this.rows = fold ? rows.flatMap((row) => (row.items ? (row.items.length < 2 ? row.items : this.open.has(row.key) ? [row, ...row.items] : [row]) : [row])) : rows;
    const now = this.now();
    if (now) this.rows.push(now);
    this.count.textContent = some === n ? `${n.toLocaleString()} ${n === 1 ? "record" : "records"}` : `${some.toLocaleString()} of ${n.toLocaleString()} records`;
    if (this.total > n) this.count.textContent += `, loading ${this.total.toLocaleString()}`;
    this.fit.hidden = !this.zoom;
    this.nothing.hidden = some > 0 || this.total > n;
    this.nothing.textContent = n ? "No record fits the filter." : "No records yet: the worker that begins the run writes the first one.";
    const { view } = this, isLong = view.scrollHeight > view.clientHeight;
    const follows = keeps && isLong && view.scrollTop + view.clientHeight > view.scrollHeight - ROW / 2;
    this.space.style.height = `${this.rows.length * ROW}px`;
    if (follows) view.scrollTop = view.scrollHeight;
    this.later(true);
  }

  // The place that matches each text of the tables, so that 50,000 records need few comparisons.
  hits(words) {
    return words.map((word) => Object.fromEntries([
      ...Object.entries(this.tables).map(([name, table]) => [name, table.texts.map((text) => text.toLowerCase().includes(word))]),
      ["kind", this.kinds.map((text) => text.includes(word))], ["outcome", this.outcomes.map((text) => text.includes(word))],
      ["seq", /^#?\d+$/.test(word) ? +word.replace("#", "") : -1]]));
  }

  doneCalls() {
    const done = new Set(), n = this.data.seq.length;
    for (let i = 0; i < n; i++) if (!(this.data.flags[i] & RETRIED) && (ENDS.has(this.kind(i)) || WAITS.has(this.kind(i)))) done.add(this.call(i));
    return done;
  }

  isShown(i, found, done) {
    const data = this.data, kind = this.kind(i), outcome = this.outcome(i), flags = data.flags[i];
    if (this.zoom && (data.start[i] > this.zoom[1] || data.start[i] + data.took[i] < this.zoom[0])) return false;
    if (found && !found.every((one) => one.seq === data.seq[i] || one.kind[data.kind[i]] || one.outcome[data.outcome[i]] || Object.keys(TABLES).some((name) => one[name][data[name][i]]))) return false;
    switch (this.filter.show) {
      case "open": return outcome === "failure" || (kind === "step started" || kind === "wait started") && !done.has(this.call(i)) || kind === "error";
      case "failed": return outcome === "failure" || kind === "error" || this.isInDoubt(i);
      case "waits": return WAITS.has(kind) || kind === "wait started";
      case "people": return Boolean(flags & BY_PERSON) || kind === "superseded" || Boolean(this.details.get(data.seq[i])?.actor);
      case "steps": return ENDS.has(kind) || kind === "step started";
      default: return true;
    }
  }

  // Repeats of one step, in a loop or in the items of a map, are one row at the place of the first.
  addFolded(rows, groups, i) {
    const data = this.data, branch = this.text("branch", i).replace(/\d+/g, "*"), name = this.text("step", i);
    const key = `${branch}/${name}/${this.kind(i)}/${data.flags[i] & RETRIED}`;
    if (!name) { rows.push(i); return; }
    let group = groups.get(key);
    if (!group) {
      group = { items: [], key, name, from: Infinity, to: 0, took: 0, failed: 0, gone: 0 };
      groups.set(key, group);
      rows.push(group);
    }
    group.items.push(i);
    group.from = Math.min(group.from, data.start[i]);
    group.to = Math.max(group.to, data.start[i] + data.took[i]);
    group.took += data.took[i];
    if (data.outcome[i] === 1) group.failed++;
  }

  // The lease under which nothing is recorded yet, or a worker that is dead.
  now() {
    const { worker, epoch, alive, status } = this.head, last = this.leases.at(-1);
    if (!worker) return null;
    if (alive === false) return { crash: `Worker ${plain(worker)} is dead; the run waits to be recovered` };
    if (epoch > (last?.epoch ?? 0)) {
      const verb = status === "recovering" ? "recovers the run" : "holds the run";
      return { lease: `Worker ${plain(worker)} ${verb}, lease ${epoch}; nothing is recorded yet`, recovery: status === "recovering" };
    }
    return null;
  }

  // -- drawing ----------------------------------------------------------------------------------------------------

  later(whole = false) {
    this.whole ||= whole;
    if (this.due) return;
    const now = () => {
      cancelAnimationFrame(this.due);
      clearTimeout(this.late);
      this.due = 0;
      this.draw();
      if (this.whole) { this.whole = false; this.map(); }
    };
    this.due = requestAnimationFrame(now);
    this.late = setTimeout(now, LATE_MS);
  }

  draw() {
    if (!this.kinds) return;
    const view = this.view, [from, to] = this.zoom ?? [this.from, this.to], length = to - from || 1;
    const first = Math.max(0, Math.floor(view.scrollTop / ROW) - MORE), last = Math.min(this.rows.length, Math.ceil((view.scrollTop + view.clientHeight) / ROW) + MORE);
    let p = 0;
    for (let i = first; i < last; i++, p++) this.fill(this.pool[p] ??= this.empty(), i, from, length);
    for (; p < this.pool.length; p++) this.pool[p].row.hidden = true;
    const [a, b, c] = this.axis.children;
    a.textContent = span(from - this.from); b.textContent = span((from + to) / 2 - this.from); c.textContent = span(to - this.from);
    const bars = this.pool[0]?.bar.parentElement; // the axis stands above the bars
    if (bars?.offsetWidth) {
      this.axis.style.paddingLeft = `${bars.offsetLeft}px`;
      this.axis.style.paddingRight = `${Math.max(0, this.axis.clientWidth - bars.offsetLeft - bars.offsetWidth)}px`;
    }
    const at = this.at();
    if (at >= 0) view.setAttribute("aria-activedescendant", `tl-${at}`); else view.removeAttribute("aria-activedescendant");
  }

  empty() {
    const parts = { seq: made("span", { class: "seq" }), sign: made("span", { class: "mark" }), name: made("span", { class: "name" }), words: made("span", { class: "words" }), bar: made("i"), took: made("span", { class: "took" }) };
    parts.row = made("div", { class: "row", role: "option" }, parts.seq, made("span", { class: "what" }, parts.sign, parts.name, parts.words), made("span", { class: "bars" }, parts.bar), parts.took);
    parts.signed = "";
    this.space.append(parts.row);
    return parts;
  }

  fill(parts, i, from, length) {
    const one = this.rows[i], row = parts.row;
    row.hidden = false;
    row.dataset.i = i;
    row.id = `tl-${i}`;
    row.style.transform = `translateY(${i * ROW}px)`;
    row.setAttribute("aria-setsize", this.rows.length);
    row.setAttribute("aria-posinset", i + 1);
    if (typeof one !== "number") { this.fillOther(parts, one, from, length); return; }
    const data = this.data, seq = data.seq[one], [look, signed, words] = this.look(one), detail = this.details.get(seq);
    const isGone = this.isGone(seq), branch = this.text("branch", one), error = this.text("error", one), agent = this.text("agent", one) || this.text("stage", one);
    row.className = `row l-${look}${isGone ? " gone" : ""}${this.leaseOf(seq) % 2 ? " odd" : ""}`;
    row.setAttribute("aria-selected", this.chosen === seq);
    this.sign(parts, signed);
    parts.seq.textContent = seq;
    parts.name.textContent = (branch ? `${plain(branch)}/` : "") + this.name(one);
    const links = detail?.child || detail?.continued_as;
    const says = [words !== parts.name.textContent && words, error && plain(error), isGone && "no longer counts", agent && plain(agent), detail?.actor && `by ${plain(detail.actor)}`, detail?.signal && `signal ${plain(detail.signal)}`, detail?.next && `→ ${plain(detail.next)}`].filter(Boolean);
    parts.words.textContent = says.join(" · ");
    if (links) parts.words.append(says.length ? " · " : "", made("span", { class: "to", "data-run": links }, plain(links)));
    const waited = look === "wait" && !data.took[one] && one > 0;
    const start = waited ? Math.min(data.start[one], data.start[one - 1] + data.took[one - 1]) : data.start[one];
    // A wait that goes on has no length yet: the time in its record is that in the memory of the worker.
    const took = waited ? data.start[one] - start : look === "waiting" ? 0 : data.took[one];
    this.bar(parts, start, took, from, length);
    parts.took.textContent = took ? span(took) : "";
  }

  fillOther(parts, one, from, length) {
    const row = parts.row;
    row.setAttribute("aria-selected", this.chosen === one.key && one.key !== undefined);
    parts.seq.textContent = "";
    parts.took.textContent = "";
    parts.bar.hidden = true;
    if (one.items) {
      row.className = `row group${one.failed ? " l-failed" : ""}`;
      this.sign(parts, one.failed ? "failed" : "completed");
      parts.seq.textContent = this.open.has(one.key) ? "▾" : "▸";
      parts.name.textContent = plain(one.name);
      const branch = one.key.split("/").slice(0, -3).join("/");
      parts.words.textContent = `× ${one.items.length.toLocaleString()} ${plain(branch)}${one.failed ? ` · ${one.failed.toLocaleString()} failed` : ""}`;
      this.bar(parts, one.from, one.to - one.from, from, length);
      parts.took.textContent = one.took ? span(one.took) : "";
    } else if (one.mark) {
      const { mark } = one;
      row.className = `row lease${mark.recovery ? " crash" : ""}`;
      this.sign(parts, mark.recovery ? "crash" : "worker");
      parts.name.textContent = mark.recovery ? `Worker ${plain(mark.lost || "before")} crashed` : `Lease ${mark.epoch}`;
      const apart = mark.ended === null ? "" : ` after ${span(mark.at - mark.ended)}`;
      parts.words.textContent = mark.recovery ? `recovered by ${plain(mark.worker)}, lease ${mark.epoch}` : `worker ${plain(mark.worker)} took the ${mark.before || "queued"} run${apart}`;
    } else {
      row.className = `row lease${one.crash || one.recovery ? " crash" : ""}`;
      this.sign(parts, one.crash || one.recovery ? "crash" : "worker");
      parts.name.textContent = one.crash ?? one.lease;
      parts.words.textContent = "";
    }
  }

  sign(parts, name) {
    if (parts.signed === name) return;
    parts.signed = name;
    parts.sign.replaceChildren(sign(name));
  }

  bar(parts, start, took, from, length) {
    parts.bar.hidden = false;
    const left = Math.max(0, (start - from) / length), right = Math.min(1, (start + took - from) / length);
    parts.bar.style.left = `${Math.min(left, 1) * 100}%`;
    parts.bar.style.width = `${Math.max(0, right - left) * 100}%`;
  }

  leaseOf(seq) {
    let a = 0, b = this.leases.length - 1, found = 0;
    while (a <= b) { const m = (a + b) >> 1; if (this.leases[m].seq <= seq) { found = m; a = m + 1; } else b = m - 1; }
    return found;
  }

  // One column of pixels at a time: how many records ended then, and whether one failed. Below, a band for each lease.
  map() {
    const canvas = this.canvas, w = canvas.clientWidth, h = canvas.clientHeight, scale = devicePixelRatio || 1;
    if (!w || !this.kinds) return;
    if (canvas.width !== w * scale || canvas.height !== h * scale) { canvas.width = w * scale; canvas.height = h * scale; }
    const g = canvas.getContext("2d"), { start, took, outcome, seq } = this.data, n = seq.length, length = this.to - this.from;
    const styles = getComputedStyle(this), colour = (name) => styles.getPropertyValue(name).trim();
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, w, h);
    const all = new Uint32Array(w + 1), bad = new Uint8Array(w + 1), x = (at) => Math.min(w - 1, Math.max(0, Math.floor((at - this.from) / length * (w - 1))));
    for (let i = 0; i < n; i++) { const place = x(start[i] + took[i]); all[place]++; if (outcome[i] === 1) bad[place] = 1; }
    const top = Math.log1p(all.reduce((one, other) => Math.max(one, other), 1)), room = h - 8;
    for (let i = 0; i < w; i++) {
      if (!all[i]) continue;
      const high = Math.max(2, Math.log1p(all[i]) / top * (room - 4));
      g.fillStyle = colour(bad[i] ? "--bad" : "--live");
      g.fillRect(i, room - high, 1, high);
    }
    this.leases.forEach((one, i) => {
      const begin = x(one.at), end = i + 1 < this.leases.length ? x(this.leases[i + 1].ended ?? this.leases[i + 1].at) : w;
      g.fillStyle = colour(i % 2 ? "--odd" : "--idle");
      g.fillRect(begin, h - 5, Math.max(2, end - begin), 4);
      if (one.recovery) { g.fillStyle = colour("--bad"); g.fillRect(begin, 0, 2, h - 6); }
    });
    if (this.zoom) this.placeBrush(...this.zoom.map((at) => (at - this.from) / length)); else this.brush.hidden = true;
  }

  placeBrush(a, b) {
    this.brush.hidden = false;
    this.brush.style.left = `${Math.min(a, b) * 100}%`;
    this.brush.style.width = `${Math.abs(b - a) * 100}%`;
  }

  // -- choosing ---------------------------------------------------------------------------------------------------

  at() { return this.chosen === null ? -1 : this.rows.findIndex((row) => (typeof row === "number" ? this.data.seq[row] === this.chosen : row.key !== undefined && row.key === this.chosen)); }

  nearest(at) {
    const { start } = this.data;
    let best = 0;
    for (let i = 1; i < start.length; i++) if (Math.abs(start[i] - at) < Math.abs(start[best] - at)) best = i;
    return this.data.seq[best];
  }

  move(step, opens) {
    const rows = this.rows, now = this.at(), n = rows.length;
    if (!n) return;
    let next = Math.max(0, Math.min(n - 1, now < 0 && step === -1 ? n - 1 : now + step));
    const way = step < 0 && step !== -Infinity || step === Infinity ? -1 : 1; // marks of leases are passed over
    while (rows[next] !== undefined && typeof rows[next] !== "number" && !rows[next].items) next += way;
    const row = rows[next];
    if (row === undefined) return;
    if (typeof row === "number") this.choose(this.data.seq[row], opens || !this.pane.hidden);
    else { this.chosen = row.key; this.reveal(row.key); this.later(); }
    if (!opens) this.view.focus({ preventScroll: true });
  }

  act(row) {
    if (typeof row === "number") this.choose(this.data.seq[row], true);
    else if (row.items) {
      if (this.open.has(row.key)) this.open.delete(row.key); else this.open.add(row.key);
      this.chosen = row.key;
      this.refilter(true);
    }
  }

  choose(seq, opens) {
    this.chosen = seq;
    history.replaceState(history.state, "", `${location.pathname}${location.search}#${seq}`);
    this.reveal(seq);
    this.later();
    if (opens) { clearTimeout(this.soon); this.soon = setTimeout(() => this.record(seq), 40); }
  }

  reveal(chosen) {
    const before = this.chosen;
    this.chosen = chosen;
    const i = this.at(), view = this.view, y = i * ROW;
    this.chosen = before;
    if (i < 0) return;
    if (y < view.scrollTop) view.scrollTop = y;
    else if (y + ROW > view.scrollTop + view.clientHeight) view.scrollTop = y + ROW - view.clientHeight;
  }

  fromHash() {
    const asked = /^#(\d+)$/.exec(location.hash);
    if (!asked) return;
    const seq = +asked[1];
    if (seq > this.last || seq === this.chosen) return;
    this.choose(seq, true);
  }

  close() {
    this.pane.hidden = true;
    this.classList.remove("opened");
    this.view.focus({ preventScroll: true });
  }

  // -- one record -------------------------------------------------------------------------------------------------

  async record(seq) {
    const address = `${this.getAttribute("record")}${seq}`;
    this.pane.hidden = false;
    this.classList.add("opened");
    this.wanted = seq;
    let data;
    try { data = await ask(address); } catch (error) {
      if (this.wanted === seq) this.pane.replaceChildren(this.heading(`Record ${seq}`), made("p", { class: error.type === "keepstep:encrypted" ? "notice" : "wrong" }, error.type === "keepstep:encrypted" ? "Its values are hidden: this server has no key for them." : error.message));
      return;
    }
    if (this.wanted !== seq) return; // another one was chosen meanwhile
    const detail = this.details.get(seq);
    const at = (text) => (text ? made("time", { datetime: text }, new Date(text).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" })) : null);
    const took = data.started_at && data.finished_at ? span(new Date(data.finished_at) - new Date(data.started_at)) : null;
    const facts = [["Step", data.step], ["Outcome", data.outcome], ["Attempt", data.attempt || null], ["Cause", data.trigger === "automatic" ? null : data.trigger], ["Worker", data.worker], ["Agent", data.agent], ["Stage", data.stage],
      ["Began", at(data.started_at)], ["Ended", at(data.finished_at)], ["Took", took], ["Tried again", at(data.retry_at)], ["Taken from", data.cached],
      ["Child", this.runLink(detail?.child)], ["Goes on as", this.runLink(detail?.continued_as)], ["Sent to", this.runLink(detail?.to)]];
    const list = made("dl", { class: "facts" });
    for (const [name, value] of facts) if (value !== null && value !== undefined && value !== "") list.append(made("dt", {}, name), made("dd", {}, typeof value === "object" ? value : plain(value)));
    const parts = [this.heading(`Record ${seq}: ${data.kind}`), list];
    if (this.isGone(seq)) parts.push(made("p", { class: "notice" }, "This record no longer counts: a rewind or a retry went back to before it."));
    if (data.error) parts.push(...this.error(data.error));
    if (data.input !== null && data.input !== undefined) parts.push(made("h3", {}, "Input"), this.json(data.input, "Input", address));
    else if (data.input_bytes) parts.push(made("p", { class: "dim" }, `Its input of ${data.input_bytes.toLocaleString()} bytes is too large to be recorded.`));
    if (data.value !== null && data.value !== undefined) parts.push(made("h3", {}, "Value"), this.json(data.value, "Value", address));
    if (data.data && Object.keys(data.data).length) parts.push(made("details", {}, made("summary", {}, "Details"), this.json(data.data, "Details", address)));
    const travel = `${this.getAttribute("travel")}${seq}`;
    parts.push(made("div", { class: "acts" }, made("a", { class: "button", href: travel }, "Fork or rewind from here…"), made("a", { class: "button", href: root + address }, "Raw record")));
    this.pane.replaceChildren(...parts);
    this.pane.scrollTop = 0;
  }

  runLink(id) { return id ? made("a", { href: `${root}/runs/${encodeURIComponent(id)}` }, plain(id)) : null; }

  heading(text) {
    const close = made("button", { type: "button", class: "plain", "aria-label": "Close the record" }, sign("close"));
    close.addEventListener("click", () => this.close());
    return made("header", {}, made("h2", {}, text), close);
  }

  error(error) {
    const parts = [made("h3", {}, "Error"), made("p", { class: "wrong message" }, made("b", {}, plain(error.type)), `: ${cut(plain(error.message), 4000)}`)];
    if (error.frames?.length) parts.push(made("ol", { class: "frames" }, ...error.frames.map((frame) => made("li", {}, made("code", {}, plain(`${frame.file.split(/[\\/]/).at(-1)}:${frame.line} in ${frame.function}`)), " ", made("code", { class: "dim" }, plain(frame.source ?? ""))))));
    if (error.traceback) parts.push(made("details", {}, made("summary", {}, "Traceback"), made("pre", { class: "value", tabindex: "0", "aria-label": "Traceback" }, cut(error.traceback, 20000))));
    return parts;
  }

  json(value, name, address) {
    const text = JSON.stringify(value, null, 2), box = made("pre", { class: "value", tabindex: "0", "aria-label": name }, cut(text, 20000));
    return text.length <= 20000 ? box : made("div", {}, box, made("p", {}, made("a", { href: root + address }, "All of it")));
  }
}

const cut = (text, most) => (text.length <= most ? text : `${text.slice(0, most)}… ${(text.length - most).toLocaleString()} characters more`);

customElements.define("ks-timeline", Timeline);
