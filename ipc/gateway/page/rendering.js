// The tree of markdown as elements. A text grows at its end while it streams, so blocks that did not change are kept.

import { element } from "./dom.js";
import { highlighted } from "./highlight.js";
import { parseInline } from "./inline.js";
import { parseBlocks } from "./markdown.js";

const INLINE_TAGS = { strong: "strong", emphasis: "em", strike: "s" };

/** Keeps what is in an element equal to a text. */
export class Rendering {
  #into;
  #sources = [];

  constructor(into) {
    this.#into = into;
  }

  /** Only the blocks from the first that differs on are made anew. */
  show(text) {
    const blocks = parseBlocks(text);
    const last = blocks.length - 1;
    const same = blocks.findIndex((block, place) => place === last || block.source !== this.#sources[place]);
    const keep = Math.max(0, same);
    while (this.#into.childNodes.length > keep) this.#into.lastChild.remove();
    this.#into.append(...blocks.slice(keep).map(blockNode));
    this.#sources = blocks.map((block) => block.source);
  }
}

function blockNode(block) {
  switch (block.type) {
    case "heading":
      return element(`h${Math.min(6, Math.max(3, block.level + 1))}`, {}, ...inlineNodes(block.text));
    case "code":
      return codeNode(block);
    case "quote":
      return element("blockquote", {}, ...block.blocks.map(blockNode));
    case "rule":
      return element("hr");
    case "list":
      return listNode(block);
    case "table":
      return tableNode(block);
    default:
      return element("p", {}, ...inlineNodes(block.text));
  }
}

function codeNode({ language, text }) {
  const copy = element("button", { type: "button", class: "quiet" }, "Copy");
  copy.addEventListener("click", () => copyText(copy, text));
  const name = element("span", {}, language || "code");
  const code = element("code", {}, ...highlighted(text, language));
  const body = element("pre", { tabindex: 0, role: "region", "aria-label": `Code, ${language || "no language"}` }, code);
  return element("div", { class: "code" }, element("div", { class: "code-head" }, name, copy), body);
}

/** To the clipboard, with a word on the button. */
export async function copyText(button, text) {
  const label = button.textContent;
  const done = await writeClipboard(text);
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = label), 1500);
}

async function writeClipboard(text) {
  if (!navigator.clipboard) return false; // neither HTTPS nor this machine
  return navigator.clipboard.writeText(text).then(
    () => true,
    () => false,
  );
}

function listNode({ ordered, start, items }) {
  const attributes = ordered && start !== 1 ? { start } : {};
  return element(ordered ? "ol" : "ul", attributes, ...items.map(itemNode));
}

/** A lone paragraph needs no element of its own. */
function itemNode({ checked, blocks }) {
  const nodes = blocks.flatMap((block, place) =>
    place === 0 && block.type === "paragraph" ? inlineNodes(block.text) : [blockNode(block)],
  );
  if (checked === null) return element("li", {}, ...nodes);
  const box = element("input", { type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do" });
  return element("li", { class: "task" }, box, ...nodes);
}

function tableNode({ align, head, rows }) {
  const row = (cells, tag) =>
    element("tr", {}, ...cells.map((text, column) => element(tag, { class: align[column] }, ...inlineNodes(text))));
  const table = element(
    "table",
    {},
    element("thead", {}, row(head, "th")),
    element("tbody", {}, ...rows.map((cells) => row(cells, "td"))),
  );
  return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
}

function inlineNodes(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  if (node.type === "text") return document.createTextNode(node.text);
  if (node.type === "break") return element("br");
  if (node.type === "code") return element("code", {}, node.text);
  const children = node.children.map(inlineNode);
  if (node.type !== "link") return element(INLINE_TAGS[node.type], {}, ...children);
  const rel = "noopener noreferrer nofollow";
  return element("a", { href: node.href, target: "_blank", rel, title: node.href }, ...children);
}
