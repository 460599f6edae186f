// A long signature hides its types, so that the summary below it is seen. A button shows them.
const MANY = 4; // parameters

for (const signature of document.querySelectorAll("dt.sig")) {
  if (signature.querySelectorAll(".sig-param").length <= MANY) continue;
  const button = document.createElement("button");
  button.className = "tl-types";
  const set = (plain) => {
    signature.classList.toggle("tl-plain", plain);
    button.textContent = plain ? "Show types" : "Hide types";
    button.setAttribute("aria-expanded", !plain);
  };
  button.addEventListener("click", () => set(!signature.classList.contains("tl-plain")));
  signature.append(button);
  set(true);
}
