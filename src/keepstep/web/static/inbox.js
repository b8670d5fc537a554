// The badge beside the inbox, which stands outside of the live region, follows it.
import { made } from "./keepstep.js";

document.addEventListener("ks:refreshed", () => {
  const count = document.querySelector("#live")?.dataset.count ?? "";
  const link = document.querySelector('.side nav a[data-key="i"]');
  document.querySelector("#inbox-count")?.remove();
  if (count) link?.append(made("span", { class: "count", id: "inbox-count" }, count));
});
