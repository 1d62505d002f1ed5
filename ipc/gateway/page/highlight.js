// Colours for code: comments, strings, numbers and the common words, for most languages in one pattern.

import { element } from "./dom.js";

const WORDS =
  "and as async await break case catch class const continue def default del do elif else enum except export extends " +
  "false finally fn for from func function if impl import in interface is lambda let match mod mut new nil none not " +
  "null or package pass private pub public raise return select self static struct super switch then this throw true " +
  "try type typeof use var void where while with yield";
const KEYWORDS = new Set(WORDS.split(" "));
const STRINGS = `"(?:[^"\\\\\\n]|\\\\.)*"|'(?:[^'\\\\\\n]|\\\\.)*'|\`(?:[^\`\\\\]|\\\\.)*\``;
const HASH = "#[^\\n]*";
const SLASHES = "\\/\\/[^\\n]*|\\/\\*[^]*?\\*\\/";
const WITH_HASH = /^(py|python|sh|bash|shell|console|zsh|yaml|yml|toml|ruby|rb|r|perl|make|makefile|dockerfile|ini)$/i;
const PLAIN = /^(|text|txt|plain|markdown|md|diff)$/i;
/** Longer code stays plain: it is read for what it says. */
const MAX_LENGTH = 20_000;

/** The nodes of a code: its text, with spans around what has a colour. */
export function highlighted(text, language) {
  if (PLAIN.test(language) || text.length > MAX_LENGTH) return [text];
  const comment = WITH_HASH.test(language) ? HASH : SLASHES;
  const pattern = new RegExp(`(${comment})|(${STRINGS})|\\b(\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    const kind = kindOf(match);
    if (!kind) continue;
    nodes.push(text.slice(at, match.index), element("span", { class: kind }, match[0]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)];
}

function kindOf([, comment, string, number, word]) {
  if (comment) return "code-comment";
  if (string) return "code-string";
  if (number) return "code-number";
  return KEYWORDS.has(word.toLowerCase()) ? "code-keyword" : null;
}
