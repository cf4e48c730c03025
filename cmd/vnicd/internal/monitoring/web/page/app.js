// The page requests /v1/overview every two seconds and shows the answer.

import { h, text, attribute, byID } from "./dom.js";
import { bytes, byteRate, clock, count, perSecond, span } from "./format.js";
import { heat, histogram, lines, span as shown, sparkline, strip } from "./charts.js";
import { topology } from "./topology.js";

const period = 2000;
const stale = 20000; // age in ms of old data: the daemon makes a snapshot every 2 to 10 s

let samples = [];
let names = []; // of a sample's values
let last = null; // the latest answer
let chosen = new URLSearchParams(location.hash.slice(1)).get("vm") || ""; // VM, as in #vm=NAME
let order = { by: "state", down: false };

// Values.

const nothing = new Proxy({}, { get: () => 0 });

// rates of a VM in the latest sample.
function rates(vm) {
  const v = samples.at(-1)?.vms[vm];
  return v ? Object.fromEntries(names.map((n, i) => [n, v[i]])) : nothing;
}

// points of the sum of some series, of one VM or of all.
function points(which, vm) {
  const at = which.map((n) => names.indexOf(n));
  return samples.map((p) => {
    const of = vm === undefined ? Object.values(p.vms) : p.vms[vm] ? [p.vms[vm]] : [];
    return { at: p.at_ms, value: of.reduce((sum, v) => sum + at.reduce((x, i) => x + v[i], 0), 0) };
  });
}

// Problems.

const marks = { error: "✕", warning: "!", note: "i", fine: "✓" };
let told = "";

function showProblems(o) {
  const list = o.problems;
  const words = JSON.stringify(list.map((p) => [p.severity, p.vm, p.network, p.what, p.present, Math.floor((o.at_ms - p.since_ms) / 10000)]));
  if (words === told) return;
  told = words;
  const root = byID("problems");
  root.replaceChildren();
  if (!list.some((p) => p.present && p.severity !== "note")) {
    root.append(h("div", { class: "problem fine" }, h("span", { class: "mark" }, marks.fine), h("span", { class: "who" }, "No problems"),
      h("span", { class: "what" }, `${o.vms.filter((v) => v.hca === "up").length} of ${o.vms.length} VMs use RDMA now`), h("span", { class: "when" }, "")));
  }
  const most = 8;
  for (const p of list.slice(0, most)) {
    const when = p.present ? "for " + span((o.at_ms - p.since_ms) / 1000) : `over since ${clock(p.last_ms)}`;
    const row = h(p.vm ? "button" : "div", { class: `problem ${p.severity}${p.present ? "" : " gone"}`, type: p.vm ? "button" : null },
      h("span", { class: "mark", "aria-label": p.severity }, marks[p.severity]), h("span", { class: "who" }, p.vm || p.network || "this host"),
      h("span", { class: "what" }, p.what), h("span", { class: "when", title: "since " + clock(p.since_ms) }, when));
    if (p.vm) row.addEventListener("click", () => choose(p.vm));
    root.append(row);
  }
  if (list.length > most) root.append(h("p", { class: "sub" }, `and ${list.length - most} more`));
}

function worst(o) {
  const m = new Map();
  for (const p of o.problems) if (p.present && p.vm && m.get(p.vm) !== "error") m.set(p.vm, p.severity);
  return m;
}

// Tiles.

const sumOf = (n) => points(n).at(-1)?.value || 0;
const tiles = [
  { id: "vms", label: "VMs up", value: (o) => `${o.vms.filter((v) => v.hca === "up" || v.net === "up").length} of ${o.vms.length}`,
    more: (o) => `${o.vms.reduce((n, v) => n + v.qps, 0)} queue pairs, ${o.networks.length} network${o.networks.length === 1 ? "" : "s"}` },
  { id: "rdma", label: "RDMA", colour: "rdma", series: ["rdma_in_bytes", "rdma_out_bytes"], value: () => byteRate(sumOf(["rdma_in_bytes", "rdma_out_bytes"])),
    more: () => perSecond(sumOf(["rdma_in_packets", "rdma_out_packets"])) + " packets" },
  { id: "eth", label: "Ethernet", colour: "eth", series: ["eth_in_bytes", "eth_out_bytes"], value: () => byteRate(sumOf(["eth_in_bytes", "eth_out_bytes"])),
    more: () => perSecond(sumOf(["eth_in_frames", "eth_out_frames"])) + " frames" },
  { id: "faults", label: "Page faults", colour: "guest", series: ["guest_faults", "host_faults"], value: () => perSecond(sumOf(["guest_faults", "host_faults"])),
    more: (o) => `guest ${perSecond(sumOf(["guest_faults"]))}, host ${perSecond(sumOf(["host_faults"]))}, ${o.vms.reduce((n, v) => n + v.parked, 0)} wait` },
  { id: "lost", label: "Dropped or sent again", colour: "bad", series: ["dropped", "resent"], value: () => perSecond(sumOf(["dropped", "resent"])),
    more: () => `dropped ${perSecond(sumOf(["dropped"]))}, again ${perSecond(sumOf(["resent"]))}` },
  { id: "buffers", label: "Frame buffers in use", value: (o) => count(o.buffers.in_use), more: (o) => `of ${count(o.buffers.count)}; ran out ${count(o.buffers.exhausted)} times` },
];

for (const t of tiles) {
  t.figure = h("div", { class: "value" });
  t.rest = h("div", { class: "more" });
  t.line = t.colour ? sparkline(t.colour, 200, 26) : null;
  byID("tiles").append(h("div", { class: "tile", id: "tile-" + t.id }, h("div", { class: "label" }, t.label), t.figure, t.rest, t.line?.node ?? ""));
}

function showTiles(o) {
  for (const t of tiles) {
    text(t.figure, t.value(o));
    text(t.rest, t.more(o));
    t.line?.update(points(t.series), o.at_ms);
  }
}

// The table of VMs. pair is two values, one above the other.

const pair = (a, b) => [a, b];
const restricted = (v) => (v.dma === "rw" ? "" : `, dma ${v.dma}`);
const columns = [
  { id: "name", label: "VM", class: "name", key: (v) => v.name, cell: (v) => pair(v.name, v.network + restricted(v)) },
  { id: "state", label: "State", key: (v) => (v.hca === "down" && v.net === "down" ? 1 : 0), state: true },
  { id: "rdma", label: "RDMA in, out", key: (v, r) => r.rdma_in_bytes + r.rdma_out_bytes, cell: (v, r) => pair(byteRate(r.rdma_in_bytes), byteRate(r.rdma_out_bytes)) },
  { id: "trend", label: "last 10 min", class: "wide", spark: true },
  { id: "packets", label: "Packets/s in, out", key: (v, r) => r.rdma_in_packets + r.rdma_out_packets, cell: (v, r) => pair(count(r.rdma_in_packets), count(r.rdma_out_packets)) },
  { id: "messages", label: "Messages/s copied", key: (v, r) => r.local_messages, cell: (v, r) => pair(count(r.local_messages)) },
  { id: "eth", label: "Ethernet in, out", key: (v, r) => r.eth_in_bytes + r.eth_out_bytes, cell: (v, r) => pair(byteRate(r.eth_in_bytes), byteRate(r.eth_out_bytes)) },
  { id: "faults", label: "Faults/s guest, host", key: (v, r) => r.guest_faults + r.host_faults, cell: (v, r) => pair(count(r.guest_faults), count(r.host_faults)) },
  { id: "wait", label: "Waiting", key: (v) => v.parked, cell: (v) => pair(count(v.parked)) },
  { id: "lost", label: "Dropped/s, again/s", key: (v, r) => r.dropped + r.resent, cell: (v, r) => pair(count(r.dropped), count(r.resent)), alarm: true },
  { id: "memory", label: "Resident, budget", key: (v) => v.resident_bytes, cell: (v) => pair(bytes(v.resident_bytes), v.budget_bytes ? bytes(v.budget_bytes) : "no budget") },
  { id: "strip", label: "Faults over memory", class: "wide", strip: true },
];
const rows = new Map();

byID("vms").tHead.append(h("tr", {}, ...columns.map((c) => {
  c.head = h("th", { scope: "col" });
  if (c.key) {
    const b = h("button", { type: "button" }, c.label);
    b.addEventListener("click", () => {
      order = { by: c.id, down: order.by === c.id ? !order.down : c.id !== "name" && c.id !== "state" };
      showTable(last);
    });
    c.head.append(b);
  } else {
    c.head.append(c.label);
  }
  return c.head;
})));

function newRow(v) {
  const row = { tr: h("tr", { tabindex: 0, "data-vm": v.name }), cells: [] };
  for (const c of columns) {
    const td = h("td", { class: c.class, "data-label": c.label });
    const cell = { td };
    if (c.spark) {
      cell.line = sparkline("rdma", 110, 24);
      td.append(cell.line.node);
    } else if (c.strip) {
      cell.strip = strip(140, 16);
      td.append(cell.strip.node);
    } else if (c.state) {
      cell.dots = ["net", "hca"].map((f) => {
        const s = h("span", { class: "dot" }), t = h("span");
        td.append(h("span", {}, s, t), f === "net" ? h("br") : "");
        return [f, s, t];
      });
    } else {
      cell.first = h("span");
      cell.second = h("small");
      td.append(h("span", {}, cell.first, " ", cell.second));
    }
    row.cells.push(cell);
    row.tr.append(td);
  }
  row.tr.addEventListener("click", () => choose(v.name));
  row.tr.addEventListener("keydown", (e) => { if (e.key === "Enter") choose(v.name); });
  return row;
}

function showTable(o) {
  const by = columns.find((c) => c.id === order.by);
  const list = o.vms.map((v) => [v, rates(v.name)]);
  list.sort(([a, ra], [b, rb]) => {
    const [x, y] = [by.key(a, ra), by.key(b, rb)];
    const d = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y;
    return (order.down ? -d : d) || a.name.localeCompare(b.name, "en", { numeric: true });
  });
  for (const c of columns) {
    if (c.id === order.by) attribute(c.head, "aria-sort", order.down ? "descending" : "ascending");
    else c.head.removeAttribute("aria-sort");
  }
  for (const name of [...rows.keys()]) {
    if (!o.vms.some((v) => v.name === name)) {
      rows.get(name).tr.remove();
      rows.delete(name);
    }
  }
  const body = byID("vms").tBodies[0];
  list.forEach(([v, r], place) => {
    if (!rows.has(v.name)) rows.set(v.name, newRow(v));
    const row = rows.get(v.name);
    if (body.children[place] !== row.tr) body.insertBefore(row.tr, body.children[place] || null);
    attribute(row.tr, "class", (v.name === chosen ? "chosen" : "") + (v.net === "down" && v.hca === "down" ? " off" : ""));
    columns.forEach((c, i) => {
      const cell = row.cells[i];
      if (c.spark) {
        cell.line.update(points(["rdma_in_bytes", "rdma_out_bytes"], v.name), o.at_ms);
      } else if (c.strip) {
        cell.strip.update(v.strip);
      } else if (c.state) {
        for (const [f, dot, words] of cell.dots) {
          attribute(dot, "class", "dot c-" + v[f]);
          text(words, (f === "net" ? "net " : "HCA ") + v[f]);
        }
      } else {
        const [a, b] = c.cell(v, r);
        text(cell.first, a);
        text(cell.second, b ?? "");
        if (c.alarm) attribute(cell.td, "class", c.key(v, r) > 0 ? "alarm" : "");
      }
    });
  });
}

// One VM in detail.

const charts = [
  { chart: lines("RDMA", byteRate, [{ name: "in", colour: "rdma" }, { name: "out", colour: "rdma", out: true }]), series: [["rdma_in_bytes"], ["rdma_out_bytes"]] },
  { chart: lines("Packets", perSecond, [{ name: "RDMA", colour: "rdma" }, { name: "Ethernet", colour: "eth", out: true }]),
    series: [["rdma_in_packets", "rdma_out_packets"], ["eth_in_frames", "eth_out_frames"]] },
  { chart: lines("Ethernet", byteRate, [{ name: "in", colour: "eth" }, { name: "out", colour: "eth", out: true }]), series: [["eth_in_bytes"], ["eth_out_bytes"]] },
  { chart: lines("Page faults", perSecond, [{ name: "guest level", colour: "guest" }, { name: "host level", colour: "host" }]), series: [["guest_faults"], ["host_faults"]] },
];
const heats = { guest: heat("guest", "Guest level: pages that the guest's driver brought in"), host: heat("host", "Host level: memory that the host made resident") };
const times = { guest: histogram("guest", "Service time, guest level"), host: histogram("host", "Service time, host level") };
byID("charts").append(...charts.map((c) => c.chart.node));
byID("memory").append(heats.guest.node, heats.host.node, times.guest.node, times.host.node);
let detailOf = "";

function showDetail(o) {
  const v = o.vms.find((x) => x.name === chosen);
  byID("detail").hidden = !v;
  if (!v) return;
  text(byID("t-detail"), v.name);
  text(byID("detail-sub"), `network ${v.network}, ${v.mac}${restricted(v)}; virtio-net ${v.net}, HCA ${v.hca}; ${v.qps} queue pairs, ${v.mrs} memory regions; ` +
    `memory ${bytes(v.memory_bytes)}, ${bytes(v.resident_bytes)} of it resident for its devices${v.budget_bytes ? ", budget " + bytes(v.budget_bytes) : ""}`);
  for (const c of charts) c.chart.update(c.series.map((n) => points(n, v.name)), o.at_ms);
  const d = o.detail;
  if (!d || d.name !== v.name) return; // comes with the next answer
  const fresh = detailOf !== v.name;
  detailOf = v.name;
  let first = 31, end = 0;
  for (const level of ["guest", "host"]) {
    heats[level].update(d[level], d.areas, fresh);
    d[level].buckets.forEach((n, i) => {
      if (n) {
        first = Math.min(first, i);
        end = Math.max(end, i);
      }
    });
  }
  // Both histograms have the same scale, of at least twelve bars, so that it does not change with each fault.
  if (end < first) [first, end] = [2, 13];
  first = Math.max(0, first - 1);
  end = Math.min(31, Math.max(end + 1, first + 11));
  for (const level of ["guest", "host"]) times[level].update(d[level], first, end);
}

function choose(name) {
  chosen = name;
  history.replaceState(null, "", "#" + new URLSearchParams({ vm: name }));
  if (last) show(last);
  poll();
}

// The whole page.

const map = topology(byID("topology"), choose);
for (const [colour, words, dot] of [["c-rdma", "RDMA connection"], ["c-eth", "network; dashed: tunnel"], ["c-up", "up", 1], ["c-attached", "attached, no driver", 1], ["c-down", "not attached", 1], ["c-broken", "stopped for an error", 1]]) {
  byID("topology-legend").append(h("li", { class: colour }, h("i", { class: dot ? "dot" : "" }), h("span", { class: "word" }, words)));
}
byID("topology-legend").append(h("li", {}, h("span", { class: "word" }, "two dots: virtio-net, HCA")));

function show(o) {
  document.title = `vnicd ${o.host}`;
  text(byID("host"), o.host);
  text(byID("about"), `${o.version}, up ${span(o.uptime_seconds)}`);
  if (!o.vms.some((v) => v.name === chosen)) {
    const sick = o.problems.find((p) => p.present && p.vm && p.severity !== "note");
    chosen = sick?.vm || [...o.vms].sort((a, b) => b.faults[0] + b.faults[1] - a.faults[0] - a.faults[1])[0]?.name || "";
  }
  showProblems(o);
  showTiles(o);
  map.update(o, chosen, rates, worst(o));
  showTable(o);
  showDetail(o);
}

function live(words, state) {
  text(byID("live"), words);
  attribute(byID("live"), "class", state);
}

let timer = 0, asking = false;

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  const asked = chosen;
  try {
    const since = samples.at(-1)?.seq || 0;
    const r = await fetch(`v1/overview?since=${since}&vm=${encodeURIComponent(chosen)}`, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!r.ok) throw new Error(await r.text());
    const o = await r.json();
    if (last && o.uptime_seconds < last.uptime_seconds) samples = []; // another daemon: its numbers start again
    names = o.series;
    samples = samples.filter((p) => p.at_ms > o.at_ms - shown && !o.samples.some((n) => n.seq === p.seq)).concat(o.samples);
    last = o;
    if (o.age_ms > stale) live(`no new data for ${span(o.age_ms / 1000)}: the data path does not answer`, "bad");
    else live("live", "ok");
  } catch (e) {
    live(last ? `no answer since ${clock(last.at_ms)}` : "no answer: " + e.message, "bad");
  }
  asking = false;
  timer = setTimeout(poll, chosen !== asked ? 50 : document.hidden ? 5 * period : period);
  if (last) show(last);
}

addEventListener("hashchange", () => {
  const name = new URLSearchParams(location.hash.slice(1)).get("vm");
  if (name && name !== chosen) choose(name);
});
addEventListener("resize", () => { if (last) show(last); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
