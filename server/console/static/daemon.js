"use strict";
// The page of a daemon's HTTP port: its /metrics as a table that can be searched, with rates.

const SAMPLE = /^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})? (\S+)$/;
let before = { time: 0, values: new Map() };
let samples = [];

function parse(text) {
  const help = new Map();
  const found = [];
  for (const line of text.split("\n")) {
    if (line.startsWith("# HELP ")) {
      const [name, ...words] = line.slice(7).split(" ");
      help.set(name, words.join(" "));
      continue;
    }
    const parts = SAMPLE.exec(line);
    if (parts === null || /_bucket$|_created$/.test(parts[1])) continue;
    const base = parts[1].replace(/_(total|sum|count)$/, "");
    found.push({
      name: parts[1], labels: (parts[2] || "").slice(1, -1), value: Number(parts[3]),
      help: help.get(parts[1]) || help.get(base) || "", counts: /_(total|count|sum)$/.test(parts[1]),
    });
  }
  return found;
}

function cell(text, title, kind = "") {
  const made = document.createElement("td");
  made.textContent = text;
  made.dataset.title = title;
  made.className = kind;
  return made;
}

function show() {
  const text = at("filter").value.toLowerCase();
  const rows = samples
    .filter((each) => `${each.name} ${each.labels} ${each.help}`.toLowerCase().includes(text))
    .map((each) => {
      const row = document.createElement("tr");
      row.title = each.help;
      const rate = each.rate === null ? "" : each.rate.toLocaleString(undefined, { maximumFractionDigits: 2 });
      row.append(cell(each.name, "Metric"), cell(each.labels, "Labels"),
        cell(each.value.toLocaleString(undefined, { maximumFractionDigits: 3 }), "Value", "number"),
        cell(rate, "Per second", "number"));
      return row;
    });
  at("metrics").tBodies[0].replaceChildren(...rows);
}

async function load() {
  const ready = await fetch("readyz");
  at("ready").textContent = (await ready.text()).trim();
  const answer = await fetch("metrics");
  const now = Date.now() / 1000;
  const values = new Map();
  samples = parse(await answer.text()).map((each) => {
    const key = `${each.name}{${each.labels}}`;
    values.set(key, each.value);
    const hasRate = each.counts && before.values.has(key);
    return { ...each, rate: hasRate ? (each.value - before.values.get(key)) / (now - before.time) : null };
  });
  before = { time: now, values };
  show();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") {
    event.preventDefault();
    at("filter").focus();
  }
});
at("filter").addEventListener("input", show);

keepRefreshing(load);
