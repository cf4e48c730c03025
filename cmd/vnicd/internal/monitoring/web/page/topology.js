// The topology: this host with its networks, VMs and TAP ports on the left, the other hosts on the right (below in a
// narrow window). Its layout changes only when an object is added or removed; values change in place.

import { s, text, attribute, tip } from "./dom.js";
import { byteRate } from "./format.js";

const chip = { w: 146, h: 50, gap: 14 };

export function topology(root, choose) {
  const svg = s("svg", { role: "img", "aria-label": "Topology" });
  root.append(svg);
  let shape = "", chips = new Map(), conns = [], buses = [];

  function vmChip(v, x, y) {
    const dotNet = s("circle", { cx: x + 16, cy: y + 17, r: 4.5 });
    const dotHCA = s("circle", { cx: x + 29, cy: y + 17, r: 4.5 });
    const rate = s("text", { class: "soft small", x: x + 12, y: y + 39 });
    const name = v.name.length > 13 ? v.name.slice(0, 12) + "…" : v.name;
    const g = s("g", { class: "vm", tabindex: 0, role: "button", "aria-label": v.name, "data-vm": v.name },
      s("rect", { class: "box", x, y, width: chip.w, height: chip.h, rx: 8 }), dotNet, dotHCA,
      s("text", { class: "strong", x: x + 40, y: y + 21 }, name), rate);
    g.addEventListener("click", () => choose(v.name));
    g.addEventListener("keydown", (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(v.name); } });
    const c = { g, x, y, dotNet, dotHCA, rate, say: "" };
    tip(g, () => c.say);
    chips.set(v.name, c);
    return g;
  }

  function layout(o, width) {
    svg.replaceChildren();
    chips = new Map();
    conns = [];
    buses = [];
    const peers = [...new Set(o.networks.flatMap((n) => n.peers.map((p) => p.addr)))];
    const aside = peers.length > 0 && width >= 640;
    const hostWidth = aside ? width - 250 : width - 2;
    const columns = Math.max(1, Math.floor((hostWidth - 44) / (chip.w + chip.gap)));
    const lower = s("g"), links = s("g"), upper = s("g");
    svg.append(lower, links, upper);
    let y = 34;
    const exits = new Map(); // network -> point where its bus leaves the host
    for (const n of o.networks) {
      const nodes = [...o.vms.filter((v) => v.network === n.name).map((v) => ({ vm: v })), ...n.taps.map((t) => ({ tap: t }))];
      upper.append(s("text", { class: "strong", x: 18, y: y + 12 }, n.name),
        s("text", { class: "soft", x: 24 + Math.min(n.name.length, 32) * 8, y: y + 12 }, `VNI ${n.vni}, MTU ${n.mtu}, ${n.addresses} addresses`));
      y += 38; // room for arcs
      const rows = Math.max(1, Math.ceil(nodes.length / columns));
      for (let r = 0; r < rows; r++) {
        const line = y + chip.h + 12;
        const row = nodes.slice(r * columns, (r + 1) * columns);
        row.forEach((node, i) => {
          const x = 32 + i * (chip.w + chip.gap);
          lower.append(s("line", { class: "stub", x1: x + chip.w / 2, x2: x + chip.w / 2, y1: y + chip.h, y2: line }));
          if (node.vm) {
            upper.append(vmChip(node.vm, x, y));
          } else {
            upper.append(s("rect", { class: "box", x, y: y + 8, width: chip.w, height: chip.h - 8, rx: 3 }),
              s("text", { class: "strong", x: x + 12, y: y + 27 }, node.tap), s("text", { class: "soft small", x: x + 12, y: y + 43 }, "host port (TAP)"));
          }
        });
        const end = r === 0 && n.peers.length && aside ? hostWidth : 32 + Math.max(row.length, 1) * (chip.w + chip.gap) - chip.gap;
        lower.append(s("line", { class: "bus", x1: 20, x2: end, y1: line, y2: line }));
        if (r === 0) exits.set(n.name, { x: aside ? hostWidth : 20, y: line, first: line });
        exits.get(n.name).last = line;
        y = line + (r < rows - 1 ? 26 : 14);
      }
      const e = exits.get(n.name);
      if (e.last !== e.first) lower.append(s("line", { class: "bus", x1: 20, x2: 20, y1: e.first, y2: e.last }));
      y += 12;
    }
    if (!o.networks.length) {
      upper.append(s("text", { class: "soft", x: 18, y: y + 12 }, "no networks yet"));
      y += 28;
    }
    lower.prepend(s("rect", { class: "frame", x: 1, y: 1, width: hostWidth - 1, height: y - 1, rx: 10 }));
    upper.append(s("text", { class: "strong", x: 14, y: 21 }, o.host),
      s("text", { class: "soft", x: 22 + Math.min(o.host.length, 40) * 8, y: 21 }, o.vtep ? `this host, tunnels from ${o.vtep.local}` : "this host, no tunnels"));

    // The other hosts.
    const places = new Map();
    let bottom = y + 4;
    const each = Math.max(58, aside ? Math.min(90, (y - 10) / Math.max(peers.length, 1)) : 58);
    peers.forEach((addr, i) => {
      const x = aside ? width - 172 : 32 + (i % Math.max(1, Math.floor((width - 32) / 184))) * 184;
      const py = aside ? 6 + i * each : y + 30 + Math.floor(i / Math.max(1, Math.floor((width - 32) / 184))) * 62;
      const learnt = o.networks.some((n) => n.peers.some((p) => p.addr === addr && p.learnt));
      upper.append(s("rect", { class: "box", x, y: py, width: 170, height: 46, rx: 10 }), s("text", { class: "strong", x: x + 12, y: py + 20 }, addr),
        s("text", { class: "soft small", x: x + 12, y: py + 37 }, learnt ? "other host, learnt" : "other host"));
      places.set(addr, { x, y: py, w: 170, h: 46 });
      bottom = Math.max(bottom, py + 52);
    });
    for (const n of o.networks) {
      const from = exits.get(n.name);
      for (const p of n.peers) {
        const to = places.get(p.addr);
        const d = aside
          ? `M${from.x} ${from.y}C${from.x + 40} ${from.y} ${to.x - 40} ${to.y + to.h / 2 + 8} ${to.x} ${to.y + to.h / 2 + 8}`
          : `M${from.x} ${from.last}V${to.y - 12}H${to.x + 20}V${to.y}`;
        const link = s("path", { class: "tunnel", d });
        tip(link, () => `network ${n.name}, VNI ${n.vni}: tunnel to ${p.addr}`);
        links.append(link);
      }
    }

    // RDMA connections; both directions of a pair are one line.
    const pairs = new Map();
    for (const c of o.connections) {
      if (!chips.has(c.vm) || (c.kind === "vm" ? !chips.has(c.to) : !places.has(c.to))) continue;
      const key = c.kind === "vm" ? [c.vm, c.to].sort().join("\n") : c.vm + "\n" + c.to;
      const p = pairs.get(key) || { a: c.vm, b: c.to, kind: c.kind, count: 0 };
      p.count = Math.max(p.count, c.count);
      pairs.set(key, p);
    }
    for (const p of pairs.values()) {
      const a = chips.get(p.a);
      let d;
      if (p.kind === "vm" && p.a === p.b) {
        d = `M${a.x + chip.w - 40} ${a.y}c0 -14 26 -14 26 0`;
      } else if (p.kind === "vm") {
        const b = chips.get(p.b);
        const [ax, bx] = [a.x + chip.w / 2, b.x + chip.w / 2];
        const lift = Math.min(24, 12 + Math.abs(ax - bx) / 30);
        d = a.y === b.y ? `M${ax} ${a.y}C${ax} ${a.y - lift} ${bx} ${b.y - lift} ${bx} ${b.y}`
          : `M${ax} ${a.y}C${ax} ${a.y - 22} ${bx + 30} ${b.y + (a.y < b.y ? -30 : chip.h + 30)} ${bx} ${b.y + (a.y < b.y ? 0 : chip.h)}`;
      } else {
        const b = places.get(p.b);
        d = aside ? `M${a.x + chip.w - 24} ${a.y}C${a.x + chip.w + 60} ${a.y - 30} ${b.x - 90} ${b.y + b.h / 2 - 6} ${b.x} ${b.y + b.h / 2 - 6}`
          : `M${a.x + chip.w - 12} ${a.y + chip.h}C${a.x + chip.w + 20} ${a.y + chip.h + 60} ${b.x + b.w - 30} ${b.y - 60} ${b.x + b.w - 30} ${b.y}`;
      }
      const line = s("path", { class: "conn", d, "stroke-width": (1.5 + Math.min(3, Math.log2(p.count) / 2)).toFixed(1) });
      tip(line, () => `RDMA: ${p.a} and ${p.b}, ${p.count} connection${p.count > 1 ? "s" : ""}`);
      links.append(line);
      conns.push({ line, ...p });
    }
    attribute(svg, "viewBox", `0 0 ${width} ${Math.ceil(bottom)}`);
  }

  return {
    update(o, chosen, rates, worst) {
      const width = Math.max(root.clientWidth, 300);
      const now = JSON.stringify([width, o.host, o.vtep, o.networks.map((n) => [n.name, n.vni, n.mtu, n.addresses, n.taps, n.peers]), o.vms.map((v) => [v.name, v.network]), o.connections]);
      if (shape !== now) {
        shape = now;
        layout(o, width);
      }
      for (const v of o.vms) {
        const c = chips.get(v.name);
        if (!c) continue;
        const r = rates(v.name);
        const bad = worst.get(v.name);
        attribute(c.g, "class", "vm" + (v.name === chosen ? " chosen" : "") + (bad === "error" ? " ill" : bad === "warning" ? " sick" : ""));
        attribute(c.dotNet, "class", "d-" + v.net);
        attribute(c.dotHCA, "class", "d-" + v.hca);
        const rdma = r.rdma_in_bytes + r.rdma_out_bytes, eth = r.eth_in_bytes + r.eth_out_bytes;
        text(c.rate, v.net === "down" && v.hca === "down" ? "no QEMU attached" : rdma >= eth ? "RDMA " + byteRate(rdma) : "Ethernet " + byteRate(eth));
        c.say = `${v.name}, ${v.mac}\nvirtio-net ${v.net}, HCA ${v.hca}\n${v.qps} queue pairs, ${v.mrs} memory regions`;
      }
      for (const c of conns) {
        const busy = [c.a, c.b].every((name) => !chips.has(name) || rates(name).rdma_in_packets + rates(name).rdma_out_packets > 1);
        attribute(c.line, "class", busy ? "conn busy" : "conn");
      }
    },
  };
}
