// A picture that is told step by step: file, index, plan, fetch, commit. Its steps are the items of
// a list, each with the memory that a process has by then. Without this script the picture is whole.
const inMiB = (bytes) => (bytes ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : "0");

for (const figure of document.querySelectorAll("[data-stepper]")) {
  const steps = [...figure.querySelectorAll(".tl-steps > li")];
  const bars = [...figure.querySelectorAll(".tl-bar")];
  const [back, forward] = figure.querySelectorAll(".tl-step-buttons button");
  const told = figure.querySelector(".tl-step-told");
  const memory = (step) => step.dataset.memory.split(" ").map(Number);
  const most = Math.max(...steps.flatMap(memory));
  let at = 0;

  const show = (number) => {
    at = Math.min(Math.max(number, 0), steps.length - 1);
    for (const group of figure.querySelectorAll("[data-step]")) {
      group.classList.toggle("tl-later", group.dataset.step > at + 1);
    }
    const heading = document.createElement("strong");
    heading.textContent = `Step ${at + 1} of ${steps.length}: ${steps[at].dataset.name}`;
    told.replaceChildren(heading, document.createElement("br"), steps[at].textContent);
    memory(steps[at]).forEach((bytes, place) => {
      bars[place].querySelector(".tl-bar-value").textContent = inMiB(bytes);
      bars[place].style.setProperty("--tl-share", bytes / most);
    });
    // Not "disabled", which would throw the focus off the button that was just pressed.
    back.setAttribute("aria-disabled", at === 0);
    forward.setAttribute("aria-disabled", at === steps.length - 1);
  };

  back.addEventListener("click", () => show(at - 1));
  forward.addEventListener("click", () => show(at + 1));
  figure.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation(); // the theme turns pages with these keys
    show(at + by);
  });
  figure.querySelector(".tl-step-panel").hidden = false;
  show(0);
}
