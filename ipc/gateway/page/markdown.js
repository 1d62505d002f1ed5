// Markdown as a tree of blocks, for what models write: CommonMark's blocks, GitHub's tables, strikes and tasks.
// There is no HTML in it: a tag is text.

/** Lists and quotes further down than this stay as they were written. */
const MAX_DEPTH = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TASK = /^\[([ xX])\][ \t]+/;
const ALIGNMENT = /^:?-+:?$/;

/**
 * The blocks of a text, each with the lines it came from as its source:
 * heading {level, text}, paragraph {text}, code {language, text}, quote {blocks}, rule, table {align, head, rows},
 * list {ordered, start, items: [{checked, blocks}]}. Texts within are for parseInline.
 */
export function parseBlocks(text, depth = 0) {
  const lines = text.replaceAll("\t", "    ").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, end] = blockAt(lines, at, depth);
    blocks.push({ ...block, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

/** The block that begins there, and the line behind it. */
function blockAt(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return codeAt(lines, at);
  if (HEADING.test(line)) return [headingOf(line), at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (isTableAt(lines, at)) return tableAt(lines, at);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quoteAt(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return listAt(lines, at, depth);
  return paragraphAt(lines, at, depth);
}

/** A fence that was not closed goes on to the end: its text is still being written. */
function codeAt(lines, at) {
  const [, fence, info] = FENCE.exec(lines[at]);
  const indent = indentOf(lines[at]);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], fence)) end += 1;
  const text = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, indentOf(line))));
  const language = info.trim().split(/\s/)[0];
  return [{ type: "code", language, text: text.join("\n") }, Math.min(end + 1, lines.length)];
}

function closes(line, fence) {
  const text = line.trim();
  return indentOf(line) < 4 && text.length >= fence.length && text === fence[0].repeat(text.length);
}

function headingOf(line) {
  const [, marks, text = ""] = HEADING.exec(line);
  return { type: "heading", level: marks.length, text: text.trimEnd().replace(/(^|[ \t])#{1,6}$/, "").trim() };
}

function paragraphAt(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  return [{ type: "paragraph", text: lines.slice(at, end).map((line) => line.trimStart()).join("\n").trimEnd() }, end];
}

/** Whether a paragraph ends where this line begins; a number in a running text does not make it a list. */
function interrupts(lines, at, depth) {
  const line = lines[at];
  const item = depth < MAX_DEPTH && ITEM.exec(line);
  if (item) return item[0].length < line.length && (!/\d/.test(item[2]) || item[2].length === 2);
  if (depth < MAX_DEPTH && QUOTE.test(line)) return true;
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTableAt(lines, at);
}

function quoteAt(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner.join("\n"), depth + 1) }, end];
}

/** Items of one kind of marker; what is indented by two or more belongs to the item before, as models indent freely. */
function listAt(lines, at, depth) {
  const [, , marker] = ITEM.exec(lines[at]);
  const kind = marker.at(-1);
  const items = [];
  let end = at;
  while (end < lines.length && beginsItem(lines[end], kind)) {
    const begin = end;
    end = itemEnd(lines, begin);
    items.push(itemOf(lines.slice(begin, end), depth));
    const next = behindBlanks(lines, end);
    if (next < lines.length && beginsItem(lines[next], kind)) end = next;
  }
  const ordered = /\d/.test(marker);
  return [{ type: "list", ordered, start: ordered ? Number.parseInt(marker, 10) : 1, items }, end];
}

function beginsItem(line, kind) {
  return ITEM.exec(line)?.[2].at(-1) === kind && !RULE.test(line);
}

function behindBlanks(lines, at) {
  let next = at;
  while (next < lines.length && isBlank(lines[next])) next += 1;
  return next;
}

function itemEnd(lines, begin) {
  let end = begin + 1;
  for (let next = end; next < lines.length; next += 1) {
    if (isBlank(lines[next])) continue;
    const follows = next === end && !ITEM.test(lines[next]) && !interrupts(lines, next, 0);
    if (indentOf(lines[next]) < 2 && !follows) break;
    end = next + 1;
  }
  return end;
}

function itemOf(lines, depth) {
  const width = ITEM.exec(lines[0])[0].length;
  const rest = lines.slice(1).map((line) => line.slice(Math.min(width, indentOf(line))));
  const first = lines[0].slice(width);
  const task = TASK.exec(first);
  const text = [task ? first.slice(task[0].length) : first, ...rest].join("\n");
  return { checked: task ? task[1] !== " " : null, blocks: parseBlocks(text, depth + 1) };
}

function isTableAt(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return false;
  const marks = cellsOf(lines[at + 1]);
  return marks.every((mark) => ALIGNMENT.test(mark)) && marks.length === cellsOf(lines[at]).length;
}

function tableAt(lines, at) {
  const align = cellsOf(lines[at + 1]).map(alignmentOf);
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) {
    const cells = cellsOf(lines[end]);
    rows.push(align.map((_, column) => cells[column] ?? ""));
    end += 1;
  }
  return [{ type: "table", align, head: cellsOf(lines[at]), rows }, end];
}

function alignmentOf(mark) {
  if (!mark.endsWith(":")) return "start";
  return mark.startsWith(":") ? "center" : "end";
}

function cellsOf(line) {
  const cells = line.trim().replaceAll("\\|", "\u0000").split("|");
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells.map((cell) => cell.replaceAll("\u0000", "|").trim());
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}
