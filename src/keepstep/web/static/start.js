// The form that starts a run: the server reads its texts, names each field that does not fit, and opens the run.
import { ask, toast } from "./keepstep.js";

const form = document.querySelector("#start");
const root = document.body.dataset.root ?? "";
const touched = new Set();
const CHECK_MS = 300; // pause after typing before the texts are checked
let timer = null, asked = 0;

function texts() {
  const body = { input: {} };
  for (const input of form.querySelectorAll("[data-input]")) {
    if (input.dataset.kind === "boolean") body.input[input.name] = input.checked ? "true" : "false";
    else if (input.value !== "" || input.dataset.filled !== undefined) body.input[input.name] = input.value;
  }
  for (const input of form.querySelectorAll("[data-option]")) if (input.value !== "") body[input.name] = input.value;
  return body;
}

// Show the problems of the fields; while a person types, only of those that were left.
function show(errors, everywhere) {
  let first = null;
  for (const field of form.querySelectorAll("[data-field]")) {
    const name = field.dataset.field, input = field.querySelector("[data-input], [data-option]");
    const text = everywhere || touched.has(name) ? errors[name] ?? "" : "";
    field.querySelector("[data-wrong]").textContent = text;
    if (text) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
    if (text && !first) first = input;
  }
  form.querySelector("[data-whole]").textContent = everywhere ? errors[""] ?? "" : "";
  return first;
}

async function check() {
  const mine = ++asked;
  try {
    const answer = await ask(form.getAttribute("action"), { ...texts(), dry: true });
    if (mine !== asked) return;
    show({}, true);
    const place = form.querySelector("[data-command]");
    place.textContent = answer.command;
    place.parentElement.querySelector("[data-copy]").dataset.copy = answer.command;
  } catch (error) {
    if (mine === asked) show(error.errors ?? {}, false);
  }
}

if (form) {
  for (const input of form.querySelectorAll("[data-input]")) if (input.value !== "" && input.dataset.kind === undefined && input.type !== "select-one") input.dataset.filled = "";
  form.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(check, CHECK_MS); });
  form.addEventListener("focusout", (event) => { if (event.target.name) touched.add(event.target.name); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    asked++;
    const button = form.querySelector("button.main");
    button.disabled = true;
    try {
      const run = await ask(form.getAttribute("action"), texts());
      location.assign(`${root}/runs/${encodeURIComponent(run.id)}`);
    } catch (error) {
      button.disabled = false;
      const first = show(error.errors ?? { "": error.message }, true);
      if (first) first.focus(); else toast(error.message, true);
    }
  });
}
