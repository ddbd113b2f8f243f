"use strict";
// Draws all figures of the page in the theme's colours; printing always uses the light theme.
const LIGHT = {
  ink: "#1c2430", soft: "#5b6675", rule: "#dde2e8", card: "#ffffff",
  series: ["#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a8a8a", "#b8a800"],
};
const DARK = {
  ink: "#e6eaf0", soft: "#9aa6b5", rule: "#2d3642", card: "#1a2029",
  series: ["#3d9be0", "#f0ad1e", "#1fb88a", "#f0723c", "#dd92ba", "#7cc8f2", "#a5a5a5", "#f0e442"],
};
const PAPER_WIDTH = 640; // pixels
const dark = matchMedia("(prefers-color-scheme: dark)");
const paper = matchMedia("print");
const figures = JSON.parse(document.getElementById("figures").textContent);

// returns a copy of the drawing with colour names ("soft", "c3") replaced by the theme's colours
function coloured(tree, theme) {
  if (Array.isArray(tree)) return tree;
  const copy = {};
  for (const [key, value] of Object.entries(tree)) {
    if (/color$/.test(key)) copy[key] = theme[value] ?? theme.series[Number(value.slice(1))];
    else copy[key] = value !== null && typeof value === "object" ? coloured(value, theme) : value;
  }
  return copy;
}

function layout(figure, theme, width) {
  const own = figure.layout;
  const axis = { gridcolor: theme.rule, linecolor: theme.soft, zeroline: false, automargin: true };
  return {
    ...own,
    ...(width ? { width } : { autosize: true }),
    title: { ...own.title, x: 0, xanchor: "left", xref: "container", y: 1, yanchor: "top", pad: { t: 6 }, font: { size: 12.5, color: theme.ink } },
    xaxis: { ...axis, ...own.xaxis, title: { ...own.xaxis.title, standoff: 8, font: { size: 12.5, color: theme.ink } }, showline: true, ticks: "outside", tickcolor: theme.soft },
    yaxis: { ...axis, ...own.yaxis },
    annotations: own.annotations.map(name => ({ ...name, font: { color: theme.ink } })),
    shapes: own.shapes.map(shape => coloured(shape, theme)),
    font: { family: "system-ui, 'Segoe UI', Roboto, Arial, sans-serif", size: 12, color: theme.soft },
    legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", font: { color: theme.ink }, tracegroupgap: 0 },
    paper_bgcolor: theme.card, plot_bgcolor: theme.card,
    hovermode: "closest", hoverlabel: { align: "left", namelength: -1 },
    dragmode: "zoom",
  };
}

function draw(place, theme, width) {
  const figure = figures[place.dataset.figure];
  const traces = figure.data.map(trace => coloured(trace, theme));
  const file = figure.name.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase();
  const config = {
    responsive: true, displaylogo: false, toImageButtonOptions: { format: "png", filename: file, scale: 2 },
    modeBarButtons: [["toImage", {
      name: "Download plot as SVG", icon: Plotly.Icons.disk,
      click: plot => Plotly.downloadImage(plot, { format: "svg", filename: file }),
    }, "resetScale2d"]],
  };
  const drawn = layout(figure, theme, width);
  if (place.dataset.log) drawn.xaxis.type = place.dataset.log === "on" ? "log" : "linear";
  if (!place.dataset.drawn) place.replaceChildren();
  place.dataset.drawn = "yes";
  Plotly.react(place, traces, drawn, config);
}

function addSwitch(place) {
  const label = document.createElement("label"), box = document.createElement("input");
  label.className = "switch";
  box.type = "checkbox";
  box.addEventListener("change", () => { place.dataset.log = box.checked ? "on" : "off"; drawAll([place]); });
  label.append(box, `${figures[place.dataset.figure].switch}, log scale`);
  place.parentElement.prepend(label);
}

// figures in a closed <details> have no size yet and are drawn when the user opens it
function drawAll(places, width) {
  const theme = dark.matches && !paper.matches && !width ? DARK : LIGHT;
  for (const place of places) if (place.offsetParent !== null) draw(place, theme, width);
}

const places = [...document.querySelectorAll(".plot")];
places.filter(place => figures[place.dataset.figure].switch).forEach(addSwitch);
drawAll(places);
dark.addEventListener("change", () => drawAll(places));
addEventListener("beforeprint", () => drawAll(places, PAPER_WIDTH));
addEventListener("afterprint", () => drawAll(places));
for (const folded of document.querySelectorAll("details.section")) {
  folded.addEventListener("toggle", () => { if (folded.open) drawAll(folded.querySelectorAll(".plot:not([data-drawn])")); });
}
