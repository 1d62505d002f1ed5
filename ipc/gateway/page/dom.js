// Elements, without innerHTML: what a model wrote only ever becomes a text node.

const SVG = "http://www.w3.org/2000/svg";

/** An element of HTML. Children are nodes or strings; an attribute that is false, null or undefined is left out. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** A button of an icon of index.html's, named for who does not see it. */
export function iconButton(icon, label, onClick, attributes = {}) {
  const button = element("button", { type: "button", class: "icon", "aria-label": label, title: label, ...attributes });
  button.append(iconOf(icon));
  button.addEventListener("click", onClick);
  return button;
}

/** One of the symbols of index.html. */
export function iconOf(name) {
  return svg("svg", { class: "glyph", "aria-hidden": "true" }, svg("use", { href: `#icon-${name}` }));
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
