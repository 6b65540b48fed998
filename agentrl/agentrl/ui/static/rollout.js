// Tables: the up and down keys go from row to row, while one of their links has the focus. Left and
// right go to the previous and next page, while nothing has it. Copying, and links to calls.
"use strict";
document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const active = document.activeElement;
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (step && active.matches("table a.row")) {
    const rows = [...active.closest("table").querySelectorAll("a.row")];
    const next = rows[rows.indexOf(active) + step];
    if (next) { next.focus(); event.preventDefault(); }
  }
  const rel = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  if (rel && (active === document.body || active.id === "main")) {
    document.querySelector(`main a[rel="${rel}"]`)?.click();
  }
});
document.addEventListener("click", async (event) => {
  if (!event.target.matches("button.copy")) return;
  await navigator.clipboard.writeText(event.target.parentElement.nextElementSibling.textContent);
  event.target.textContent = "Copied";
});
// Copying needs a secure context: loopback or HTTPS.
const offerCopy = () => {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll("button.copy")) button.hidden = false;
};
document.addEventListener("htmx:afterSettle", offerCopy);
// A link to a call that the page has not loaded yet opens it.
const openTarget = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target?.querySelector(":scope > details.on-demand");
  if (folded && !target.querySelector(".message")) folded.open = true;
};
addEventListener("hashchange", openTarget);
addEventListener("load", () => { offerCopy(); openTarget(); });
