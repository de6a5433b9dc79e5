// Keyboard, charts and the CSRF header. Every page works without this file.
(() => {
  "use strict";
  const mount = document.body.dataset.mount;
  const typing = (el) => el.closest("input, textarea, select, [contenteditable]") !== null;
  const rows = () => [...document.querySelectorAll("main a.row")];

  // -- keyboard
  let leader = 0;
  const go = (key) => {
    const entry = document.querySelector(`nav a[data-key="${CSS.escape(key)}"]`);
    if (entry) location.assign(entry.href);
  };
  const step = (by) => {
    const all = rows();
    if (!all.length) return;
    const at = all.indexOf(document.activeElement);
    all[at < 0 ? (by > 0 ? 0 : all.length - 1) : Math.min(all.length - 1, Math.max(0, at + by))].focus();
  };
  const help = document.getElementById("help");
  const showHelp = () => help && !help.open && help.showModal();
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      document.querySelectorAll("details.person[open]").forEach((one) => one.removeAttribute("open"));
      if (typing(event.target)) event.target.blur();
      return;
    }
    if (typing(event.target) || (help && help.open)) return;
    const afterLeader = Date.now() - leader < 1500;
    leader = 0;
    if (afterLeader) return go(event.key);
    if (event.key === "g") leader = Date.now();
    else if (event.key === "/") { event.preventDefault(); document.getElementById("q")?.focus(); }
    else if (event.key === "?") showHelp();
    else if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
  });
  document.querySelector("[data-help]")?.addEventListener("click", showHelp);

  // -- htmx sends the token that forms carry
  const token = document.querySelector('meta[name="csrf-token"]')?.content;
  document.body.addEventListener("htmx:configRequest", (event) => {
    if (token) event.detail.headers["X-CSRF-Token"] = token;
  });

  // -- live
  const liveness = document.getElementById("liveness");
  document.body.addEventListener("htmx:sseOpen", () => { if (liveness) liveness.hidden = false; });
  document.body.addEventListener("htmx:sseError", () => { if (liveness) liveness.hidden = true; });
  document.body.addEventListener("htmx:sseMessage", (event) => {
    if (event.detail.type === "chart") draw();
    else if (event.detail.type === "pulse") document.querySelector(".live-away")?.replaceChildren();
  });

  // -- charts
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let charts = [];
  let last = "";
  const axis = () => ({ stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: "12px system-ui" });
  const line = (label, name, fill) => ({ label, stroke: colour(name), width: 1.5, fill: fill ? colour(name) + "22" : undefined, points: { show: false }, spanGaps: true });
  const pad = (number) => String(number).padStart(2, "0");
  const clock = (at) => { const d = new Date(at * 1000); return `${pad(d.getUTCHours())}:${pad(d.getUTCMinutes())}`; };
  const chart = (id, data, series) => {
    const box = document.getElementById(id);
    if (!box) return null;
    box.replaceChildren();
    const made = new uPlot({
      width: box.clientWidth, height: 170, cursor: { y: false }, scales: { y: { range: (u, low, high) => [0, Math.max(1, high * 1.1)] } },
      axes: [{ ...axis(), values: (u, ticks) => ticks.map(clock) }, { ...axis(), size: 60 }],
      series: [{ label: "UTC", value: (u, at) => (at === null ? "–" : clock(at)) }, ...series],
    }, data, box);
    box.querySelector("canvas")?.setAttribute("aria-hidden", "true");
    return made;
  };
  function draw(force) {
    const held = document.getElementById("series");
    if (!held || !window.uPlot || (held.value === last && !force)) return;
    last = held.value;
    const s = JSON.parse(last);
    if (!s.at.length) return;
    charts.forEach((one) => one && one.destroy());
    charts = [
      chart("chart-throughput", [s.at, s.done, s.failed, s.buried], [line("done", "--done-line", true), line("failed", "--failed-line"), line("dead", "--buried-line")]),
      chart("chart-latency", [s.at, s.p50, s.p95], [line("p50", "--p50-line"), line("p95", "--p95-line")]),
    ];
  }
  draw(true);
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => draw(true), 150); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw(true));
})();
