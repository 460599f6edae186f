// A picture that is told step by step: file, index, plan, fetch, commit. Its steps are the items of
// a list, each with the memory that a process has by then. At first, and without this script, the
// picture is whole.
const inMiB = (bytes) => (bytes ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : "0");

for (const figure of document.querySelectorAll("[data-stepper]")) {
  const steps = [...figure.querySelectorAll(".tl-steps > li")];
  const bars = [...figure.querySelectorAll(".tl-bar")];
  const [back, forward] = figure.querySelectorAll(".tl-step-buttons button");
  const told = figure.querySelector(".tl-step-told");
  const memory = (step) => step.dataset.memory.split(" ").map(Number);
  const most = Math.max(...steps.flatMap(memory));
  let at = -1;

  const show = (number) => {
    at = Math.min(Math.max(number, -1), steps.length - 1);
    const whole = at < 0;
    for (const group of figure.querySelectorAll("[data-step]")) {
      group.classList.toggle("tl-later", !whole && group.dataset.step > at + 1);
    }
    const step = steps.at(at); // the picture as a whole has the memory of the last step
    const heading = document.createElement("strong");
    heading.textContent = whole
      ? `All ${steps.length} steps`
      : `Step ${at + 1} of ${steps.length}: ${step.dataset.name}`;
    const text = whole ? "Press Forward to go through them, and see what each takes." : step.textContent;
    told.replaceChildren(heading, document.createElement("br"), text);
    memory(step).forEach((bytes, place) => {
      bars[place].querySelector(".tl-bar-value").textContent = inMiB(bytes);
      bars[place].style.setProperty("--tl-share", bytes / most);
    });
    // Not "disabled", which would throw the focus off the button that was just pressed.
    back.setAttribute("aria-disabled", whole);
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
  show(-1);
}
