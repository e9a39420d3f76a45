"use strict";
// Markdown as nodes: headings, lists, tables, quotes, rules, code, formulas, footnotes, emphasis,
// links to http(s). Text becomes text nodes only: HTML other than <br> is displayed as source.

const MOST_DEPTH = 8; // maximum nesting of quotes, lists and emphasis
const MOST_COLUMNS = 64; // maximum columns of a table
const MOST_SPAN = 1000; // maximum characters of a link, a URL or an inline formula
const ITEM = /^([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
// --- blocks -----------------------------------------------------------------------------------

const blank = (line) => !line.trim();

// Returns a line's indentation in columns.
function indent(line) {
  let at = 0;
  for (const c of line) {
    if (c !== " " && c !== "\t") break;
    at += c === "\t" ? 4 - (at % 4) : 1;
  }
  return at;
}

// Removes up to `columns` columns of indentation from a line.
function dedented(line, columns) {
  const own = indent(line);
  return own ? " ".repeat(Math.max(own - columns, 0)) + line.trimStart() : line;
}

// Each reader returns the block that begins at a line, or null; `end`: index of the line after it.

function fence(lines, at) {
  const found = /^\s*(`{3,}|~{3,})\s*([^`]*)$/.exec(lines[at]);
  if (!found) return null;
  const [, mark, info] = found;
  let end = at + 1;
  const closes = (line) => line.startsWith(mark) && line === mark[0].repeat(line.length);
  while (end < lines.length && !closes(lines[end].trim())) end += 1;
  const own = indent(lines[at]);
  const code = lines.slice(at + 1, end).map((line) => (own ? dedented(line, own) : line));
  const text = code.join("\n");
  return { kind: "code", end: Math.min(end + 1, lines.length), language: info.trim(), text };
}

// A display formula; one without an end mark, which may still come, ends at a blank line.
function formula(lines, at) {
  const start = lines[at].trim();
  const close = { "$$": "$$", "\\[": "\\]" }[start.slice(0, 2)];
  const first = start.indexOf(close, 2);
  if (!close || (first > 0 && first + 2 < start.length)) return null;
  let end = at;
  const open = () => !lines[end].trim().endsWith(close) || (end === at && start.length < 4);
  while (end < lines.length && !blank(lines[end]) && open()) end += 1;
  const behind = end < lines.length && !blank(lines[end]) ? end + 1 : end;
  return { kind: "formula", end: behind, text: lines.slice(at, behind).join("\n") };
}

// Indented code cannot interrupt a paragraph.
function indented(lines, at) {
  const inside = (line) => indent(line) >= 4;
  if (!inside(lines[at]) || ITEM.test(lines[at].trimStart())) return null;
  let end = at;
  for (let next = at; next < lines.length; next += 1) {
    if (inside(lines[next])) end = next + 1;
    else if (!blank(lines[next])) break;
  }
  const text = lines.slice(at, end).map((line) => dedented(line, 4)).join("\n");
  return { kind: "code", end, language: "", text };
}

const NOTE = /^ {0,3}\[\^([^\]\s]{1,32})\]:\s*/;

function note(lines, at) {
  const found = NOTE.exec(lines[at]);
  if (!found) return null;
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines, end)) end += 1;
  const text = [lines[at].slice(found[0].length), ...lines.slice(at + 1, end)];
  return { kind: "note", end, name: found[1], text: text.map((s) => s.trim()).join("\n") };
}

function heading(lines, at) {
  const found = /^ {0,3}(#{1,6})(?:\s|$)/.exec(lines[at]);
  if (!found) return null;
  const text = lines[at].slice(found[0].length).trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  const closed = end === 0 || /\s/.test(text[end - 1]); // otherwise the marks are text
  return { kind: "heading", end: at + 1, level: found[1].length,
    text: closed ? text.slice(0, end).trim() : text };
}

function rule(lines, at) {
  const line = lines[at].trim();
  return indent(lines[at]) < 4 && RULE.test(line) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  const inner = [];
  let end = at;
  for (; end < lines.length && !blank(lines[end]); end += 1) {
    const found = /^ {0,3}> ?/.exec(lines[end]);
    if (!found && (end === at || blank(inner.at(-1)) || begins(lines, end))) break;
    inner.push(found ? lines[end].slice(found[0].length) : lines[end]);
  }
  return end > at ? { kind: "quote", end, lines: inner } : null;
}

function cells(line) {
  const out = [""];
  for (let at = 0; at < line.length; at += 1) {
    if (line[at] === "\\" && line[at + 1] === "|") { out[out.length - 1] += "|"; at += 1; }
    else if (line[at] === "|") out.push("");
    else out[out.length - 1] += line[at];
  }
  if (out.length > 1 && blank(out[0])) out.shift();
  if (out.length > 1 && blank(out.at(-1))) out.pop();
  return out.map((cell) => cell.trim());
}

function table(lines, at) {
  if (!lines[at].includes("|") || !/^[\s|:-]+$/.test(lines[at + 1] ?? "")) return null;
  const [head, marks] = [cells(lines[at]), cells(lines[at + 1])];
  const even = head.length === marks.length && head.length <= MOST_COLUMNS;
  if (!even || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const rows = lines.slice(at + 2, end).map(cells);
  const sides = marks.map((m) => (m.endsWith(":") ? (m.startsWith(":") ? "center" : "right") : ""));
  return { kind: "table", end, head, rows, sides };
}

// Models indent an item's content by two columns as often as by the width of its marker.
function list(lines, at) {
  const base = indent(lines[at]);
  const mark = (line) => ITEM.exec(line.trimStart());
  const first = mark(lines[at]);
  if (!first) return null;
  const [ordered, items] = [first[1].length > 1, []];
  let [end, loose, width] = [at, false, 0];
  for (let next = at; next < lines.length; next += 1) {
    const line = lines[next];
    if (blank(line)) continue;
    const gap = next > end;
    const found = indent(line) < base + 2 ? mark(line) : null;
    if (found && found[1].length > 1 === ordered && !rule(lines, next)) {
      loose ||= gap;
      width = indent(line) + (found[2].length > 4 ? found[1].length + 1 : found[0].length);
      items.push([line.trimStart().slice(found[0].length)]);
    } else if (indent(line) >= base + 2 || (!gap && !begins(lines, next))) {
      loose ||= gap;
      for (; end < next; end += 1) items.at(-1).push("");
      items.at(-1).push(dedented(line, width));
    } else break;
    end = next + 1;
  }
  return { kind: "list", end, ordered, loose, items, start: parseInt(first[1], 10) };
}

const READERS = [fence, formula, heading, rule, table, note];

// Whether a line begins a block that interrupts a paragraph; a numbered list only with number 1.
function begins(lines, at) {
  const line = lines[at].trimStart();
  return READERS.some((read) => read(lines, at)) || /^(>|[-*+] +\S|1[.)] +\S)/.test(line);
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && !blank(lines[end]) && !begins(lines, end)) end += 1;
  return { kind: "paragraph", end, text: lines.slice(at, end).map((s) => s.trim()).join("\n") };
}

function blocks(lines, depth) {
  const readers = [...READERS, ...(depth < MOST_DEPTH ? [quote, list] : []), indented];
  const out = [];
  for (let at = 0; at < lines.length;) {
    if (blank(lines[at])) { at += 1; continue; }
    let found = null;
    for (const read of readers) if ((found = read(lines, at))) break;
    found ??= paragraph(lines, at);
    out.push({ ...found, depth, source: lines.slice(at, found.end).join("\n") });
    at = found.end;
  }
  return out;
}

// --- spans ------------------------------------------------------------------------------------

function address(given) {
  try {
    const url = new URL(given);
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(href, children) {
  const safe = { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return filled(made("a", safe), children);
}

// Each span returns [its length, its node or text], or null where there is none.

function escaped(text, at) {
  const close = { "(": "\\)", "[": "\\]" }[text[at + 1]];
  const end = close ? text.slice(at, at + MOST_SPAN).indexOf(close) : -1;
  if (end > 0) return [end + 2, shownFormula(text.slice(at, at + end + 2))];
  return /[\n!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [2, text[at + 1]] : null;
}

// Names of character references that models write; others stay text.
const ENTITIES = new Map(`amp=& lt=< gt=> quot=" apos=' nbsp=\u00a0 copy=© reg=® trade=™ hellip=… mdash=—
  ndash=– lsquo=‘ rsquo=’ ldquo=“ rdquo=” laquo=« raquo=» bull=• middot=· times=× divide=÷ plusmn=± minus=−
  deg=° le=≤ ge=≥ ne=≠ asymp=≈ infin=∞ larr=← rarr=→ uarr=↑ darr=↓ harr=↔ rArr=⇒ sum=∑ radic=√ pi=π
  mu=μ alpha=α beta=β gamma=γ delta=δ sect=§ para=¶ euro=€ pound=£ yen=¥ cent=¢ frac12=½ sup2=² sup3=³
  shy=\u00ad zwj=\u200d`.split(/[ \n]+/).map((pair) => [pair.slice(0, pair.indexOf("=")),
  pair.slice(pair.indexOf("=") + 1)]));

function entity(text, at) {
  const found = /^&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z][A-Za-z\d]{1,31}));/.exec(
    text.slice(at, at + 40));
  if (!found) return null;
  const code = found[1] ? Number(found[1]) : parseInt(found[2] ?? "0", 16);
  const real = code > 0 && code < 0x110000 && !(code >= 0xd800 && code < 0xe000);
  const shown = found[3] ? ENTITIES.get(found[3]) : real ? String.fromCodePoint(code) : undefined;
  return [found[0].length, shown ?? found[0]];
}

// A formula with its marks, as MathML; as text if it is incomplete or has an unknown command.
function shownFormula(marked) {
  const given = /^(\$\$|\\\[|\$|\\\()([^]+?)(\$\$|\\\]|\$|\\\))$/.exec(marked.trim());
  return (given && formulaNode(given[2], /^(\$\$|\\\[)$/.test(given[1]))) ?? marked;
}

// `missing`: lengths of code marks without an end in the remaining text.
function code(text, at, { missing }) {
  const run = (from) => { let end = from; while (text[end] === "`") end += 1; return end - from; };
  const count = run(at);
  let end = missing.has(count) ? -1 : text.indexOf("`", at + count);
  while (end >= 0 && run(end) !== count) end = text.indexOf("`", end + run(end));
  if (end < 0) { missing.add(count); return [count, "`".repeat(count)]; }
  const inner = text.slice(at + count, end).replaceAll("\n", " ");
  const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return [end + count - at, made("code", {}, padded ? inner.slice(1, -1) : inner)];
}

const TARGET = new RegExp(String.raw`^\(\s*(?:<([^<>\n]*)>|((?:[^\s()]|\([^\s()]*\))*))`
  + String.raw`(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)`);

function linked(text, at, { inLink }) {
  const near = inLink ? "" : text.slice(at, at + MOST_SPAN);
  const foot = /^\[\^([^\]\s]{1,32})\]/.exec(near);
  if (foot) return [foot[0].length, made("sup", {}, foot[1])];
  let [end, open] = [0, 0];
  for (; end < near.length; end += 1) {
    if (near[end] === "\\") end += 1;
    else if (near[end] === "[") open += 1;
    else if (near[end] === "]" && (open -= 1) === 0) break;
  }
  const target = near[end + 1] === "(" ? TARGET.exec(near.slice(end + 1)) : null;
  const href = target && address(target[1] ?? target[2]);
  if (!href) return null;
  return [end + 1 + target[0].length, link(href, spans(near.slice(1, end), false, true))];
}

// Remote images are not loaded: they become links.
function image(text, at, held) {
  const found = text[at + 1] === "[" ? linked(text, at + 1, held) : null;
  return found && [found[0] + 1, found[1]];
}

function angled(text, at) {
  const found = /^<(?:(br) *\/?|(https?:\/\/[^\s<>]+))>/i.exec(text.slice(at, at + MOST_SPAN));
  const href = found?.[2] && address(found[2]);
  if (href) return [found[0].length, link(href, [found[2]])];
  return found?.[1] ? [found[0].length, made("br")] : null;
}

function bare(text, at, { inLink }) {
  const near = text.slice(at, at + MOST_SPAN);
  let found = /^https?:\/\/[^\s<>"`]+/.exec(near)[0].replace(/[.,:;!?*_~'|\]]{1,9}$/, "");
  if (found.endsWith(")") && !found.includes("(")) found = found.slice(0, found.indexOf(")"));
  const href = inLink ? null : address(found);
  return [found.length, href ? link(href, [found]) : found];
}

// Dollar signs: amounts of money are not formulas.
function dollars(text, at) {
  const near = text.slice(at, at + MOST_SPAN);
  const found = /^(?:\$\$[^$]+\$\$|\$(?![\s$])[^$\n]*[^\s$\\]\$(?!\d)|\$[^\s$]\$(?!\d))/.exec(near);
  return found && [found[0].length, shownFormula(found[0])];
}

// A run of marks that may begin or end emphasis; less strict than CommonMark next to punctuation,
// as languages without spaces require.
class Run {
  constructor(text, at) {
    let end = at;
    while (text[end] === text[at]) end += 1;
    Object.assign(this, { mark: text[at], count: end - at, length: end - at, depth: 0 });
    const [before, after] = [text[at - 1] ?? " ", text[end] ?? " "];
    const inWord = this.mark === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
    this.opens = !inWord && !/\s/.test(after);
    this.closes = !inWord && !/\s/.test(before);
  }

  toString() { return this.mark.repeat(this.count); }
}

const run = (text, at) => { const found = new Run(text, at); return [found.length, found]; };

const SPANS = { "\\": escaped, "`": code, "[": linked, "!": image, "<": angled, h: bare,
  $: dollars, "&": entity, "*": run, _: run, "~": run };
const SPECIAL = /[\\`[!<$&*_~]|https?:\/\/(?=[^\s<>"`])/g;

// Returns a paragraph's nodes and texts. `live`: streaming, so open emphasis may not have its end
// yet.
function spans(text, live, inLink = false) {
  const parts = [];
  const held = { missing: new Set(), inLink };
  let at = 0;
  for (;;) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    if (next > at) parts.push(text.slice(at, next));
    if (next === text.length) return emphasised(parts, live);
    const [length, part] = SPANS[text[next]](text, next, held) ?? [1, text[next]];
    parts.push(part);
    at = next + length;
  }
}

// Pairs runs of marks: each end with the nearest start of its length, else of its kind. Skipped
// runs leave `open`, so the time is linear. `depth`: nesting of the nodes after a run.
function emphasised(parts, live) {
  const [out, open, waiting] = [[], [{ depth: 0 }], {}]; // waiting: open ones by mark and length
  const pairs = ({ mark, count }) => count >= (mark === "~" ? 2 : 1);
  const noted = ({ mark, count }, by) => {
    for (const key of [mark, mark + count]) waiting[key] = (waiting[key] ?? 0) + by;
  };
  const begun = (part) => { open.push(part); noted(part, 1); };
  const deep = (depth) => { open.at(-1).depth = Math.max(open.at(-1).depth, depth); };
  const close = (end) => {
    while (pairs(end) && waiting[end.mark]) {
      const exact = waiting[end.mark + end.count];
      const fits = ({ mark, count }) => mark === end.mark && (!exact || count === end.count);
      let [begin, depth] = [null, 0];
      do { noted(begin = open.pop(), -1); depth = Math.max(depth, begin.depth); }
      while (!fits(begin));
      if (depth === MOST_DEPTH) { deep(depth); return; }
      const count = Math.min(2, begin.count, end.count);
      const tag = end.mark === "~" ? "del" : count === 2 ? "strong" : "em";
      const node = filled(made(tag), out.splice(begin.at + 1));
      begin.count -= count;
      end.count -= count;
      if (!begin.count) out.pop();
      else if (pairs(begin)) begun(begin);
      deep(depth + 1);
      out.push(node);
    }
  };
  for (const part of parts) {
    if (part instanceof Run) {
      if (part.closes) close(part);
      if (!part.count) continue;
      part.at = out.length;
      if (part.opens && pairs(part)) begun(part);
    }
    out.push(part);
  }
  const last = open.findLast((part) => part.mark === "*" && part.count === 2);
  if (live && last && out.length > last.at + 1) close({ mark: "*", count: 2 });
  return out;
}

// --- nodes ------------------------------------------------------------------------------------

// One by one: a call cannot have a hundred thousand arguments.
function filled(element, children) {
  for (const child of children) element.append(child instanceof Run ? child.toString() : child);
  return element;
}

// Code is coloured once it is complete.
function coded({ language, text, live }) {
  const inner = filled(made("code"), live ? [text] : coloured(text, language));
  const given = button("Copy", () => copy(inner.textContent, given));
  const bar = made("div", { class: "bar" }, made("span", {}, language.split(/\s/)[0]), given);
  return made("div", { class: "code" }, bar, made("pre", { tabindex: "0" }, inner));
}

function tabled({ head, rows, sides, live }) {
  const row = (tag, given) => filled(made("tr"), given.slice(0, sides.length).map((cell, i) =>
    filled(made(tag, sides[i] ? { class: sides[i] } : {}), spans(cell, live))));
  const body = filled(made("tbody"), rows.map((given) => row("td", given)));
  const box = { class: "table", tabindex: "0", role: "group", "aria-label": "Table" };
  return made("div", box, made("table", {}, made("thead", {}, row("th", head)), body));
}

// A tight list (without blank lines) has text directly in its items.
function listed({ ordered, loose, items, start, depth, live }) {
  const outer = made(ordered ? "ol" : "ul", ordered && start !== 1 ? { start: String(start) } : {});
  return filled(outer, items.map(([first, ...rest]) => {
    const box = /^\[([ xX])\] /.exec(first);
    const lines = [box ? first.slice(4) : first, ...rest];
    const found = blocks(lines, depth + 1);
    const item = made("li", box ? { class: "task" } : {});
    if (box) item.append(box[1] === " " ? "☐ " : "☑ ");
    return filled(item, found.flatMap((block, i) => {
      const text = block.kind === "paragraph" && ((i === 0 && box) || !loose);
      return text ? spans(block.text, live) : [node({ ...block, live })];
    }));
  }));
}

const NODES = {
  code: coded,
  formula: ({ text }) => made("p", { class: "formula", tabindex: "0" }, shownFormula(text)),
  note: ({ name, text, live }) =>
    filled(made("p", { class: "note" }), [made("sup", {}, name), " ", ...spans(text, live)]),
  heading: ({ level, text, live }) => filled(made(`h${Math.min(level + 2, 6)}`), spans(text, live)),
  rule: () => made("hr"),
  quote: ({ lines, depth, live }) =>
    filled(made("blockquote"), blocks(lines, depth + 1).map((b) => node({ ...b, live }))),
  table: tabled,
  list: listed,
  paragraph: ({ text, live }) => filled(made("p"), spans(text, live)),
};

const node = (block) => NODES[block.kind](block);

// Renders streaming text into an element: unchanged blocks keep their nodes.
class Markdown {
  constructor(element) { Object.assign(this, { element, shown: [] }); }

  // `live`: the text is still streaming.
  set(source, live = false) {
    const found = blocks(source.replaceAll("\r\n", "\n").split("\n"), 0);
    if (live && found.length) found.at(-1).live = true;
    const same = (block, i) => block.source === found[i]?.source && block.live === found[i].live;
    let kept = this.shown.findIndex((block, i) => !same(block, i));
    if (kept < 0) kept = this.shown.length;
    const [{ element }, old, next] = [this, this.shown[kept], found[kept]];
    if (old?.kind === "code" && next?.kind === "code" && old.language === next.language) {
      const inner = element.childNodes[kept].querySelector("code");
      inner.textContent = next.live ? next.text : "";
      if (!next.live) filled(inner, coloured(next.text, next.language));
      kept += 1;
    }
    while (element.childNodes.length > kept) element.lastChild.remove();
    filled(element, found.slice(kept).map(node));
    this.shown = found;
  }
}
