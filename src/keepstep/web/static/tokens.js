// The tokens of a run as they stream: each body of a step is one text, to which the stream appends.
import { made, plain } from "./keepstep.js";

const MOST = 100_000; // characters of one text; the oldest go first

class Tokens extends HTMLElement {
  connectedCallback() {
    this.hear = (event) => { if (event.detail.kind === "tokens") this.add(event.detail.data); };
    document.addEventListener("ks:stream", this.hear);
  }

  disconnectedCallback() { document.removeEventListener("ks:stream", this.hear); }

  add({ step, life, attempt, tokens }) {
    const text = (Array.isArray(tokens) ? tokens : [tokens]).map((one) => (typeof one === "string" ? one : `${JSON.stringify(one)}\n`)).join("");
    const box = this.box(step, life ?? 0, attempt ?? 0), follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    box.append(plain(text, true));
    if (box.textContent.length > MOST) box.textContent = box.textContent.slice(-MOST);
    if (follows) box.scrollTop = box.scrollHeight;
  }

  box(step, life, attempt) {
    const found = [...this.querySelectorAll("section")].find((one) => one.dataset.step === step && +one.dataset.life === life && +one.dataset.attempt === attempt);
    if (found) return found.querySelector("pre");
    const box = made("pre", { class: "value", tabindex: "0", "aria-label": `Tokens of ${plain(step)}` });
    const title = plain(step.replace(/#1$/, "")) + (attempt > 1 ? `, attempt ${attempt}` : "");
    const section = made("section", { class: "card" }, made("h2", {}, title, ...(life > 1 ? [" ", made("span", { class: "note" }, `lease ${life}`)] : [])), box);
    Object.assign(section.dataset, { step, life, attempt });
    this.querySelector(".empty").hidden = true;
    this.insertBefore(section, this.querySelector(".empty"));
    return box;
  }
}

customElements.define("ks-tokens", Tokens);
