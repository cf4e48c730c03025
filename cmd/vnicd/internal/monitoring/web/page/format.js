// Numbers for people: three digits and a unit.

function scaled(value, base, units) {
  let i = 0;
  while (Math.abs(value) >= base * 0.9995 && i < units.length - 1) {
    value /= base;
    i++;
  }
  const digits = value === 0 || value >= 99.95 || (i === 0 && Number.isInteger(value)) ? 0 : value >= 9.995 ? 1 : value < 0.1 ? 2 : 1;
  return [value.toFixed(digits), units[i]];
}

export const count = (n) => scaled(n, 1000, ["", " k", " M", " G", " T"]).join("");
export const bytes = (n) => scaled(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]).join("");
// byteRate uses decimal units, as usual for networks.
export const byteRate = (n) => scaled(n, 1000, [" B/s", " kB/s", " MB/s", " GB/s"]).join("");
export const perSecond = (n) => count(n) + "/s";

// duration of nanoseconds.
export const duration = (ns) => (ns < 1e9 ? scaled(ns, 1000, [" ns", " µs", " ms"]).join("") : span(ns / 1e9));

// span of seconds, in its largest unit and the next.
export function span(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const i = Math.max(units.findIndex(([, size]) => seconds >= size), 0);
  if (seconds < 60) return Math.floor(seconds) + " s";
  const [unit, size] = units[i];
  const [next, part] = units[i + 1];
  const rest = Math.floor((seconds % size) / part);
  return Math.floor(seconds / size) + " " + unit + (rest ? " " + rest + " " + next : "");
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
export const hex = (n) => "0x" + n.toString(16);
