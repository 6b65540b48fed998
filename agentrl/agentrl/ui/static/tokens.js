// Below the answer, say what is known of the token that was clicked or that arrow keys came to.
"use strict";
if (!window.agentrlTokens) {
  window.agentrlTokens = true;
  const choose = (token) => {
    const answer = token.parentElement;
    answer.querySelector(".at")?.classList.remove("at");
    token.classList.add("at");
    token.scrollIntoView({ block: "nearest" });
    const said = answer.parentElement.querySelector(".said");
    said.textContent = `${JSON.stringify(token.textContent)}: ${token.title.split("\n").join(", ")}`;
  };
  document.addEventListener("click", (event) => {
    const token = event.target.closest(".token-view .answer > span");
    if (token) choose(token);
  });
  document.addEventListener("keydown", (event) => {
    const answer = event.target.closest(".token-view .answer");
    if (!answer || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    event.preventDefault();
    const at = answer.querySelector(".at");
    const next = event.key === "ArrowRight" ? (at ? at.nextElementSibling : answer.firstElementChild)
      : at?.previousElementSibling;
    if (next) choose(next);
  });
}
