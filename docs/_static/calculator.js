// The calculator of memory and time. Its formulas stand on the page, and tests compare them.
const GB = 1e9;
const BUFFERS = 64 * 2 ** 20; // what a read needs beside the weights

const calculate = ({ billions, file, memory, optimizer, ranks, rate }) => {
  const numbers = billions * GB;
  const read = (numbers * memory) / ranks + BUFFERS;
  const weights = (numbers * memory) / ranks;
  return {
    bytes: numbers * file,
    seconds: (numbers * file) / (rate * GB),
    rows: [
      ["build, torch.load, load_state_dict", numbers * (memory + file)],
      ["torchlift.load into a skeleton", file === memory ? 0 : read],
      ['torchlift.load(source="read")', read],
      ["train all weights, without activations", weights * (2 + optimizer)],
    ],
  };
};

const short = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

for (const form of document.querySelectorAll("[data-calculator]")) {
  const show = () => {
    const asked = Object.fromEntries([...new FormData(form)].map(([name, text]) => [name, Number(text)]));
    if (!form.checkValidity() || Object.values(asked).some(Number.isNaN)) return;
    const { bytes, seconds, rows } = calculate(asked);
    form.querySelector("tbody").replaceChildren(
      ...rows.map(([what, needed]) => {
        const row = document.createElement("tr");
        const fits = needed <= asked.room * GB;
        for (const text of [what, `${short(needed / GB)} GB`, short(needed / bytes), fits ? "yes" : "no"]) {
          const cell = document.createElement(row.children.length ? "td" : "th");
          cell.textContent = text;
          row.append(cell);
        }
        row.firstChild.scope = "row";
        row.className = fits ? "" : "tl-no";
        return row;
      }),
    );
    form.querySelector(".tl-told").textContent =
      `The file has ${short(bytes / GB)} GB. To read it takes ${short(seconds)} s at that rate; to map it takes milliseconds.`;
  };
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
}
