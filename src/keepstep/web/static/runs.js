// Many runs at once: which are chosen, and what would be done to them before it is done.
import { act } from "./keepstep.js";

const TEXTS = {
  retry: "Failed and set-aside runs go on from where they failed; finished steps are kept.",
  pause: "The runs stop at their next steps.",
  resume: "Paused runs go on.",
  cancel: "The runs end, with their steps, waits and children. This is final.",
};
const LINES = new Set(["retry", "cancel"]); // commands that take filters
const chosen = new Set();
const form = () => document.querySelector("#chosen");
const boxes = () => [...document.querySelectorAll('input[name="run"]')];
const all = () => document.querySelector("#all-matching");

function show() {
  if (!form()) return;
  const there = boxes();
  for (const box of there) box.checked = chosen.has(box.value);
  const tick = document.querySelector("#tick-all");
  const count = there.filter((box) => box.checked).length;
  if (tick) Object.assign(tick, { checked: count > 0 && count === there.length, indeterminate: count > 0 && count < there.length });
  form().hidden = chosen.size === 0;
  form().querySelector("#chosen-count").textContent = all()?.checked ? "All that match are chosen" : `${chosen.size} chosen`;
}

document.addEventListener("change", (event) => {
  const box = event.target;
  if (box.id === "tick-all") for (const one of boxes()) chosen[box.checked ? "add" : "delete"](one.value);
  else if (box.name === "run") chosen[box.checked ? "add" : "delete"](box.value);
  else if (box.id !== "all-matching") {
    if (box.closest("#filter") && box.tagName === "SELECT") box.form.requestSubmit();
    return;
  }
  show();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-bulk]");
  if (!button) return;
  const name = button.dataset.bulk, whole = all()?.checked;
  const filter = JSON.parse(form().dataset.query);
  const which = whole ? { filter, all: true } : { ids: [...chosen] };
  const verb = button.textContent, ids = [...chosen];
  act({
    label: verb, verb: `${verb} the runs`, title: `${verb} ${whole ? `all ${form().dataset.matching} runs that match` : `${chosen.size} chosen runs`}`,
    text: TEXTS[name], url: `/api/v1/many/${name}`, body: { dry_run: false, ...which }, dry: { dry_run: true }, danger: name === "cancel",
    shows: { matched: "Runs that this fits", statuses: "By status", workflows: "By workflow" },
    command: LINES.has(name) ? (whole ? `keepstep ${name}${form().dataset.options}[ --reason {reason}]` : ids.slice(0, 5).map((id) => `keepstep ${name} ${id}[ --reason {reason}]`).join(" && ") + (ids.length > 5 ? " && …" : "")) : undefined,
    done: `${verb}: done`,
  });
});

document.addEventListener("ks:refreshed", show);
document.querySelector("#filter")?.addEventListener("submit", (event) => { // no empty parameters in the address
  for (const input of event.target.querySelectorAll("input, select")) if (input.value === "") input.disabled = true;
  setTimeout(() => { for (const input of event.target.querySelectorAll(":disabled")) input.disabled = false; });
});
addEventListener("pageshow", () => { for (const input of document.querySelectorAll("#filter :disabled")) if (input.tagName !== "OPTION") input.disabled = false; });
show();
