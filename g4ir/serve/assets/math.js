"use strict";
// LaTeX formulas as MathML, which browsers draw by themselves. A formula with a command that is not
// known here stays text.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST_NESTED = 24; // maximum nesting of a formula
const pairsOf = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split("=")));
const LETTERS = pairsOf(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ
  vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς
  tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π
  Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ Re=ℜ Im=ℑ aleph=ℵ
  emptyset=∅ varnothing=∅ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ prime=′ angle=∠ degree=°
  top=⊤ bot=⊥ imath=ı jmath=ȷ`);
const SIGNS = pairsOf(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ otimes=⊗
  le=≤ leq=≤ ge=≥ geq=≥ ne=≠ neq=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫ in=∈
  notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ cup=∪ cap=∩ setminus=∖ land=∧ wedge=∧ lor=∨
  vee=∨ lnot=¬ neg=¬ forall=∀ exists=∃ nexists=∄ to=→ rightarrow=→ leftarrow=← gets=← mapsto=↦
  Rightarrow=⇒ Leftarrow=⇐ implies=⟹ iff=⟺ Leftrightarrow=⇔ leftrightarrow=↔ uparrow=↑ downarrow=↓
  longrightarrow=⟶ rightleftharpoons=⇌ perp=⊥ parallel=∥ mid=∣ nmid=∤ vdash=⊢ models=⊨ therefore=∴
  because=∵ langle=⟨ rangle=⟩ lceil=⌈ rceil=⌉ lfloor=⌊ rfloor=⌋ vert=| Vert=‖ lvert=| rvert=|
  lVert=‖ rVert=‖ colon=: backslash=\\ { } |=‖ %=% $=$ &=& #=# _=_`.replace("{ }", "{={ }=}"));
const LARGE = pairsOf(`sum=∑ prod=∏ coprod=∐ int=∫ iint=∬ iiint=∭ oint=∮ bigcup=⋃ bigcap=⋂ bigoplus=⨁
  bigotimes=⨂ bigvee=⋁ bigwedge=⋀`);
const NAMES = new Set(`arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker
  lg lim liminf limsup ln log max min Pr sec sin sinh sup tan tanh argmax argmin`.split(/\s+/));
const UNDER = new Set(["lim", "liminf", "limsup", "max", "min", "sup", "inf", "argmax", "argmin"]);
const ACCENTS = pairsOf(`hat=^ widehat=^ bar=¯ overline=¯ vec=→ dot=˙ ddot=¨ tilde=~ widetilde=~
  overrightarrow=→ check=ˇ`);
const FONTS = pairsOf(`mathbf=bold boldsymbol=bold bm=bold mathrm=normal operatorname=normal
  mathbb=double-struck mathcal=script mathscr=script mathfrak=fraktur mathsf=sans mathtt=mono
  mathit=italic`);
const SPACES = new Map([[",", ".17em"], [":", ".22em"], [";", ".28em"], ["!", "0em"], [" ", ".3em"],
  ["quad", "1em"], ["qquad", "2em"], ["~", ".3em"]]);
const FENCES = pairsOf(`matrix= pmatrix=() bmatrix=[] Bmatrix={} vmatrix=|| Vmatrix=‖‖ cases={ array=
  aligned= align= align*= gathered= gather= gather*= split= equation= equation*= smallmatrix=`);
const SKIPPED = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg",
  "Bigg", "hline", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr", "nonumber", "left.", "right."]);
// Font -> code points of its A and 0 (from U+1D400 on); font and letter -> letters elsewhere.
const BASES = { bold: [0x1d400, 0x1d7ce], "double-struck": [0x1d538, 0x1d7d8], script: [0x1d49c],
  fraktur: [0x1d504], sans: [0x1d5a0, 0x1d7e2], mono: [0x1d670, 0x1d7f6] };
const ELSEWHERE = new Map(Object.entries({ "double-struckC": "ℂ", "double-struckH": "ℍ",
  "double-struckN": "ℕ", "double-struckP": "ℙ", "double-struckQ": "ℚ", "double-struckR": "ℝ",
  "double-struckZ": "ℤ", scriptB: "ℬ", scriptE: "ℰ", scriptF: "ℱ", scriptH: "ℋ", scriptI: "ℐ",
  scriptL: "ℒ", scriptM: "ℳ", scriptR: "ℛ", scripte: "ℯ", scriptg: "ℊ", scripto: "ℴ",
  frakturC: "ℭ", frakturH: "ℌ", frakturI: "ℑ", frakturR: "ℜ", frakturZ: "ℨ" }));

function mathNode(tag, attributes, ...children) {
  const element = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function styled(c, font) {
  if (ELSEWHERE.has(font + c)) return ELSEWHERE.get(font + c);
  const [letters, digits] = BASES[font] ?? [];
  const code = c.charCodeAt(0);
  if (!letters || !/[A-Za-z0-9]/.test(c)) return c;
  if (c <= "9") return digits ? String.fromCodePoint(digits + code - 48) : c;
  return String.fromCodePoint(letters + (c <= "Z" ? code - 65 : code - 71));
}

// Parses one formula; throws if it cannot.
class Formula {
  constructor(source, display) {
    const rows = source.replace(/\\\\\[[\d.]+[a-z]{2}\]/g, "\\\\"); // space after a row
    this.tokens = rows.match(/\\(?:[A-Za-z]+\*?|[^])|[^]/gu) ?? [];
    Object.assign(this, { at: 0, depth: 0, display, font: "" });
  }

  next() { return this.tokens[this.at++]; }

  skipSpace() { while (/^\s$/.test(this.tokens[this.at] ?? "")) this.at += 1; }

  peek() { this.skipSpace(); return this.tokens[this.at]; }

  // Reads until a token of `ends`, which is consumed.
  row(...ends) {
    if ((this.depth += 1) > MOST_NESTED) throw new Error("nested too deeply");
    const out = [];
    for (;;) {
      const token = this.peek();
      if (token === undefined && !ends.includes(undefined)) throw new Error("has no end");
      if (ends.includes(token)) { this.at += 1; break; }
      const node = this.scripts(this.atom());
      if (node) out.push(node);
    }
    this.depth -= 1;
    return out.length === 1 ? out[0] : mathNode("mrow", {}, ...out);
  }

  argument() {
    const token = this.peek();
    if (token === undefined) throw new Error("an argument is missing");
    if (token !== "{") return this.atom() ?? this.argument();
    this.at += 1;
    return this.row("}");
  }

  // Returns the text of a group {...}, in which a backslash before a mark is removed.
  words() {
    if (this.peek() !== "{") throw new Error("expected {");
    let [out, open] = ["", 0];
    do {
      const token = this.next();
      if (token === undefined) throw new Error("has no end");
      open += (token === "{") - (token === "}");
      out += token;
    } while (open);
    return out.slice(1, -1).replace(/\\([{}$%&#_ ])/g, "$1");
  }

  scripts(base) {
    let [below, above] = [null, null];
    for (;;) {
      const token = this.peek();
      if (token === "\\limits" || token === "\\nolimits") this.at += 1;
      else if (token === "_" && !below) { this.at += 1; below = this.argument(); }
      else if (token === "^" && !above) { this.at += 1; above = this.argument(); }
      else if (token === "'" && !above) {
        let primes = "";
        while (this.peek() === "'") { primes += "′"; this.at += 1; }
        above = mathNode("mo", {}, primes);
      } else break;
    }
    if (!below && !above) return base;
    base ??= mathNode("mrow", {});
    const over = base.large && this.display;
    const tag = below && above ? (over ? "munderover" : "msubsup")
      : below ? (over ? "munder" : "msub") : over ? "mover" : "msup";
    return mathNode(tag, {}, ...[base, below, above].filter(Boolean));
  }

  atom() {
    const token = this.next();
    if (token === "{") return this.row("}");
    if (/^\d$/.test(token)) {
      let digits = token;
      while (/^[\d.]$/.test(this.tokens[this.at] ?? "")) digits += this.next();
      return mathNode("mn", {}, [...digits].map((c) => styled(c, this.font)).join(""));
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/^\p{L}$/u.test(token)) return this.letter(token);
    if ("}&".includes(token)) throw new Error(`unexpected ${token}`);
    if (token === "~") return this.space(token);
    if ("^_'".includes(token)) { this.at -= 1; return null; }
    const fence = "()[]|".includes(token) ? { stretchy: "false" } : {};
    return mathNode("mo", fence, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  letter(c) {
    const upright = this.font === "normal" ? { mathvariant: "normal" } : {};
    return mathNode("mi", upright, styled(c, this.font));
  }

  space(name) { return mathNode("mspace", { width: SPACES.get(name) }); }

  command(name) {
    if (LETTERS.has(name)) return mathNode("mi", {}, LETTERS.get(name));
    if (SIGNS.has(name)) return mathNode("mo", { stretchy: "false" }, SIGNS.get(name));
    if (LARGE.has(name)) {
      const large = !name.endsWith("int");
      return Object.assign(mathNode("mo", { largeop: "true" }, LARGE.get(name)), { large });
    }
    if (NAMES.has(name)) return Object.assign(mathNode("mi", {}, name), { large: UNDER.has(name) });
    if (SPACES.has(name)) return this.space(name);
    if (SKIPPED.has(name)) return null;
    if (ACCENTS.has(name)) {
      return mathNode("mover", { accent: "true" }, this.argument(),
        mathNode("mo", { stretchy: String(/^(wide|over)/.test(name)) }, ACCENTS.get(name)));
    }
    if (FONTS.has(name)) return this.inFont(name);
    if (Object.hasOwn(COMMANDS, name)) return COMMANDS[name](this);
    throw new Error(`unknown: ${name}`);
  }

  inFont(name) {
    if (name === "operatorname") return mathNode("mi", {}, this.words());
    const before = this.font;
    this.font = FONTS.get(name);
    const inner = this.argument();
    this.font = before;
    return inner;
  }

  // The sign after \left or \right, as a list of one node; empty for a dot.
  fence() {
    const token = this.peek();
    this.at += 1;
    if (token === undefined) throw new Error("has no end");
    const sign = token.startsWith("\\") ? SIGNS.get(token.slice(1)) : token;
    if (sign === undefined) throw new Error(`unknown: ${token}`);
    return sign === "." ? [] : [mathNode("mo", { stretchy: "true", fence: "true" }, sign)];
  }

  environment() {
    const name = this.words();
    if (!FENCES.has(name)) throw new Error(`unknown: ${name}`);
    if (name === "array") this.words();
    const rows = [[]];
    for (let open = true; open;) {
      rows.at(-1).push(mathNode("mtd", {}, this.row("&", "\\\\", "\\end")));
      const end = this.tokens[this.at - 1];
      if (end === "\\\\") rows.push([]);
      open = end !== "\\end";
    }
    if (this.words() !== name) throw new Error("ends another environment");
    if (rows.at(-1).every((cell) => !cell.textContent)) rows.pop();
    const side = /^(align|split)/.test(name) ? "aligned" : name === "cases" ? "cases" : "";
    const inner = mathNode("mtable", side ? { class: side } : {},
      ...rows.map((row) => mathNode("mtr", {}, ...row)));
    const around = [...FENCES.get(name)].map((c) =>
      mathNode("mo", { stretchy: "true", fence: "true" }, c));
    return mathNode("mrow", {}, ...around.slice(0, 1), inner, ...around.slice(1));
  }
}

const fraction = (f, attributes = {}) => mathNode("mfrac", attributes, f.argument(), f.argument());
const swapped = (tag, script, base) => mathNode(tag, {}, base, script);
const braced = (tag, base, sign) =>
  Object.assign(mathNode(tag, {}, base, mathNode("mo", {}, sign)), { large: true });
const COMMANDS = {
  frac: fraction, dfrac: fraction, tfrac: fraction, cfrac: fraction,
  binom: (f) => mathNode("mrow", {}, mathNode("mo", {}, "("), fraction(f, { linethickness: "0" }),
    mathNode("mo", {}, ")")),
  sqrt: (f) => {
    if (f.peek() !== "[") return mathNode("msqrt", {}, f.argument());
    f.at += 1;
    const index = f.row("]");
    return mathNode("mroot", {}, f.argument(), index);
  },
  text: (f) => mathNode("mtext", {}, f.words()),
  left: (f) => {
    const open = f.fence();
    const inner = f.row("\\right");
    return mathNode("mrow", {}, ...open, inner, ...f.fence());
  },
  begin: (f) => f.environment(),
  underbrace: (f) => braced("munder", f.argument(), "⏟"),
  overbrace: (f) => braced("mover", f.argument(), "⏞"),
  overset: (f) => swapped("mover", f.argument(), f.argument()),
  underset: (f) => swapped("munder", f.argument(), f.argument()),
  stackrel: (f) => COMMANDS.overset(f),
  boxed: (f) => mathNode("mrow", { class: "boxed" }, f.argument()),
  not: (f) => mathNode("mo", {}, `${f.argument().textContent}\u0338`),
  pmod: (f) => mathNode("mrow", {}, mathNode("mtext", {}, " (mod "), f.argument(),
    mathNode("mtext", {}, ")")),
  bmod: () => mathNode("mo", {}, "mod"),
  tag: (f) => mathNode("mtext", {}, ` (${f.words()})`),
};
for (const name of ["textbf", "textit", "textrm", "mbox", "textsf"]) COMMANDS[name] = COMMANDS.text;

// Returns a formula's MathML element; null if it cannot be parsed.
function formulaNode(source, display) {
  try {
    const reader = new Formula(source.trim(), display);
    const lines = [];
    do lines.push(reader.row(undefined, "\\\\")); while (reader.at <= reader.tokens.length - 1);
    const inner = lines.length === 1 ? lines : [mathNode("mtable", {}, ...lines.map((line) =>
      mathNode("mtr", {}, mathNode("mtd", {}, line))))];
    const shown = display ? { display: "block" } : {};
    return mathNode("math", { alttext: source.trim(), ...shown }, ...inner);
  } catch {
    return null;
  }
}
