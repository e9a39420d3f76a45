"use strict";
// Renders messages: the user's, answers (streaming and complete), and tool calls.

const MOST_ROWS = 10;
const SAVE_MS = 3000;
const views = new WeakMap(); // message -> its element

// --- user messages ---------------------------------------------------------------------------

// A user (or system) message; a user's has buttons to edit it and to generate an answer. The latter
// is visible only while the message is the last one (style.css).
function ownView(message) {
  const { words, files, media } = parted(message.content);
  const seen = media.map((part) => preview(mediumOf(part)));
  const folded = files.map((file) => made("details", {},
    made("summary", {}, file.split("\n")[0].replace(/:$/, "")),
    made("pre", { tabindex: "0" }, file.slice(file.indexOf("\n") + 1))));
  const body = made("div", { class: "body" }, ...(seen.length ? [made("div", { class: "media" },
    ...seen)] : []), ...folded, ...(words ? [made("div", { class: "text" }, words)] : []));
  const own = message.role === "user";
  const item = made("li", { class: own ? "user" : "system" },
    made("h2", { class: "spoken" }, own ? "You" : "System prompt"), body);
  if (message.role !== "user") return item;
  item.append(made("div", { class: "acts" }, button("Edit", () => edit(message), { class: "act" }),
    button("Answer", () => regenerate(message), { class: "act again" })));
  return item;
}

function mediumOf(part) {
  const kind = part.type.replace(/_url$|^input_/, "");
  const given = part[part.type];
  const url = (isObject(given) ? given.url : given) ?? "";
  return { kind, url, name: part.page ?? (url && !url.startsWith("data:") ? url : kind) };
}

function preview({ kind, url, name }) {
  if (kind === "image" && url.startsWith("data:")) return made("img", { src: url, alt: name });
  return made("span", { class: "file" }, kind === name ? kind : `${name} (${kind})`);
}

// --- answers ----------------------------------------------------------------------------------

const versionAt = (at, count) => at >= 0 && at < count;

// Whether a call's arguments are complete JSON: an answer may be truncated within them.
function readable(json) {
  try {
    return Boolean(JSON.parse(json));
  } catch {
    return false;
  }
}

// View of one answer: of a stored message, or of one being generated.
class Answer {
  constructor(message = null) {
    this.body = made("div", { class: "body" });
    const heading = made("h2", { class: "spoken" }, "Answer");
    this.item = made("li", { class: "assistant" }, heading, this.body);
    Object.assign(this, { content: parted(message?.content).words, drawn: false });
    this.thought = message?.reasoning_content ?? "";
    if (message) {
      this.draw();
      this.close(message);
    } else this.resume();
  }

  // Prepares for more streamed text.
  resume() {
    this.meta?.remove();
    this.item.setAttribute("aria-busy", "true");
    this.waiting = made("span", { class: "waiting", role: "img", "aria-label": "waiting" });
    this.body.append(this.waiting);
    Object.assign(this, { calls: [], pieces: 0, finish: "", first: null, usage: null });
    this.saved = performance.now();
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (!content && !thought && !calls) return;
    this.last = performance.now();
    this.first ??= this.last;
    this.pieces += 1;
    this.content += content ?? "";
    this.thought += thought ?? "";
    for (const call of calls ?? []) this.called(call);
    if (!this.drawn) requestAnimationFrame(() => this.draw());
    this.drawn = true;
    if (this.last - this.saved < SAVE_MS) return;
    this.saved = this.last;
    save(this.message(true)); // in case the page is closed
  }

  called(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name = part.function?.name ?? call.name;
    call.arguments += part.function?.arguments ?? "";
  }

  draw() {
    this.drawn = false;
    const live = this.item.hasAttribute("aria-busy");
    scrolled(() => {
      if (this.thought) (this.reasoning ??= this.fold()).set(this.thought, live);
      if (!this.content) return;
      this.waiting?.remove();
      this.words ??= new Markdown(this.body.appendChild(made("div", { class: "text" })));
      this.words.set(this.content, live);
    });
  }

  fold() {
    const inner = made("div", { class: "text" });
    this.body.prepend(made("details", {}, made("summary", {}, "Reasoning"), inner));
    return new Markdown(inner);
  }

  // Renders the answer and returns it as a message for the conversation; null if it was stopped
  // while empty.
  end(stopped) {
    this.item.removeAttribute("aria-busy");
    this.waiting.remove();
    this.draw();
    const message = this.message(stopped);
    if (!this.content && !this.thought && !message.tool_calls && stopped) {
      this.item.remove();
      return null;
    }
    views.set(message, this.item);
    scrolled(() => this.close(message));
    return message;
  }

  message(stopped) {
    const calls = stopped ? [] : this.calls.filter((call) => call && readable(call.arguments));
    const message = { role: "assistant", content: this.content };
    if (this.thought) message.reasoning_content = this.thought;
    if (calls.length) {
      message.content = this.content || null;
      message.tool_calls = calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    const cut = stopped || this.finish === "length";
    message.page = { speed: this.speed(stopped), cut: cut && !calls.length };
    if (this.versions?.length) {
      message.page.versions = [...this.versions, plain(message)];
      message.page.speeds = [...this.speeds, message.page.speed];
      message.page.version = this.versions.length;
    }
    if (this.usage) message.page.used = this.usage.total_tokens;
    return message;
  }

  speed(stopped) {
    const count = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    const words = [`${count} tokens`];
    if (count > 1 && seconds > 0) words.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    if (stopped) words.push("stopped");
    else if (this.finish === "length") {
      const most = Number(find("max_tokens").value);
      words.push(most && count >= most ? `stopped at Max tokens (${most})` : "the context is full");
    }
    return words.join(" · ");
  }

  // Buttons to the previous and the next version; hidden once later messages follow (style.css).
  arrows(message, at, count) {
    const turn = (sign, label, to) => button(sign, () => showVersion(message, to),
      { class: "act again", "aria-label": `${label} version`, ...(versionAt(to, count) ? {}
        : { disabled: "" }) });
    return [turn("‹", "Previous", at - 1), made("span", { class: "again" }, `${at + 1}/${count}`),
      turn("›", "Next", at + 1)];
  }

  // Completes the view: adds buttons and tool calls.
  close(message) {
    const { speed, cut, versions, version = 0 } = message.page ?? {};
    const given = button("Copy", () => copy(this.content, given), { class: "act" });
    const on = button("Continue", () => goOn(message, this), { class: "act again" });
    this.meta = made("div", { class: "meta" }, made("span", { class: "speed" }, speed ?? ""),
      ...(versions ? this.arrows(message, version, versions.length) : []),
      ...(this.content ? [given] : []), ...(this.content && cut ? [on] : []),
      button("Regenerate", () => regenerate(message), { class: "act again" }));
    this.body.append(this.meta);
    if (message.tool_calls) showCalls(this, message);
  }
}

// The `page` of an answer that was regenerated has all its versions, their captions (`speeds`), and
// the index of the visible one (`version`).

function versionsOf({ page, ...message }) {
  const speed = page?.speed ?? "";
  return { versions: page?.versions ?? [message], speeds: page?.speeds ?? [speed] };
}

function showVersion(message, at) {
  if (state.abort) return;
  const { versions, speeds } = message.page;
  const chosen = { ...versions[at], page: { ...message.page, speed: speeds[at] ?? "", version: at } };
  delete chosen.page.used;
  chosen.page.cut = false;
  state.messages = state.messages.map((m) => (m === message ? chosen : m));
  show();
  views.get(chosen).querySelector(`.act[aria-label="${at ? "Previous" : "Next"} version"]`)?.focus();
  save();
  measure();
}

// --- calls ------------------------------------------------------------------------------------

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// Returns the tool result of a call; undefined if there is none yet.
function answerTo(message, call) {
  const behind = state.messages.slice(state.messages.indexOf(message) + 1);
  const found = behind.find((m) => m.role === "tool" && m.tool_call_id === call.id);
  return state.messages.includes(message) && found ? parted(found.content).words : undefined;
}

// Renders calls, each with a field for its result.
function showCalls(answer, message) {
  const calls = message.tool_calls;
  const fields = calls.map((call) => {
    const { name } = call.function;
    const field = made("textarea", { rows: "2", placeholder: "JSON or text" });
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || field.readOnly) return;
      event.preventDefault();
      give.click();
    });
    const shown = made("pre", { tabindex: "0" }, pretty(call.function.arguments));
    const box = made("div", { class: "call" }, made("p", { class: "kind" }, "Calls a tool"),
      made("h3", {}, name), shown, made("label", {}, `Answer of ${name}`, field));
    answer.meta.before(box);
    field.value = answerTo(message, call) ?? "";
    return field;
  });
  const give = button("Send answers", async () => {
    lock(fields);
    give.remove();
    const said = calls.map((call, i) => (
      { role: "tool", tool_call_id: call.id, content: fields[i].value }));
    if (await attempt([...state.messages, ...said])) return;
    for (const field of fields) field.readOnly = false; // results may be sent again
    scrolled(() => answer.meta.before(give));
    fields[0].focus();
  }, { class: "answer-calls" });
  if (calls.every((call) => answerTo(message, call) !== undefined)) lock(fields);
  else answer.meta.before(give);
}

function lock(fields) {
  for (const field of fields) {
    field.readOnly = true;
    field.rows = Math.min(field.value.split("\n").length, MOST_ROWS);
  }
}

// Returns tool results for the calls that the user skipped by sending a message.
function leftCalls() {
  const calls = state.messages.at(-1)?.tool_calls ?? [];
  return calls.map((call) => (
    { role: "tool", tool_call_id: call.id, content: "the call was not run" }));
}
