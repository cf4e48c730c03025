// Charts: lines over time, the heat map of a VM's memory, the histogram of fault times.

import { h, s, text, attribute, tip } from "./dom.js";
import { bytes, count, duration, hex } from "./format.js";

// span is the time that line charts show, in ms.
export const span = 10 * 60 * 1000;

// nice is the smallest of 1, 2, 5 times a power of ten that is not below v.
function nice(v) {
  if (v <= 0) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  return [1, 2, 5, 10].find((f) => f * p >= v * 0.9999) * p;
}

// path of points {at, value} in a box; where a sample is missing the line has a gap.
function path(points, x, y) {
  let d = "";
  let last = -Infinity;
  for (const p of points) {
    d += (p.at - last > 30000 ? "M" : "L") + x(p.at).toFixed(1) + " " + y(p.value).toFixed(1);
    last = p.at;
  }
  return d;
}

// sparkline draws a line without axes: a function that takes points and the present time.
export function sparkline(colour, width, height) {
  const line = s("path", { class: "line l-" + colour });
  const area = s("path", { class: "area f-" + colour });
  const node = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return {
    node,
    update(points, now) {
      const top = Math.max(...points.map((p) => p.value), 1e-9);
      const x = (at) => width - ((now - at) / span) * width;
      const y = (v) => height - 1 - (v / top) * (height - 3);
      const shown = points.filter((p) => p.at > now - span);
      const d = path(shown, x, y);
      attribute(line, "d", d);
      attribute(area, "d", shown.length ? `${d}L${x(shown.at(-1).at).toFixed(1)} ${height}L${x(shown[0].at).toFixed(1)} ${height}Z` : "");
    },
  };
}

// lines draws several series over the last ten minutes, with axes. parts: {name, colour, out}.
export function lines(title, unit, parts) {
  const height = 168, left = 66, bottom = 22, top = 8;
  const svg = s("svg", { height, role: "img", "aria-label": title });
  const figure = h("figure", {},
    h("figcaption", {}, h("h3", {}, title), legend(parts.map((p) => ["c-" + p.colour, p.name, p.out]))), svg);
  const grid = s("g"), data = s("g");
  svg.append(grid, data);
  const drawn = parts.map((p) => s("path", { class: `line l-${p.colour}${p.out ? " out" : ""}` }));
  const filled = parts.map((p) => s("path", { class: "area f-" + p.colour }));
  data.append(...filled, ...drawn);
  let shape = "";
  return {
    node: figure,
    update(values, now) {
      const width = Math.max(figure.clientWidth, 240);
      const max = nice(Math.max(...values.flat().map((p) => p.value), 0));
      const x = (at) => left + (1 - (now - at) / span) * (width - left - 6);
      const y = (v) => height - bottom - (v / max) * (height - bottom - top);
      if (shape !== width + "/" + max) {
        shape = width + "/" + max;
        attribute(svg, "viewBox", `0 0 ${width} ${height}`);
        grid.replaceChildren();
        for (const f of [0, 0.5, 1]) {
          grid.append(s("line", { class: "axis", x1: left, x2: width - 6, y1: y(f * max), y2: y(f * max) }),
            s("text", { class: "soft small", x: left - 8, y: y(f * max) + 4, "text-anchor": "end" }, unit(f * max)));
        }
        for (let m = 10; m >= 0; m -= 2) {
          const at = left + (1 - m / 10) * (width - left - 6);
          grid.append(s("text", { class: "soft small", x: at, y: height - 5, "text-anchor": m === 0 ? "end" : m === 10 ? "start" : "middle" }, m ? `−${m} min` : "now"));
        }
      }
      values.forEach((points, i) => {
        const shown = points.filter((p) => p.at > now - span);
        const d = path(shown, x, y);
        attribute(drawn[i], "d", d);
        attribute(filled[i], "d", shown.length && !parts[i].out ? `${d}L${x(shown.at(-1).at).toFixed(1)} ${y(0)}L${x(shown[0].at).toFixed(1)} ${y(0)}Z` : "");
      });
    },
  };
}

export function legend(entries) {
  const list = h("ul", { class: "legend" });
  for (const [colour, name, dashed] of entries) {
    const i = h("i");
    if (dashed) i.style.borderTopStyle = "dashed";
    list.append(h("li", { class: colour }, i, h("span", { class: "word" }, name)));
  }
  return list;
}

// The classes of a heat map's cells are fixed, so that colours can be compared.
const classes = [1, 10, 100, 1000, 10000];
const classOf = (n) => classes.filter((c) => n >= c).length;

// heat draws one level's faults over a VM's memory. The daemon's cells are of equal size, a power of two.
export function heat(level, title) {
  const svg = s("svg", { role: "img", "aria-label": title, class: level });
  const sub = h("span", { class: "sub" });
  const key = h("ul", { class: "legend " + level });
  ["0", "1 to 9", "10 to 99", "100 to 999", "1,000 to 9,999", "10,000 and more"].forEach((words, i) =>
    key.append(h("li", {}, h("i", { class: "cell h" + i }), h("span", { class: "word" }, words))));
  const figure = h("figure", {}, h("figcaption", {}, h("h3", {}, title), sub), svg, key);
  let shape = "", cells = [], before = null, figures = [];

  function layout(width, size, areas, rows, columns, base) {
    const left = 66, gap = 1.5;
    const side = (width - left) / columns;
    const tall = Math.max(Math.min(side, 22), 9);
    svg.replaceChildren();
    cells = [];
    attribute(svg, "viewBox", `0 0 ${width} ${(rows * tall + 2).toFixed(1)}`);
    for (let r = 0; r < rows; r++) {
      if (rows <= 8 || r % 2 === 0) {
        svg.append(s("text", { class: "soft small", x: left - 8, y: r * tall + tall / 2 + 4, "text-anchor": "end" }, bytes(r * columns * size)));
      }
      for (let c = 0; c < columns; c++) {
        const i = r * columns + c;
        const from = base + i * size;
        const memory = areas.some((a) => a.guest_pa < from + size && a.guest_pa + a.bytes > from);
        const cell = s("rect", { x: (left + c * side).toFixed(2), y: (r * tall + 1).toFixed(2), width: (side - gap).toFixed(2), height: (tall - gap).toFixed(2), rx: 1.5, class: memory ? "h0" : "nomem" });
        if (memory) tip(cell, () => `${hex(from)} to ${hex(from + size - 1)}\n${figures[i] || 0} page faults`);
        svg.append(cell);
        cells.push(memory ? cell : null);
      }
    }
  }

  return {
    node: figure,
    update(view, areas, fresh) {
      const end = Math.max(...areas.map((a) => a.guest_pa + a.bytes), 0);
      // The chart goes from the memory's first cell to its last. Before the first fault the cell size is unknown.
      let size = view.cell_bytes || 65536;
      const first = Math.min(...areas.map((a) => a.guest_pa), end);
      if (!view.cell_bytes) while (size * 256 < end - first) size *= 2;
      const base = Math.floor(first / size) * size;
      const width = Math.max(figure.clientWidth, 240);
      const columns = width < 420 ? 16 : 32;
      const used = Math.min(Math.max(Math.ceil((end - base) / size), 1), 512);
      const rows = Math.ceil(used / columns);
      const now = JSON.stringify([width, size, areas, base]);
      if (shape !== now) {
        shape = now;
        layout(width, size, areas, rows, columns, base);
        before = null;
      }
      // Cells in the order of the chart. Both begin at multiples of the size.
      const skip = (base - view.base_pa) / size;
      figures = Array.from({ length: rows * columns }, (_, i) => view.cells[i + skip] || 0);
      if (fresh) before = null;
      const all = view.cells.reduce((a, b) => a + b, 0);
      text(sub, end ? `${count(all)} faults since the start; a cell is ${bytes(size)}, a row ${bytes(size * columns)}${base ? `, from ${hex(base)} on` : ""}` : "no QEMU attached");
      cells.forEach((cell, i) => {
        if (!cell) return;
        const n = figures[i] || 0;
        attribute(cell, "class", `h${classOf(n)}${before && n > (before[i] || 0) ? " hot" : ""}`);
      });
      before = figures;
    },
  };
}

// histogram draws how long one level's faults took: a bar for each power of two of microseconds.
export function histogram(level, title) {
  const height = 150, left = 66, bottom = 34, top = 8;
  const svg = s("svg", { height, role: "img", "aria-label": title });
  const sub = h("span", { class: "sub" });
  const figure = h("figure", {}, h("figcaption", {}, h("h3", {}, title), sub), svg);
  const bound = (i) => duration(2 ** i * 1000);
  let shape = "", bars = [], figures = [];
  return {
    node: figure,
    update(view, first, last) {
      const width = Math.max(figure.clientWidth, 240);
      const max = nice(Math.max(...view.buckets, 1));
      const n = last - first + 1;
      const step = (width - left - 6) / n;
      const y = (v) => height - bottom - (v / max) * (height - bottom - top);
      if (shape !== [width, max, first, last].join()) {
        shape = [width, max, first, last].join();
        svg.replaceChildren();
        attribute(svg, "viewBox", `0 0 ${width} ${height}`);
        for (const f of max > 1 ? [0, 0.5, 1] : [0, 1]) {
          svg.append(s("line", { class: "axis", x1: left, x2: width - 6, y1: y(f * max), y2: y(f * max) }),
            s("text", { class: "soft small", x: left - 8, y: y(f * max) + 4, "text-anchor": "end" }, count(f * max)));
        }
        bars = [];
        const every = Math.ceil(n / (width / 62));
        for (let i = first; i <= last; i++) {
          const x = left + (i - first) * step;
          const bar = s("rect", { class: "f-" + level, x: (x + 1.5).toFixed(1), width: Math.max(step - 3, 1).toFixed(1), rx: 1.5 });
          const words = i === 0 ? "below " + bound(0) : i === 31 ? bound(30) + " and more" : `${bound(i - 1)} to ${bound(i)}`;
          tip(bar, () => `${words}\n${figures[i] || 0} page faults`);
          svg.append(bar);
          bars.push([i, bar]);
          if (i < last && (i - first) % every === every - 1) {
            svg.append(s("line", { class: "axis", x1: x + step, x2: x + step, y1: height - bottom, y2: height - bottom + 4 }),
              s("text", { class: "soft small", x: (x + step).toFixed(1), y: height - bottom + 16, "text-anchor": "middle" }, bound(i)));
          }
        }
        svg.append(s("text", { class: "soft small", x: (left + width) / 2, y: height - 3, "text-anchor": "middle" }, "time from raising to answer; each bar is twice the one before"));
      }
      figures = view.buckets;
      for (const [i, bar] of bars) {
        const v = figures[i] || 0;
        // Rare events stay visible.
        const tall = v ? Math.max(y(0) - y(v), 1.5) : 0;
        attribute(bar, "y", (y(0) - tall).toFixed(1));
        attribute(bar, "height", tall.toFixed(1));
      }
      text(sub, view.count ? `${count(view.count)} faults; median ${duration(view.median_ns)}, 99 % ${duration(view.p99_ns)}, longest ${duration(view.max_ns)}` : "no faults yet");
    },
  };
}

// strip draws a VM's faults of both levels in a row, for a table.
export function strip(width, height) {
  const node = s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "guest", "aria-hidden": "true" });
  let cells = null;
  return {
    node,
    update(figures) {
      if (!cells) {
        const side = width / figures.length;
        cells = figures.map((_, i) => s("rect", { x: (i * side).toFixed(2), y: 0, width: (side - 0.6).toFixed(2), height, rx: 1 }));
        node.append(...cells);
      }
      figures.forEach((n, i) => attribute(cells[i], "class", "h" + classOf(n)));
    },
  };
}
