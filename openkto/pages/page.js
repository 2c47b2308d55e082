// Draws every chart of the page, again when the colour scheme or the width changes.
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function config() {
  const ink = dark.matches ? "#e3e8ee" : "#1b1f24";
  const line = dark.matches ? "#343c46" : "#d8dee4";
  return {
    background: "transparent",
    view: { stroke: "transparent" },
    axis: { labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line },
    legend: { labelColor: ink, titleColor: ink },
    header: { labelColor: ink, titleColor: ink },
  };
}

function draw() {
  for (const [key, spec] of Object.entries(specs)) {
    vegaEmbed(`#chart-${key}`, spec, { actions: false, config: config(), renderer: "svg", ast: true });
  }
}

dark.addEventListener("change", draw);
draw();
