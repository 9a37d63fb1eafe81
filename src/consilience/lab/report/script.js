"use strict";
// The page is whole without this script. It adds: the theme by hand, copying commands, and the
// values of a chart under the pointer.
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  name();

  for (const copy of document.querySelectorAll("button.copy")) {
    copy.hidden = false;
    copy.addEventListener("click", async () => {
      const text = copy.parentElement.querySelector("pre").textContent;
      try {
        await navigator.clipboard.writeText(text);
        copy.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(copy.parentElement.querySelector("pre"));
        copy.textContent = "Selected";
      }
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    });
  }

  for (const chart of document.querySelectorAll("svg[data-curves]")) {
    const { epochs, lines } = JSON.parse(chart.dataset.curves);
    const [left, right, most] = ["left", "right", "most"].map((key) => Number(chart.dataset[key]));
    const place = (epoch) => left + ((right - left) * (epoch - 1)) / Math.max(1, most - 1);
    const cursor = chart.querySelector(".cursor");
    const now = chart.parentElement.querySelector(".now");
    const before = now.textContent;
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
      let nearest = 0;
      epochs.forEach((epoch, i) => {
        if (Math.abs(place(epoch) - x) < Math.abs(place(epochs[nearest]) - x)) nearest = i;
      });
      cursor.setAttribute("x1", place(epochs[nearest]));
      cursor.setAttribute("x2", place(epochs[nearest]));
      cursor.setAttribute("visibility", "visible");
      const values = lines.map((line) => `${line.name} ${line.values[nearest] ?? "–"}`);
      now.textContent = `epoch ${epochs[nearest]}: ${values.join(", ")}`;
    });
    chart.addEventListener("pointerleave", () => {
      cursor.setAttribute("visibility", "hidden");
      now.textContent = before;
    });
  }
})();
