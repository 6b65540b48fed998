// What a reader has opened, checked, focused and scrolled stays so when a live section is replaced.
"use strict";

(() => {
  const place = (element) => {
    const anchor = element.closest("[id]");
    return anchor && `#${CSS.escape(anchor.id)}`;
  };
  const insideOf = (old) => { // the summary of a <details>
    const whole = old.tagName === "SUMMARY" && document.getElementById(old.parentElement.id);
    return whole && whole.querySelector("summary");
  };
  let before = null;

  document.addEventListener("htmx:beforeSwap", (event) => {
    const target = event.detail.target;
    before = {
      open: [...target.querySelectorAll("details[id]")].map((one) => [one.id, one.open]),
      scrolled: [...target.querySelectorAll(".wide")]
        .filter((one) => one.scrollLeft || one.scrollTop).map((one) => [place(one), one.scrollLeft, one.scrollTop]),
      checked: [...target.querySelectorAll("input:checked")].map((one) => one.value),
      focused: target.contains(document.activeElement) ? document.activeElement : null,
      top: scrollY,
    };
  });

  document.addEventListener("htmx:afterSwap", () => {
    if (!before) return;
    for (const [id, open] of before.open) {
      const one = document.getElementById(id);
      if (one) one.open = open;
    }
    for (const one of document.querySelectorAll("input[type=checkbox]")) {
      if (before.checked.includes(one.value)) one.checked = true;
    }
    for (const [where, left, top] of before.scrolled) {
      const one = where && document.querySelector(where)?.querySelector(".wide");
      if (one) { one.scrollLeft = left; one.scrollTop = top; }
    }
    const old = before.focused; // a chart is the same element; others are found again by what they are
    const same = (name) => old.hasAttribute(name) && document.querySelector(`#main ${old.tagName}[${name}="${CSS.escape(old.getAttribute(name))}"]`);
    const again = old && (old.isConnected ? old : ["id", "href", "value", "aria-label"].map(same).find(Boolean) || insideOf(old));
    if (again) again.focus({ preventScroll: true });
    if (scrollY !== before.top) scrollTo({ top: before.top, behavior: "instant" });
    before = null;
  });
})();
