// The scrubber: all records of a run as one strip, drawn on a canvas, so that 50,000 of them cost no more than ten.
import { ask, made, refresh } from "./keepstep.js";

const FAILED = 1, GONE = 2, RECOVERED = 4, BY_PERSON = 8; // what a record is marked with
const FLAG_PERSON = 2; // a bit of `flags` in a timeline

class Scrubber extends HTMLElement {
  connectedCallback() {
    if (this.canvas) return;
    this.seq = Number(this.dataset.seq);
    this.at = Number(this.dataset.at);
    this.from = this.dataset.from === undefined ? null : Number(this.dataset.from);
    this.marks = new Uint8Array(this.seq + 1); // by record number
    this.kinds = []; this.steps = []; // names by record number
    this.loaded = 0;
    this.canvas = made("canvas", { role: "slider", tabindex: "0", "aria-label": "Record", "aria-valuemin": "0" });
    this.now = made("b");
    this.note = made("span");
    const legend = made("span", { class: "legend" }, "tall: failed · struck: superseded · ▲ recovered · ● by a person · keys [ ] step, { } failures");
    this.append(this.canvas, made("p", { class: "told" }, this.now, this.note, legend));
    this.pointing();
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("keydown", (event) => this.bracket(event));
    document.addEventListener("ks:theme", () => this.draw());
    document.addEventListener("ks:refreshed", () => this.grow());
    document.addEventListener("click", (event) => {
      const link = event.target.closest("a[data-seq]");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.go(Number(link.dataset.seq));
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.tell();
    this.load();
  }

  // Read the timeline page by page; each page is drawn as it comes.
  async load() {
    if (this.loading) return;
    this.loading = true;
    try {
      let page;
      do {
        page = await ask(`/api/v1${this.dataset.path}/timeline?after=${this.loaded}`);
        this.take(page);
        this.draw();
        this.tell();
      } while (page.next !== null);
      this.dataset.loaded = String(this.loaded);
    } catch (error) {
      this.note.textContent = error.message;
    }
    this.loading = false;
  }

  take(page) {
    const { columns, names } = page;
    if (page.seq > this.seq) this.longer(page.seq);
    const failed = names.outcomes.indexOf("failure");
    columns.seq.forEach((seq, i) => {
      const step = names.steps[columns.step[i]], branch = names.branches[columns.branch[i]], call = columns.call[i];
      this.kinds[seq] = names.kinds[columns.kind[i]];
      this.steps[seq] = (branch ? `${branch}/` : "") + step + (call > 1 ? `#${call}` : "");
      if (columns.outcome[i] === failed) this.marks[seq] |= FAILED;
      if (columns.flags[i] & FLAG_PERSON) this.marks[seq] |= BY_PERSON;
      this.loaded = Math.max(this.loaded, seq);
    });
    for (const lease of page.leases) if (lease.recovery) this.marks[lease.seq] |= RECOVERED;
    for (let seq = 0; seq <= this.seq; seq++) this.marks[seq] &= ~GONE;
    for (const [first, last] of page.superseded) for (let seq = first; seq <= Math.min(last, this.seq); seq++) this.marks[seq] |= GONE;
  }

  longer(seq) {
    const marks = new Uint8Array(seq + 1);
    marks.set(this.marks);
    this.marks = marks;
    this.seq = seq;
  }

  // The page has been fetched again: the run may be longer, and the place another one.
  grow() {
    const live = document.querySelector("#live");
    if (!live) return;
    const seq = Number(live.dataset.seq);
    if (!new URLSearchParams(location.search).has("at")) this.at = Number(live.dataset.at);
    if (seq > this.seq) { this.longer(seq); this.load(); }
    this.draw();
    this.tell();
  }

  go(at) {
    this.at = Math.max(0, Math.min(this.seq, at));
    const asked = new URLSearchParams(location.search);
    asked.set("at", String(this.at));
    history.replaceState(null, "", `${location.pathname}?${asked}`);
    this.draw();
    this.tell();
    refresh();
  }

  failure(step) {
    for (let seq = this.at + step; seq > 0 && seq <= this.seq; seq += step) if (this.marks[seq] & FAILED) return this.go(seq);
  }

  key(event) {
    const far = Math.max(10, Math.round(this.seq / 20));
    const to = { ArrowLeft: this.at - 1, ArrowDown: this.at - 1, ArrowRight: this.at + 1, ArrowUp: this.at + 1,
      PageDown: this.at - far, PageUp: this.at + far, Home: 0, End: this.seq }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.go(to);
  }

  bracket(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog")) return;
    if (event.key === "[") this.go(this.at - 1);
    else if (event.key === "]") this.go(this.at + 1);
    else if (event.key === "{") this.failure(-1);
    else if (event.key === "}") this.failure(1);
  }

  pointing() {
    const place = (event) => Math.round(((event.clientX - this.canvas.getBoundingClientRect().left) / this.canvas.clientWidth) * this.seq);
    this.canvas.addEventListener("pointerdown", (event) => { this.canvas.setPointerCapture(event.pointerId); this.go(place(event)); });
    this.canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) this.go(place(event));
      else this.tell(Math.max(0, Math.min(this.seq, place(event))));
    });
    this.canvas.addEventListener("pointerleave", () => this.tell());
  }

  tell(seq = this.at) {
    const marks = this.marks[seq] ?? 0;
    const words = [this.kinds[seq], this.steps[seq], marks & FAILED && "failed", marks & GONE && "superseded", marks & RECOVERED && "recovered"].filter(Boolean).join(" · ");
    this.now.textContent = `${seq} / ${this.seq}`;
    this.note.textContent = words || (seq === 0 ? "before the first record" : "");
    this.canvas.setAttribute("aria-valuemax", String(this.seq));
    this.canvas.setAttribute("aria-valuenow", String(this.at));
    this.canvas.setAttribute("aria-valuetext", `record ${this.at} of ${this.seq}${words ? `: ${words}` : ""}`);
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    const scale = devicePixelRatio || 1, style = getComputedStyle(document.body), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const middle = 24, x = (seq) => (this.seq ? (seq / this.seq) * (width - 8) + 4 : 4);
    pen.fillStyle = colour("idle-paper");
    pen.fillRect(0, middle - 6, width, 12);
    if (this.loaded) {
      pen.fillStyle = colour("good-paper");
      pen.fillRect(0, middle - 6, x(this.loaded) + 4, 12);
    }
    const wide = Math.max(1.5, Math.min(10, (width / Math.max(this.seq, 1)) * 0.6));
    if (this.seq <= width / 4) {
      pen.fillStyle = colour("good");
      for (let seq = 1; seq <= this.loaded; seq++) pen.fillRect(x(seq) - wide / 2, middle - 6, wide, 12);
    }
    const columns = new Uint8Array(Math.ceil(width) + 1); // marks by pixel, so that none is hidden by others
    for (let seq = 1; seq <= this.seq; seq++) if (this.marks[seq]) columns[Math.round(x(seq))] |= this.marks[seq];
    columns.forEach((marks, at) => {
      if (!marks) return;
      if (marks & GONE) { pen.fillStyle = colour("idle-paper"); pen.fillRect(at - wide / 2, middle - 6, wide, 12); pen.fillStyle = colour("dim"); pen.fillRect(at - wide / 2 - 1, middle - 1, wide + 2, 2); }
      if (marks & FAILED) { pen.fillStyle = colour("bad"); pen.fillRect(at - wide / 2, middle - 12, wide, 24); }
      if (marks & RECOVERED) { pen.fillStyle = colour("odd"); pen.beginPath(); pen.moveTo(at, 2); pen.lineTo(at + 4, 10); pen.lineTo(at - 4, 10); pen.fill(); }
      if (marks & BY_PERSON) { pen.fillStyle = colour("wait"); pen.beginPath(); pen.arc(at, 40, 3, 0, 7); pen.fill(); }
    });
    if (this.from !== null) { pen.fillStyle = colour("dim"); for (let y = 0; y < height; y += 6) pen.fillRect(x(this.from) - 1, y, 2, 3); }
    pen.fillStyle = colour("accent");
    pen.fillRect(x(this.at) - 1.5, 0, 3, height);
    pen.beginPath(); pen.arc(x(this.at), middle, 6, 0, 7); pen.fill();
  }
}

customElements.define("ks-scrubber", Scrubber);
