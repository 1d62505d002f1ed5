// Markdown within a paragraph, as a tree: text, code, emphasis, strong, strike, link, break.
//
// Every character is looked at a bounded number of times, however the text is made: a model may write anything.

/** Emphasis within emphasis further down than this stays as it was written. */
const MAX_DEPTH = 12;
const LINK_TARGET = /\([ \t]*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:[ \t]+"[^"\n]*")?[ \t]*\)/y;
const BARE_LINK = /https?:\/\/[^\s<>"'`]+/y;
const ANGLE_LINK = /<(https?:\/\/[^\s<>]+)>/y;
const WORD = /[\p{L}\p{N}]/u;
const SPACE = /\s/;
const ESCAPABLE = /[!-/:-@[-`{-~]/;

/** The nodes of a text: {type, text} or {type, children}; a link has its href too. */
export function parseInline(text) {
  const scanner = new Scanner(text);
  while (scanner.at < text.length) scanner.step();
  return emphasised(scanner.nodes);
}

/** An address that may be followed, or null: http and https alone. */
export function safeUrl(address) {
  if (!URL.canParse(address)) return null;
  const url = new URL(address);
  return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = [];
    this.brackets = []; // places in nodes of a [ that may begin a link
    this.ticks = runsOfTicks(text);
  }

  step() {
    const char = this.text[this.at];
    if (char === "\\") this.escape();
    else if (char === "`") this.code();
    else if (char === "*" || char === "_" || char === "~") this.delimiter(char);
    else if (char === "[") this.open();
    else if (char === "]") this.close();
    else if (char === "<") this.angle();
    else if (char === "\n") this.lineEnd();
    else if (char === "h") this.bare();
    else this.plain(char, 1);
  }

  plain(text, length) {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text += text;
    else this.nodes.push({ type: "text", text });
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next === "\n") this.at += 1;
    else if (next !== undefined && ESCAPABLE.test(next)) this.plain(next, 2);
    else this.plain("\\", 1);
  }

  lineEnd() {
    const last = this.nodes.at(-1);
    if (last?.type === "text") last.text = last.text.trimEnd();
    this.nodes.push({ type: "break" });
    this.at += 1;
  }

  code() {
    const length = runLength(this.text, this.at);
    const places = this.ticks.get(length) ?? [];
    while (places.length && places.at(-1) <= this.at) places.pop();
    if (!places.length) return this.plain("`".repeat(length), length);
    const end = places.pop();
    let text = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    if (text.startsWith(" ") && text.endsWith(" ") && text.trim()) text = text.slice(1, -1);
    this.nodes.push({ type: "code", text });
    this.at = end + length;
  }

  delimiter(char) {
    const length = runLength(this.text, this.at);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + length] ?? " ";
    if (char === "~" && length !== 2) return this.plain(char.repeat(length), length);
    const inWord = char === "_" && WORD.test(before) && WORD.test(after);
    const canOpen = !SPACE.test(after) && !inWord;
    const canClose = !SPACE.test(before) && !inWord;
    this.nodes.push({ type: "delimiter", char, length, canOpen, canClose });
    this.at += length;
  }

  open() {
    this.brackets.push(this.nodes.length);
    this.nodes.push({ type: "text", text: "[" });
    this.nodes.push({ type: "text", text: "" }); // what follows must not join the bracket
    this.at += 1;
  }

  close() {
    const place = this.brackets.pop();
    const target = place === undefined ? null : matchAt(LINK_TARGET, this.text, this.at + 1);
    const href = target && safeUrl(target[1]);
    if (!href) return this.plain("]", 1);
    const children = emphasised(this.nodes.splice(place).slice(1));
    this.image();
    this.nodes.push({ type: "link", href, children });
    this.brackets = []; // no link within a link
    this.at += 1 + target[0].length;
  }

  /** A picture is a link to it: the page loads nothing from elsewhere. */
  image() {
    const last = this.nodes.at(-1);
    if (last?.type === "text" && last.text.endsWith("!")) last.text = last.text.slice(0, -1);
  }

  angle() {
    const match = matchAt(ANGLE_LINK, this.text, this.at);
    if (match) this.link(match[1], match[0].length);
    else this.plain("<", 1);
  }

  bare() {
    const match = WORD.test(this.text[this.at - 1] ?? " ") ? null : matchAt(BARE_LINK, this.text, this.at);
    if (match) this.bareLink(match[0]);
    else this.plain("h", 1);
  }

  bareLink(found) {
    const trailing = found.includes("(") ? /[.,;:!?*_~\]]/ : /[.,;:!?*_~\])]/;
    let end = found.length;
    while (trailing.test(found[end - 1])) end -= 1;
    this.link(found.slice(0, end), end);
  }

  link(address, length) {
    const href = safeUrl(address);
    if (!href) return this.plain(this.text.slice(this.at, this.at + length), length);
    this.nodes.push({ type: "link", href, children: [{ type: "text", text: address }] });
    this.at += length;
  }
}

/** Nodes with delimiters paired off into emphasis: one pass with a stack, a closer meets the last opener of its kind. */
function emphasised(nodes) {
  const out = [];
  const openers = { "*": [], _: [], "~": [] };
  for (const node of nodes) {
    if (node.type === "delimiter") pair(node, out, openers[node.char]);
    else out.push(node);
  }
  return out.map(asText).filter((node) => node.type !== "text" || node.text);
}

function pair(closer, out, openers) {
  while (closer.canClose && closer.length > 0) {
    while (openers.length && out[openers.at(-1).place] !== openers.at(-1)) openers.pop();
    if (!openers.length) break;
    if (!wrap(openers.at(-1), closer, out)) openers.pop(); // nor will it ever be closed by another
  }
  if (closer.length === 0) return;
  closer.place = out.length;
  out.push(closer);
  if (closer.canOpen) openers.push(closer);
}

/** Everything since the opener, as one node; false where that would be too deep, or nothing. */
function wrap(opener, closer, out) {
  const depth = 1 + out.slice(opener.place + 1).reduce((most, node) => Math.max(most, node.depth ?? 0), 0);
  if (depth > MAX_DEPTH || out.length === opener.place + 1) return false;
  const used = Math.min(2, opener.length, closer.length);
  const type = opener.char === "~" ? "strike" : used === 2 ? "strong" : "emphasis";
  const children = out.splice(opener.place + 1).map(asText);
  opener.length -= used;
  closer.length -= used;
  if (opener.length === 0) out.pop();
  out.push({ type, children, depth });
  return true;
}

function asText(node) {
  return node.type === "delimiter" ? { type: "text", text: node.char.repeat(node.length) } : node;
}

/** Where runs of so many backticks begin, the first of them last. */
function runsOfTicks(text) {
  const places = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!places.has(run.length)) places.set(run.length, []);
    places.get(run.length).push(index);
  }
  for (const found of places.values()) found.reverse();
  return places;
}

function runLength(text, start) {
  let end = start;
  while (text[end] === text[start]) end += 1;
  return end - start;
}

function matchAt(pattern, text, place) {
  pattern.lastIndex = place;
  return pattern.exec(text);
}
