// What all pages share: acts, live regions, keys, times, and copies. Acts call the API; pages never change anything.
const root = document.body.dataset.root ?? "";
const one = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

export function made(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (key === "class") element.className = value;
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Stored text without control characters and marks that turn the direction of what follows; `lines` keeps line breaks.
const HOSTILE = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
export function plain(text, lines = false) {
  const kept = lines ? "\n\t" : "";
  return String(text).replace(HOSTILE, (one) => (kept.includes(one) ? one : `\\x${one.charCodeAt(0).toString(16).padStart(2, "0")}`));
}

// A sign of the sheet of signs.
export function sign(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg"), use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("class", "sign");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `${root}/static/signs.svg#${name}`);
  svg.append(use);
  return svg;
}

export function toast(text, wrong = false) {
  const shown = made("div", { class: wrong ? "toast wrong" : "toast" }, plain(text));
  one("#toasts").append(shown);
  setTimeout(() => shown.remove(), wrong ? 12000 : 5000);
}

// Ask the API. A problem becomes an error with its sentence.
export async function ask(path, body, options = {}) {
  const request = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
  const response = await fetch(root + path, { ...request, ...options });
  const answer = response.headers.get("content-type")?.includes("json") ? await response.json() : {};
  if (!response.ok) throw Object.assign(new Error(answer.detail ?? `the server answered ${response.status}`), { status: response.status, type: answer.type, errors: answer.errors });
  return answer;
}

// -- live regions -----------------------------------------------------------------------------------------------------

let refreshing = null, again = false;
const LIVE_MS = 350; // shortest pause between two refreshes, so that a busy run does not load the server
const REST = 2; // a refresh is followed by a pause of this many times its length, so that a slow one does not, either

// Fetch the page again and morph its live region into what it is now.
export function refresh() {
  if (!one("#live")) return;
  if (refreshing || document.hidden || all("dialog[open]").length) { again = true; return; }
  const began = performance.now();
  refreshing = htmx.ajax("GET", location.pathname + location.search, { target: "#live", select: "#live", swap: "outerMorph" })
    .catch(() => {})
    .finally(() => {
      times();
      document.dispatchEvent(new CustomEvent("ks:refreshed")); // at once, so that what scripts have added does not flicker
      setTimeout(() => {
        refreshing = null;
        if (again) { again = false; refresh(); }
      }, Math.max(LIVE_MS, REST * (performance.now() - began)));
    });
}

// Counts of the server are up to two seconds old, so that the last change is looked at once more.
const SETTLED_MS = 2500;
let settling = 0;
function soon() {
  refresh();
  clearTimeout(settling);
  settling = setTimeout(refresh, SETTLED_MS);
}

// A page whose stream is cut says so: it shows what was true then.
const CUT_MS = 1500; // a stream that the server has ended is open again by then, or after one more try
let cut = 0;
function isCut(text) {
  cut = 0;
  if (one("#cut")) return;
  const notice = made("p", { class: "notice bad", id: "cut", role: "alert" }, `${text} This page shows the state of ${new Date().toLocaleTimeString()}.`);
  one("#main").prepend(notice);
}
function isOpen() {
  clearTimeout(cut);
  cut = 0;
  if (one("#cut")) { one("#cut").remove(); soon(); }
}

// One stream a page: other modules listen to `ks:stream` on the document for its messages.
function listen() {
  const path = document.body.dataset.stream;
  if (!path) return;
  const stream = new EventSource(root + path);
  stream.addEventListener("open", isOpen);
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) isCut("The server refuses to send changes; load the page again.");
    else cut ||= setTimeout(isCut, CUT_MS, "The server does not answer.");
  });
  for (const kind of ["record", "tokens", "head", "end", "changed", "gone", "damaged"]) {
    stream.addEventListener(kind, (event) => {
      const data = event.data ? JSON.parse(event.data) : null;
      document.dispatchEvent(new CustomEvent("ks:stream", { detail: { kind, data, id: event.lastEventId } }));
      if (kind !== "tokens") soon();
      if (kind === "end" && !path.includes("follow=true") || kind === "gone" || kind === "damaged") stream.close();
    });
  }
  addEventListener("pagehide", () => { clearTimeout(cut); stream.close(); });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden && again) { again = false; refresh(); } });

// -- acts -------------------------------------------------------------------------------------------------------------

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`);

// The command line of an act: {field} is what is typed, and [ --x {field}] is left out while the field is empty.
function commandOf(template, values) {
  const isEmpty = (value) => value == null || value === "" || value === false;
  return template.replace(/\[([^\]{]*)\{(\w+)\}([^\]]*)\]|\{(\w+)\}/g, (_, before, option, after, name) => {
    const value = values[option ?? name];
    if (isEmpty(value)) return option === undefined ? name.toUpperCase() : "";
    return (before ?? "") + (value === true ? "" : quoted(String(value))) + (after ?? "");
  });
}

function control(field) {
  const id = `act-${field.name}`, shared = { id, name: field.name, required: field.required === true };
  let input;
  if (field.type === "textarea" || field.type === "json") {
    input = made("textarea", { ...shared, spellcheck: "false", rows: field.rows ?? 5 });
    input.value = field.type === "json" && field.value !== undefined ? JSON.stringify(field.value, null, 2) : field.value ?? "";
  } else if (field.type === "select") {
    input = made("select", shared, ...field.options.map((option) => {
      const [value, label] = Array.isArray(option) ? option : [option, option];
      return made("option", { value, selected: value === field.value }, label);
    }));
  } else if (field.type === "checkbox") {
    input = made("input", { ...shared, type: "checkbox", checked: field.value === true });
  } else {
    input = made("input", { ...shared, type: field.type ?? "text", step: field.type === "number" ? "any" : null, value: field.value ?? null, autocomplete: "off" });
  }
  input.dataset.type = field.type ?? "text";
  const label = made("label", { for: id }, field.label ?? field.name);
  const box = made("div", { class: field.type === "checkbox" ? "field check" : "field" }, ...(field.type === "checkbox" ? [input, label] : [label, input]));
  if (field.help) {
    box.append(made("p", { class: "help", id: `${id}-help` }, field.help));
    input.setAttribute("aria-describedby", `${id}-help`);
  }
  return box;
}

// The values of a form: what is typed, and what is sent. Empty optional fields are not sent.
function read(form, fields) {
  const typed = {}, sent = {};
  for (const field of fields) {
    const input = form.elements[field.name];
    const text = input.type === "checkbox" ? input.checked : input.value;
    typed[field.name] = text;
    if (field.type === "checkbox") sent[field.name] = text;
    else if (text === "" && !field.required) continue;
    else if (field.type === "json") {
      try { sent[field.name] = JSON.parse(text); } catch (error) { throw new Error(`${field.label ?? field.name}: ${error.message}`); }
    } else if (field.type === "number") sent[field.name] = Number(text);
    else sent[field.name] = text;
  }
  return [typed, sent];
}

// What an act would do: in the words of `shows` ({field: heading}), or as JSON.
function previewed(spec, answer) {
  if (!spec.shows) return made("pre", { class: "value", tabindex: "0", "aria-label": "What this would do" }, JSON.stringify(answer, null, 2));
  return made("dl", { class: "facts" }, ...Object.entries(spec.shows).flatMap(([name, heading]) => {
    const given = answer[name], isTable = given && typeof given === "object" && !Array.isArray(given);
    const value = isTable ? Object.entries(given).map(([word, number]) => `${number} ${word}`) : given;
    const words = Array.isArray(value) ? value.slice(0, 50).join(", ") + (value.length > 50 ? ` and ${value.length - 50} more` : "") : String(value ?? "");
    return [made("dt", {}, heading), made("dd", {}, words || "none")];
  }));
}

// The body of an act: its fixed fields, and what is typed; `into` names the object that holds the typed fields.
function bodyOf(spec, sent) {
  if (!spec.into) return { ...spec.body, ...sent };
  const { reason, ...inner } = sent;
  return { ...spec.body, [spec.into]: inner, ...(reason === undefined ? {} : { reason }) };
}

export function act(spec) {
  const name = spec.label.replace(/…$/, "");
  const fields = [...(spec.fields ?? []), ...(spec.reason === false ? [] : [{ name: "reason", label: "Reason (for the audit)" }])];
  const dialog = made("dialog", { "aria-labelledby": "act-title" });
  const wrong = made("p", { class: "wrong", role: "alert" });
  const shown = made("code");
  const copy = made("button", { type: "button", class: "plain", "aria-label": "Copy the command" });
  copy.append(sign("copy"));
  const line = made("p", { class: "command" }, shown, copy);
  const preview = made("div", { class: "preview", "aria-live": "polite" });
  const go = made("button", { class: `button main${spec.danger ? " danger" : ""}` }, spec.verb ?? name);
  const cancel = made("button", { type: "button", class: "button" }, "Close");
  const form = made("form", { method: "dialog" }, made("h2", { id: "act-title" }, plain(spec.title ?? name).replace("…", "")),
    ...(spec.text ? [made("p", {}, plain(spec.text))] : []), ...fields.map(control), preview, wrong,
    ...(spec.command ? [made("div", { class: "field" }, made("p", { class: "help" }, "The same on the command line:"), line)] : []),
    made("div", { class: "buttons" }, cancel, go));
  dialog.append(form);
  document.body.append(dialog);
  const opener = document.activeElement;
  const update = () => {
    if (spec.command) {
      const values = { ...spec.given };
      for (const field of fields) { const input = form.elements[field.name]; values[field.name] = input.type === "checkbox" ? input.checked : input.value; }
      copy.dataset.copy = commandOf(spec.command, values);
      shown.textContent = plain(copy.dataset.copy, true);
    }
  };
  const look = async () => { // a preview: the same act, asked what it would do
    if (!spec.dry) return;
    try {
      const [, sent] = read(form, fields);
      preview.replaceChildren(previewed(spec, await ask(spec.url, { ...bodyOf(spec, sent), ...spec.dry })));
    } catch (error) { preview.replaceChildren(made("p", { class: "wrong" }, error.message)); }
  };
  form.addEventListener("input", update);
  form.addEventListener("change", look);
  cancel.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { dialog.remove(); opener?.focus?.(); if (again) { again = false; refresh(); } });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    wrong.textContent = "";
    go.disabled = true;
    try {
      const [, sent] = read(form, fields);
      const answer = await ask(spec.url, bodyOf(spec, sent));
      dialog.close();
      toast(spec.done ?? `${name}: done`);
      if (spec.go) location.assign(root + spec.go.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(answer[name])));
      else refresh();
    } catch (error) {
      wrong.textContent = error.type === "keepstep:moved" ? `${error.message}. Close this, and look at the page again.` : error.message;
      go.disabled = false;
    }
  });
  update();
  look();
  dialog.showModal();
  (one("input, textarea, select", form) ?? go).focus();
}

// -- times, copies, keys ----------------------------------------------------------------------------------------------

function span(seconds) {
  if (seconds < 59.95) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return rest && minutes < 10 ? `${minutes} min ${rest} s` : `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60 ? `${minutes % 60} min` : ""}`.trim();
  return `${Math.floor(minutes / 1440)} days`;
}

export function times() {
  const now = Date.now();
  for (const time of all("time[data-ago]")) {
    const at = new Date(time.dateTime), seconds = (now - at) / 1000;
    time.title = at.toLocaleString();
    time.textContent = Math.abs(seconds) < 1 ? "now" : seconds > 0 ? `${span(seconds)} ago` : `in ${span(-seconds)}`;
  }
}

async function copied(text) {
  try { await navigator.clipboard.writeText(text); toast("Copied"); } catch { toast("The browser does not allow copying", true); }
}

function theme() {
  const order = ["system", "light", "dark"], now = document.documentElement.dataset.theme ?? "system";
  const show = (name) => { const place = one("#theme-now"); if (place) place.textContent = name; };
  show(now);
  one("#theme")?.addEventListener("click", () => {
    const next = order[(order.indexOf(document.documentElement.dataset.theme ?? "system") + 1) % order.length];
    if (next === "system") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = next;
    try { if (next === "system") localStorage.removeItem("keepstep-theme"); else localStorage.setItem("keepstep-theme", next); } catch { /* shown until the page is left */ }
    show(next);
    document.dispatchEvent(new CustomEvent("ks:theme"));
  });
}

let prefix = "";
function row(step) {
  const rows = all("[data-row]");
  if (!rows.length) return;
  const now = rows.findIndex((each) => each.classList.contains("chosen"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, now < 0 ? (step > 0 ? 0 : rows.length - 1) : now + step))];
  rows[now]?.classList.remove("chosen");
  next.classList.add("chosen");
  (one("a", next) ?? next).focus();
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select, dialog, [contenteditable]")) return;
  const key = event.key;
  if (prefix === "g") {
    prefix = "";
    const link = one(`.side nav a[data-key="${CSS.escape(key)}"]`);
    if (link) { event.preventDefault(); link.click(); }
    return;
  }
  if (key === "g") { prefix = "g"; setTimeout(() => { prefix = ""; }, 1500); }
  else if (key === "/") { event.preventDefault(); (one("[data-search]") ?? one("#jump"))?.focus(); }
  else if (key === "?") one("#keys")?.showModal();
  else if (key === "j") row(1);
  else if (key === "k") row(-1);
});

document.addEventListener("click", (event) => {
  const acting = event.target.closest("[data-act]"), copying = event.target.closest("[data-copy]");
  if (acting) act(JSON.parse(acting.dataset.act));
  else if (copying) copied(copying.dataset.copy);
  else if (event.target.closest("#keys-open")) one("#keys").showModal();
});

theme();
times();
setInterval(times, 5000);
listen();
