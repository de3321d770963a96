"use strict";
// The console of a capture: asks /console.json every two seconds, and steers by TiCDC's API.
// Every text goes into the page as textContent, never as markup.

const SLOW_S = 10;
const STUCK_S = 60;

const view = { document: null, chosen: "", open: "", busy: new Set() };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function duration(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${seconds < 10 ? seconds.toFixed(1) : Math.floor(seconds)} s`;
}

function cell(title, content, kind = "") {
  return element("td", { "data-title": title, class: kind }, ...[content].flat());
}

function stageBar(stages) {
  const bar = element("div", { class: "bar", role: "img" });
  const said = [];
  let before = 0;
  for (const [name, lag] of Object.entries(stages)) {
    const behind = Math.max(0, lag - before);
    before = lag;
    said.push(`${name} ${duration(lag)} behind`);
    const kind = behind > STUCK_S ? "stuck" : behind > SLOW_S ? "slow" : "";
    bar.append(element("span", { class: kind, title: said.at(-1) }));
  }
  bar.setAttribute("aria-label", said.join(", ") || "not known");
  return bar;
}

function dumpCell(dump) {
  if (!dump) return ["none"];
  const percent = Math.round(dump.progress_percent);
  const eta = dump.eta_seconds >= 0 && dump.state === "running" ? `, ${duration(dump.eta_seconds)} to go` : "";
  const fill = element("span");
  fill.style.width = `${Math.min(100, percent)}%`;
  return [
    element("span", { class: "progress", role: "img", "aria-label": `${percent} %` }, fill),
    `${dump.state} ${percent} %${eta}`,
  ];
}

async function steer(id, verb) {
  if (view.busy.has(id)) return;
  if (verb === "pause" && !window.confirm(`Pause changefeed ${id}? Its source must keep history meanwhile.`)) return;
  view.busy.add(id);
  try {
    const answer = await fetch(`api/v2/changefeeds/${encodeURIComponent(id)}/${verb}`, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: "{}",
    });
    if (!answer.ok) {
      const said = await answer.json().catch(() => ({}));
      // Codes have TiCDC's prefix there, and ours in the documentation.
      const code = (said.error_code || `${answer.status}`).replace(/^CDC:/, "TM:");
      window.alert(`${code}: ${said.error_msg || "refused"}`);
    }
  } finally {
    view.busy.delete(id);
  }
  await refresh(load);
}

function changefeedRow(feed) {
  const paused = feed.state === "stopped" || feed.state === "failed" || feed.state === "finished";
  const verb = paused ? "resume" : "pause";
  const job = feed.lake_job || "none";
  const name = element("button", { class: "name", "data-part": "name", onclick: () => open(feed.id) }, feed.id);
  const row = element("tr", { "data-id": feed.id, class: feed.id === view.chosen ? "chosen" : "" },
    cell("Changefeed", [name]),
    cell("State", [
      element("span", { class: `state ${feed.state}` }, feed.state),
      feed.error ? element("span", { class: "error" }, `${feed.error.code} ${feed.error.message}`) : null,
    ].filter(Boolean)),
    cell("Lag", feed.lag_seconds === null ? "" : duration(feed.lag_seconds), "number"),
    cell("Stages", [stageBar(feed.stages)]),
    cell("Lake job", [
      element("span", { class: job }, job),
      feed.spark_ui ? element("a", { "data-part": "spark", href: feed.spark_ui, target: "_blank", rel: "noreferrer" }, "Spark UI") : null,
    ].filter(Boolean)),
    cell("Dump", dumpCell(feed.dump)),
    cell("Sink", feed.sink_uri),
    cell("", [element("button", {
      "data-part": "steer", "aria-label": `${verb} ${feed.id}`, onclick: () => steer(feed.id, verb),
    }, verb)]),
  );
  return row;
}

function finding(found) {
  return element("li", { class: found.level },
    element("strong", {}, found.where), `: ${found.what}`,
    found.do ? element("span", { class: "do" }, `→ ${found.do}`) : null);
}

function blocker(found) {
  const commands = found.commands.map((command) => element("code", { class: "do" }, command));
  return element("li", { class: found.blocks ? "warning" : "note" },
    element("strong", {}, found.id), ` ${found.reason}`, ...commands);
}

function capture(of) {
  const roles = [of.is_owner ? "owner" : "", of.is_draining ? "draining" : ""].filter(Boolean).join(", ");
  return { kind: "capture", name: of.id, role: roles, address: `${of.address}, Flight ${of.flight_address}`,
    version: of.version, started: of.started };
}

function daemonRow(daemon) {
  const up = daemon.started ? duration((Date.now() - Date.parse(daemon.started)) / 1000) : "";
  return element("tr", {}, cell("Daemon", daemon.kind), cell("Name", daemon.name), cell("Role", daemon.role),
    cell("Address", daemon.address), cell("Version", daemon.version), cell("Up", up));
}

function perSecond(value) {
  return value ? `${value < 10 ? value.toFixed(1) : Math.round(value)}` : "";
}

function readerFacts(feed) {
  return (feed.readers || []).map((reader) => [`reader ${reader.name}`, `at ${reader.checkpoint_time || reader.checkpoint_tso}`]);
}

function jobFacts(job) {
  if (!job) return [];
  const error = job.error ? `, ${job.error.code} ${job.error.message}` : "";
  return [["lake job", `${job.state}, newest cut ${job.cut_time || "none"}, reported ${job.reported}${error}`]];
}

function facts(feed) {
  const shown = {
    "source": feed.source_uri || "the cluster", "sink": feed.sink_uri, "filter": feed.filter.join(" "),
    "created": feed.create_time, "checkpoint": `${feed.checkpoint_time} (${feed.checkpoint_tso})`,
    "tables": `${feed.table_count}`, "left out": feed.ignored_tables.join(", "),
    "rows/s": perSecond(feed.rows_per_s),
    ...Object.fromEntries([...jobFacts(feed.lake_job), ...readerFacts(feed)]),
  };
  for (const [stage, lag] of Object.entries(feed.stages)) shown[stage] = `${duration(lag)} behind the present`;
  return Object.entries(shown).filter(([, value]) => value).flatMap(
    ([name, value]) => [element("dt", {}, name), element("dd", {}, value)]);
}

function showDetail(feed) {
  at("detail").hidden = !feed;
  if (!feed) return;
  at("detail-title").textContent = `Changefeed ${feed.id}`;
  at("facts").replaceChildren(...facts(feed));
  at("tables").tBodies[0].replaceChildren(...feed.tables.map((table) => element("tr", {},
    cell("Table", table.table), cell("State", [element("span", { class: table.state }, table.state)]),
    cell("Lag", duration(table.lag_seconds), "number"), cell("Rows/s", perSecond(table.rows_per_s), "number"), cell("Resolved", `${table.resolved_ts}`, "number"))));
  at("ddls").replaceChildren(...feed.ddls.map((ddl) => element("li", {},
    `${ddl.time} `, element("code", {}, ddl.query))));
}

function shownFeeds() {
  const text = at("filter").value.toLowerCase();
  return view.document.changefeeds.filter(
    (feed) => `${feed.id} ${feed.state} ${feed.sink_uri}`.toLowerCase().includes(text));
}

function show() {
  const shown = view.document;
  const rates = shown.rows_per_second === null ? "" : ` · ${Math.round(shown.rows_per_second)} rows/s sorted here`;
  at("cluster").textContent = `version ${shown.version} · up ${duration(shown.uptime_seconds)}${rates}`;
  const findings = shown.findings.length ? shown.findings.map(finding)
    : [element("li", { class: "note" }, "nothing is wrong")];
  at("findings").replaceChildren(...findings);
  const feeds = shownFeeds();
  if (!feeds.some((feed) => feed.id === view.chosen)) view.chosen = feeds.length ? feeds[0].id : "";
  const focused = document.activeElement;
  const row = focused?.closest("tr[data-id]")?.dataset.id;
  at("changefeeds").tBodies[0].replaceChildren(...feeds.map(changefeedRow));
  if (row) document.querySelector(`tr[data-id="${CSS.escape(row)}"] [data-part="${focused.dataset.part}"]`)?.focus();
  at("daemons").tBodies[0].replaceChildren(...[...shown.daemons, ...shown.captures.map(capture)].map(daemonRow));
  at("gc").textContent = shown.gc ? shown.gc.summary : "the coordinator does not explain its garbage collection";
  at("blockers").replaceChildren(...(shown.gc ? shown.gc.blockers : []).map(blocker));
  showDetail(shown.detail);
}

async function load() {
  const query = view.open ? `?changefeed=${encodeURIComponent(view.open)}` : "";
  const answer = await fetch(`console.json${query}`);
  const said = await answer.json();
  if (!answer.ok) throw new Error(`${said.error_code} ${said.error_msg}`);
  view.document = said;
  show();
}

function open(id) {
  view.open = view.open === id ? "" : id;
  view.chosen = id;
  refresh(load).then(() => view.open && at("detail").scrollIntoView({ behavior: "smooth" }));
}

function move(step) {
  const feeds = shownFeeds().map((feed) => feed.id);
  const next = feeds.indexOf(view.chosen) + step;
  view.chosen = feeds[Math.min(feeds.length - 1, Math.max(0, next))] || "";
  show();
  document.querySelector("tr.chosen")?.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.tagName === "INPUT") {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (["BUTTON", "A"].includes(event.target.tagName) && event.key === "Enter") return;
  const keys = {
    j: () => move(1), k: () => move(-1),
    Enter: () => view.chosen && open(view.chosen),
    p: () => view.chosen && steer(view.chosen, "pause"),
    r: () => view.chosen && steer(view.chosen, "resume"),
    "/": () => at("filter").focus(),
    Escape: () => { view.open = ""; refresh(load); },
  };
  if (view.document && keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
at("filter").addEventListener("input", () => view.document && show());

keepRefreshing(load);
