"use strict";
// Colours of code: comments, strings, numbers, keywords and called names, by one pattern for each
// family of languages. A text of no known language is not coloured.

const MOST_CODE = 60_000; // maximum characters of a code block that is coloured
const STRINGS = String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'`;
const NUMBER = String.raw`\b0[xXbBoO][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?\b`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
// family: [languages, comment, other strings, keywords]
const FAMILIES = [
  ["python py python3 pyi starlark", "#[^\\n]*", String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`,
    `and as assert async await break class continue def del elif else except False finally for from
    global if import in is lambda match case None nonlocal not or pass raise return self True try
    while with yield`],
  ["javascript js jsx typescript ts tsx java c h cpp c++ cc cs csharp go rust rs swift kotlin kt"
    + " scala php dart zig cuda json json5 jsonc css scss less", String.raw`//[^\n]*|/\*[^]*?(?:\*/|$)`,
    "`(?:[^`\\\\]|\\\\.)*`", `abstract as async await auto bool boolean break byte case catch char
    class const constexpr continue crate default defer delete do double else enum export extends
    extern false final finally float fn for func function go goto if impl implements import in
    include instanceof int interface let long loop match mod module mut namespace new nil null
    nullptr number object of operator override package private protected pub public readonly ref
    return self short signed sizeof static string struct super switch template this throw throws
    trait true try type typedef typeof undefined union unsafe unsigned use using val var virtual
    void volatile when where while yield`],
  ["bash sh shell zsh console dockerfile makefile make yaml yml toml ini ruby rb perl pl r julia jl"
    + " nix elixir powershell ps1", "(?<![\\w$&\\\\])#[^\\n]*", "", `alias and begin break case class continue
    def do done echo elif else elsif end esac exit export false fi for from function if import in
    let local module next nil not null or require return self set source sudo then true unless
    until use using while yield RUN FROM COPY CMD ENV WORKDIR ENTRYPOINT`],
  ["sql lua haskell hs ada vhdl", "--[^\\n]*", "", `ADD ALL ALTER AND AS ASC BEGIN BETWEEN BY CASE
    COLUMN CREATE DATA DELETE DESC DISTINCT DO DROP ELSE END EXISTS FALSE FROM FUNCTION GROUP HAVING
    IF IN INDEX INNER INSERT INTO IS JOIN KEY LEFT LET LIKE LIMIT LOCAL MODULE NIL NOT NULL ON OR
    ORDER OUTER PRIMARY REFERENCES REPEAT RETURN RIGHT SELECT SET TABLE THEN TRUE TYPE UNION UNIQUE
    UNTIL UPDATE VALUES VIEW WHERE WHILE WITH`],
  ["html xml svg vue", "<!--[^]*?(?:-->|$)", String.raw`</?[A-Za-z][\w:-]*|/?>`, ""],
];
const SCANNERS = new Map();
for (const [names, comment, strings, words] of FAMILIES) {
  const parts = [`(?<c>${comment})`, `(?<s>${strings ? `${strings}|` : ""}${STRINGS})`,
    `(?<n>${NUMBER})`, `(?<w>${WORD})`];
  const scanner = { pattern: new RegExp(parts.join("|"), "g"), words: new Set(words.split(/\s+/)),
    anyCase: names.startsWith("sql") };
  for (const name of names.split(" ")) SCANNERS.set(name, scanner);
}

function kindOf({ groups, index, 0: found }, source, { words, anyCase }) {
  if (groups.w === undefined) return groups.c ? "comment" : groups.s ? "string" : "number";
  if (words.has(anyCase ? found.toUpperCase() : found)) return "keyword";
  return source[index + found.length] === "(" ? "called" : "";
}

// Returns a code's texts and coloured spans; a single text for an unknown language, and for more
// than MOST_CODE characters.
function coloured(source, language) {
  const scanner = SCANNERS.get(language.toLowerCase().split(/[\s{,:]/)[0]);
  if (!scanner || source.length > MOST_CODE) return [source];
  const out = [];
  let [at, plainFrom] = [0, 0];
  for (const found of source.matchAll(scanner.pattern)) {
    const kind = kindOf(found, source, scanner);
    at = found.index + found[0].length;
    if (!kind) continue;
    if (found.index > plainFrom) out.push(source.slice(plainFrom, found.index));
    out.push(made("span", { class: kind }, found[0]));
    plainFrom = at;
  }
  return [...out, source.slice(plainFrom)];
}
