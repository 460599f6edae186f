// sphinx-gallery's filter is made of boxes that only a mouse can press: they become buttons. They are
// many, so they are folded.
document.addEventListener("DOMContentLoaded", () => {
  for (const list of document.querySelectorAll(".sphx-glr-tag-list")) {
    const filters = document.createElement("details");
    filters.className = "tl-filters";
    const summary = document.createElement("summary");
    summary.textContent = "Show only some of them";
    list.before(filters);
    filters.append(summary, list);
  }
  for (const tag of document.querySelectorAll(".sphx-glr-tag, #sphx-glr-tag-clear")) {
    tag.role = "button";
    tag.tabIndex = 0;
    tag.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      tag.click();
    });
    const press = () => tag.setAttribute("aria-pressed", tag.classList.contains("active"));
    if (tag.id) continue;
    press();
    new MutationObserver(press).observe(tag, { attributeFilter: ["class"] });
  }
});
