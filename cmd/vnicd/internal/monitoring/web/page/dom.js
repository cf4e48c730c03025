// Only these two functions make elements: text becomes text nodes, never markup, so a name cannot inject any.

const SVG = "http://www.w3.org/2000/svg";

function fill(e, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) e.setAttribute(name, value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}

// h("p", {class: "x"}, "text", child…) makes an HTML element.
export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

// s(…) makes an SVG element likewise.
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// text and attribute change a node only if its value differs, to avoid layout and repeated announcements by screen
// readers.
export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

export function attribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export const byID = (id) => document.getElementById(id);

// tip shows what say() returns while the pointer or the focus is on a node.
export function tip(node, say) {
  const box = byID("tip");
  const show = (x, y) => {
    const words = say();
    if (!words) return;
    text(box, words);
    box.hidden = false;
    const r = box.getBoundingClientRect();
    box.style.left = Math.max(4, Math.min(x + 12, innerWidth - r.width - 4)) + "px";
    box.style.top = (y + 18 + r.height > innerHeight ? Math.max(4, y - r.height - 8) : y + 18) + "px";
  };
  node.addEventListener("pointermove", (e) => show(e.clientX, e.clientY));
  node.addEventListener("pointerleave", () => { box.hidden = true; });
}
