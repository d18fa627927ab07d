"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function colours() {
  const style = getComputedStyle(root);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), soft: of("--soft"), rule: of("--rule"), card: of("--card") };
}

function themed(layout) {
  const { ink, soft, rule, card } = colours();
  const narrow = innerWidth < 600;
  const axis = (given) => ({
    gridcolor: rule, zerolinecolor: rule, linecolor: rule, tickfont: { color: soft }, automargin: true, ...given,
  });
  const found = {
    height: 340, ...layout,
    font: { color: ink, size: narrow ? 11 : 12, family: "system-ui, sans-serif" },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: narrow ? 44 : 56, r: narrow ? 12 : 20, t: 10, b: 44 },
    legend: { orientation: "h", y: -0.25, yanchor: "top", x: 0, bgcolor: "rgba(0,0,0,0)" },
    hoverlabel: { bgcolor: card, bordercolor: rule, font: { color: ink } },
  };
  for (const name of ["xaxis", "yaxis", "yaxis2"]) {
    if (name !== "yaxis2" || layout.yaxis2) found[name] = axis(layout[name] || {});
  }
  return found;
}

function draw() {
  const drawn = figures.map((figure) => Plotly.react(
    `figure-${figure.id}`, figure.data, themed(figure.layout),
    { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] },
  ));
  Promise.all(drawn).then(() => { root.dataset.drawn = String(drawn.length); });
}

document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
  root.dataset.theme = dark ? "light" : "dark";
  draw();
});
prefersDark.addEventListener("change", draw);
draw();
