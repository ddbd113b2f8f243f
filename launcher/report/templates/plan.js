"use strict";
// The calculator of launcher/plan/budget.py for the page's data; its functions have the same names as in budget.py.
const data = JSON.parse(document.getElementById("plan").textContent);

function nearest(sizes, target) {
  const away = sizes.map(size => Math.abs(Math.log(size / target)));
  return away.indexOf(Math.min(...away));
}

// returns the value at x, interpolated in log-log space between points i and i + 1
function interpolate(x, xs, ys, i) {
  const share = Math.log(x / xs[i]) / Math.log(xs[i + 1] / xs[i]);
  return ys[i] * Math.pow(ys[i + 1] / ys[i], share);
}

function solveAboveTip(sizes, hoursOf, hours) {
  const least = Math.min(...hoursOf), most = hoursOf[hoursOf.length - 1];
  if (!(least <= hours && hours <= most)) return { bound: hours < least ? least : most };
  const below = hoursOf.findLastIndex(each => each <= hours);
  return { size: below === sizes.length - 1 ? sizes[below] : interpolate(hours, hoursOf, sizes, below) };
}

const exponent = law => law.b / (law.a + law.b);
const loss = (law, n, d) => law.E + law.A * Math.pow(n, -law.a) + law.B * Math.pow(d, -law.b);
const bestParameters = (law, flops) =>
  Math.pow((law.a * law.A) / (law.b * law.B), 1 / (law.a + law.b)) * Math.pow(flops / law.flops, exponent(law));
const bestBudget = (law, n) => Math.pow(n / bestParameters(law, 1), 1 / exponent(law));
const bestLoss = (law, flops) => {
  const n = bestParameters(law, flops);
  return loss(law, n, flops / law.flops / n);
};

// returns the value of the law with its 95 % interval, as Frontier.estimate computes it
function estimate(value) {
  const middle = value(data.law), all = data.draws.map(value), each = data.left_out.map(value);
  const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
  const squares = values => { const m = mean(values); return values.reduce((a, v) => a + (v - m) ** 2, 0); };
  const spread = Math.sqrt(squares(all) / (all.length - 1));
  const jackknife = Math.sqrt(((each.length - 1) / each.length) * squares(each));
  const half = data.student * Math.hypot(spread, jackknife);
  return [middle, middle - half, middle + half];
}

// returns the answer for a state (unit, amount, gpu, count, price, ratio), or the nearest feasible budget if no size fits
function plan(state) {
  const device = data.devices[state.gpu], rates = device.rates[state.count], sizes = data.sizes.slice(0, rates.length);
  const perHour = {
    hours: 1, dollars: state.price * state.count, kwh: (device.watts * state.count * data.pue) / 1e3,
  };
  const hours = state.amount / perHour[state.unit];
  const hoursOf = sizes.map((n, i) =>
    (data.law ? bestBudget(data.law, n) / (6 * n) : state.ratio * n) / rates[i] / 3600);
  const found = solveAboveTip(sizes, hoursOf, hours);
  if (found.bound !== undefined) return { ...found, bound: found.bound * perHour[state.unit] };
  const rate = rates[nearest(sizes, found.size)], flops = 6 * found.size * rate * hours * 3600;
  return {
    hours, flops, parameters: found.size, tokens: rate * hours * 3600,
    dollars: hours * perHour.dollars, kwh: hours * perHour.kwh,
    loss: data.law ? estimate(law => bestLoss(law, flops)) : null,
    sizes: data.law ? estimate(law => Math.log(bestParameters(law, flops))).map(Math.exp) : null,
    curve: data.law ? sizes.map((n, i) => [n, loss(data.law, n, rates[i] * hours * 3600)]) : [],
  };
}

// --- the page

const form = document.forms[0], field = name => form.elements[name];
const three = value => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
const short = value => value >= 1e12 ? value.toPrecision(3)
  : value >= 1e9 ? three(value / 1e9) + " G" : value >= 1e6 ? three(value / 1e6) + " M" : three(value);

function read() {
  return {
    unit: field("unit").value, amount: Math.pow(10, Number(field("amount").value)), gpu: field("gpu").value,
    count: Number(field("count").value), price: Number(field("price").value),
    ratio: Math.pow(10, Number(field("ratio").value)),
  };
}

function curve(points) {
  const near = points.filter(p => p[1] < 1.15 * Math.min(...points.map(q => q[1])));
  if (near.length < 2) return "";
  const xs = near.map(p => Math.log(p[0])), ys = near.map(p => p[1]);
  const to = (v, all, size) => ((v - Math.min(...all)) / (Math.max(...all) - Math.min(...all) || 1)) * size;
  return near.map((p, i) => `${10 + to(xs[i], xs, 580)},${150 - to(ys[i], ys, 140)}`).join(" ");
}

function show() {
  const state = read(), answer = plan(state), rows = [];
  if (answer.bound !== undefined) rows.push(["no size fits", `the nearest possible budget is ${three(answer.bound)} ${state.unit}`]);
  else {
    const between = (v, text) => `${text(v[0])} (${text(v[1])} to ${text(v[2])})`;
    rows.push(["parameters", answer.sizes ? between(answer.sizes, short) : short(answer.parameters)]);
    rows.push(["tokens", short(answer.tokens)], ["compute", `${answer.flops.toExponential(2)} FLOP`]);
    if (answer.loss) rows.push(["loss", between(answer.loss, v => v.toFixed(3)) + " nats"]);
    rows.push(["hours", three(answer.hours)], ["dollars", three(answer.dollars)], ["kWh", three(answer.kwh)]);
    if (data.grams_per_kwh) rows.push(["CO2", `${three((answer.kwh * data.grams_per_kwh) / 1e3)} kg`]);
  }
  document.getElementById("answer").replaceChildren(...rows.map(([name, text]) => {
    const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
    head.textContent = name;
    cell.textContent = text;
    row.append(head, cell);
    return row;
  }));
  document.getElementById("given").textContent = `${three(state.amount)} ${state.unit}` +
    (data.law ? "" : `, ratio ${three(state.ratio)}`);
  document.getElementById("curve").setAttribute("points", answer.curve ? curve(answer.curve) : "");
  const names = ["unit", "amount", "gpu", "count", "price", "ratio"];
  history.replaceState(null, "", "#" + new URLSearchParams(names.map(name => [name, field(name).value])));
}

function load() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (field(name)) field(name).value = value;
  show();
}

field("gpu").addEventListener("change", () => { field("price").value = data.devices[field("gpu").value].price ?? 0; });
form.addEventListener("input", show);
addEventListener("hashchange", load);
load();
