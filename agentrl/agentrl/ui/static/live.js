// What a reader has opened, focused and scrolled stays so when a live section is replaced.
"use strict";

(() => {
  const place = (element) => {
    const anchor = element.closest("[id]");
    return anchor && `#${CSS.escape(anchor.id)}`;
  };
  let before = null;

  document.addEventListener("htmx:beforeSwap", (event) => {
    const target = event.detail.target;
    before = {
      open: [...target.querySelectorAll("details[id]")].map((one) => [one.id, one.open]),
      scrolled: [...target.querySelectorAll(".wide")]
        .filter((one) => one.scrollLeft || one.scrollTop).map((one) => [place(one), one.scrollLeft, one.scrollTop]),
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
    for (const [where, left, top] of before.scrolled) {
      const one = where && document.querySelector(where)?.querySelector(".wide");
      if (one) { one.scrollLeft = left; one.scrollTop = top; }
    }
    const old = before.focused; // a chart is the same element; a link is found again by its address
    const again = old && (old.isConnected ? old : old.getAttribute("href") && document.querySelector(`#main a[href="${CSS.escape(old.getAttribute("href"))}"]`));
    if (again) again.focus({ preventScroll: true });
    if (scrollY !== before.top) scrollTo({ top: before.top, behavior: "instant" });
    before = null;
  });
})();
