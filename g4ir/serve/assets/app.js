"use strict";
// A chat over this server's own paths. Texts of the model become text nodes and nothing else.

const find = (id) => document.getElementById(id);
const [log, text, send, stop, status] = ["log", "text", "send", "stop", "status"].map(find);
const FIELDS = ["system", "temperature", "top_p", "max_tokens", "tools"];
const NEAR_END = 80;
const LOOK_MS = 2000;
const SAID_MS = 1500;
const MOST_ROWS = 10;

// What a browser keeps; one that forbids it keeps it as long as the page.
function storage(name) {
  try {
    return window[name];
  } catch {
    const held = new Map();
    return { getItem: (id) => held.get(id) ?? null, setItem: (id, value) => held.set(id, value) };
  }
}

const [lasting, session] = [storage("localStorage"), storage("sessionStorage")];

const state = {
  messages: [], // in OpenAI's form; the system's is added when they are sent
  attached: [], // {kind, name, url}
  reading: null, // the promise of files that are being read
  locked: false, // whether the server wants another key
  media: null, // kinds that the model takes; null: not known yet
  abort: null, // ends the answer that is coming
  turn: 0, // of the conversation: what comes late for another is dropped
};

// --- the page ---------------------------------------------------------------------------------

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function button(label, act, attributes = {}) {
  return made("button", { type: "button", onclick: act, ...attributes }, label);
}

// Runs `change`, and keeps the end in sight if it was, or brings it there.
function scrolled(change, always = false) {
  const box = find("scroll");
  const follows = always || box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_END;
  const result = change();
  if (follows) box.scrollTop = box.scrollHeight;
  return result;
}

function entry(role, ...children) {
  find("hint").hidden = true;
  const body = made("div", { class: "body" }, ...children);
  const item = made("li", { class: role }, body);
  scrolled(() => log.append(item), role !== "assistant"); // one's own message, and errors
  return { item, body };
}

// Code between backquotes and bold words; all else as it is.
function marked(source) {
  const parts = [];
  const pattern = /```[^\n`]*\n([\s\S]*?)(?:\n?```|$)\n*|`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;
  let at = 0;
  for (const found of source.matchAll(pattern)) {
    const before = source.slice(at, found.index);
    parts.push(found[1] === undefined ? before : before.replace(/\n+$/, ""));
    if (found[1] !== undefined) parts.push(made("pre", { tabindex: "0" }, made("code", {}, found[1])));
    else if (found[2] !== undefined) parts.push(made("code", {}, found[2]));
    else parts.push(made("strong", {}, found[3]));
    at = found.index + found[0].length;
  }
  return [...parts, source.slice(at)].filter((part) => part !== "");
}

function showError(message) {
  const { item } = entry("error", message);
  item.setAttribute("role", "alert");
}

// Copies a text, and says so on the button. A page that another machine sends without TLS has no
// clipboard: there a selection is copied.
async function copy(source, given) {
  let done = true;
  try {
    await navigator.clipboard.writeText(source);
  } catch {
    const field = made("textarea", { class: "unseen" });
    field.value = source;
    document.body.append(field);
    field.select();
    done = document.execCommand("copy");
    field.remove();
    given.focus();
  }
  given.textContent = done ? "Copied" : "Not copied";
  setTimeout(() => { given.textContent = "Copy"; }, SAID_MS);
}

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

// --- settings ---------------------------------------------------------------------------------

function restore() {
  for (const id of FIELDS) find(id).value = lasting.getItem(id) ?? "";
  find("thinking").checked = lasting.getItem("thinking") === "true";
  find("key").value = session.getItem("key") ?? "";
}

function keep() {
  for (const id of FIELDS) lasting.setItem(id, find(id).value);
  lasting.setItem("thinking", String(find("thinking").checked));
  session.setItem("key", find("key").value.trim());
}

function openSettings(why = "", id = "system") {
  find("asked").textContent = why;
  const dialog = find("settings");
  if (!dialog.open) dialog.showModal();
  find(id).focus();
}

// Returns what is wrong with the settings, or nothing.
function wrongTools() {
  if (!find("tools").value.trim()) return "";
  try {
    return Array.isArray(JSON.parse(find("tools").value)) ? "" : "Tools: expected a list";
  } catch (error) {
    return `Tools: ${error.message}`;
  }
}

function body() {
  const out = { stream: true, stream_options: { include_usage: true } };
  const system = find("system").value.trim();
  out.messages = [...(system ? [{ role: "system", content: system }] : []), ...state.messages];
  for (const id of ["temperature", "top_p", "max_tokens"]) {
    if (find(id).value !== "") out[id] = Number(find(id).value);
  }
  const tools = find("tools").value.trim() ? JSON.parse(find("tools").value) : [];
  if (tools.length) out.tools = tools;
  if (find("thinking").checked) out.chat_template_kwargs = { enable_thinking: true };
  return out;
}

// --- the server -------------------------------------------------------------------------------

async function asked(path, given = {}) {
  const key = session.getItem("key");
  const headers = { ...given.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...given, headers });
  if (response.ok) return response;
  let message = `the server answers ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no error in OpenAI's form */ }
  throw Object.assign(new Error(message), { status: response.status });
}

async function look() {
  try {
    const { data } = await (await asked("v1/models")).json();
    find("model").textContent = data[0].id;
    document.title = data[0].id;
    state.media = data[0].media ?? null;
    if (state.media) tell(fullness(await (await asked("metrics")).text()), "off");
    else tell("loading");
    state.locked = false;
  } catch (error) {
    state.locked = error.status === 401;
    const known = session.getItem("key");
    if (!state.locked) tell("not reachable");
    else tell(known ? "wrong API key" : "needs an API key");
    if (state.locked && !known && !find("settings").open) {
      openSettings("This server asks for a key.", "key");
    }
  }
}

// Says how the server is: aloud what is news, and silently how many rows are busy.
function tell(words, live = "polite") {
  if (status.textContent === words) return;
  status.setAttribute("aria-live", live);
  status.textContent = words;
}

function fullness(metrics) {
  const number = (name) => {
    const found = metrics.match(new RegExp(`^g4ir_${name} (\\S+)$`, "m"));
    return found ? Number(found[1]) : 0;
  };
  const waiting = number("num_requests_waiting");
  const rows = `${number("num_requests_running")} of ${number("rows")} rows busy`;
  return waiting ? `${rows}, ${waiting} waiting` : rows;
}

// Yields the objects of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// --- answers ----------------------------------------------------------------------------------

// Whether arguments of a call are whole: an answer may be cut within them.
function readable(json) {
  try {
    return Boolean(JSON.parse(json));
  } catch {
    return false;
  }
}

// One answer on the page while it comes.
class Answer {
  constructor() {
    Object.assign(this, entry("assistant"));
    this.item.setAttribute("aria-busy", "true");
    this.waiting = made("span", { class: "waiting", role: "img", "aria-label": "waiting" });
    this.body.append(this.waiting);
    Object.assign(this, { content: "", thought: "", calls: [], pieces: 0, finish: "" });
    this.drawn = false;
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
  }

  called(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name = part.function?.name ?? call.name;
    call.arguments += part.function?.arguments ?? "";
  }

  draw() {
    this.drawn = false;
    scrolled(() => {
      if (this.thought) {
        this.thoughts ??= this.fold();
        this.thoughts.textContent = this.thought;
      }
      if (this.content) {
        this.waiting.remove();
        this.words ??= this.body.appendChild(made("div", { class: "text" }));
        this.words.replaceChildren(...marked(this.content));
      }
    });
  }

  fold() {
    const inner = made("div", { class: "text" });
    this.body.prepend(made("details", {}, made("summary", {}, "Thoughts"), inner));
    return inner;
  }

  // Shows what there is, and returns the message for the conversation; nothing if it says nothing.
  end(stopped) {
    this.draw();
    this.waiting.remove();
    this.item.removeAttribute("aria-busy");
    const calls = stopped ? [] : this.calls.filter((call) => call && readable(call.arguments));
    if (!this.content && !this.thought && !calls.length && stopped) {
      this.item.remove();
      return null;
    }
    this.speed = this.meta(stopped);
    scrolled(() => this.body.append(this.speed));
    const message = { role: "assistant", content: this.content };
    if (calls.length) {
      message.content = this.content || null;
      message.reasoning_content = this.thought;
      message.tool_calls = calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }

  meta(stopped) {
    const count = this.usage?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    const words = [`${count} tokens`];
    if (count > 1 && seconds > 0) words.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    if (stopped) words.push("stopped");
    else if (this.finish === "length") words.push("cut: no more tokens were allowed or fit");
    const given = button("Copy", () => copy(this.content, given));
    return made("div", { class: "meta" }, made("span", { class: "speed" }, words.join(" · ")),
      ...(this.content ? [given] : []));
  }
}

// A button that goes hands its focus on; whoever is elsewhere on the page stays there.
function busy(is) {
  const at = document.activeElement;
  stop.hidden = !is;
  send.hidden = is;
  if (is) {
    if (at === send) stop.focus();
    return;
  }
  state.abort = null;
  if (at === stop || at === document.body) text.focus();
}

async function reply() {
  const wrong = wrongTools();
  if (wrong) {
    openSettings(wrong, "tools");
    return false;
  }
  const turn = state.turn;
  const answer = new Answer();
  state.abort = new AbortController();
  busy(true);
  let stopped = false;
  let failed = null;
  try {
    const headers = { "Content-Type": "application/json" };
    const given = { method: "POST", headers, body: JSON.stringify(body()) };
    const signal = state.abort.signal;
    const response = await asked("v1/chat/completions", { ...given, signal });
    for await (const chunk of events(response)) answer.take(chunk);
  } catch (error) {
    stopped = true;
    failed = error.name === "AbortError" ? null : error;
  }
  if (turn !== state.turn) return true;
  const message = answer.end(stopped);
  if (message) state.messages.push(message);
  if (failed) {
    showError(failed.message);
    if (failed.status === 401) openSettings("The key is missing or wrong.", "key");
  }
  if (message?.tool_calls) showCalls(answer, message.tool_calls);
  busy(false);
  look();
  return Boolean(message);
}

// --- calls ------------------------------------------------------------------------------------

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// Shows calls, with a field for the answer of each.
function showCalls(answer, calls) {
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
    scrolled(() => answer.speed.before(box));
    return field;
  });
  const give = button("Send answers", async () => {
    const { turn, messages: { length } } = state;
    lock(fields);
    give.remove();
    state.messages.push(...calls.map((call, i) => ({
      role: "tool", tool_call_id: call.id, content: fields[i].value,
    })));
    if ((await reply()) || turn !== state.turn) return;
    state.messages.length = length; // nothing was said to them: they may be sent again
    for (const field of fields) field.readOnly = false;
    scrolled(() => answer.speed.before(give));
    fields[0].focus();
  }, { class: "answer-calls" });
  scrolled(() => answer.speed.before(give));
  if (!text.value) fields[0].focus();
}

function lock(fields) {
  for (const field of fields) {
    field.readOnly = true;
    field.rows = Math.min(field.value.split("\n").length, MOST_ROWS);
  }
}

// A message in the place of answers: the calls were not run.
function leaveCalls() {
  const calls = state.messages.at(-1)?.tool_calls ?? [];
  lock(log.querySelectorAll(".call textarea:not([readonly])"));
  log.querySelector(".answer-calls")?.remove();
  state.messages.push(...calls.map((call) => ({
    role: "tool", tool_call_id: call.id, content: "the call was not run",
  })));
}

// --- messages ---------------------------------------------------------------------------------

const part = (m) => ({ type: `${m.kind}_url`, [`${m.kind}_url`]: { url: m.url } });

// Images stand before the text, audio behind it.
function content(words, media) {
  if (!media.length) return words;
  const sounds = media.filter((m) => m.kind === "audio").map(part);
  const seen = media.filter((m) => m.kind !== "audio").map(part);
  return [...seen, { type: "text", text: words }, ...sounds];
}

async function say() {
  await state.reading;
  const words = text.value;
  const media = state.attached;
  if (state.abort || (!words.trim() && !media.length)) return;
  leaveCalls();
  const length = state.messages.length;
  state.messages.push({ role: "user", content: content(words, media) });
  const shown = made("div", { class: "media" }, ...media.map(preview));
  const { item } = entry("user", ...(media.length ? [shown] : []),
    made("div", { class: "text" }, words));
  text.value = "";
  state.attached = [];
  showAttached();
  fit();
  const turn = state.turn;
  if ((await reply()) || turn !== state.turn) return;
  state.messages.length = length; // nothing was said to it: it may be sent again
  item.remove();
  if (!text.value) text.value = words;
  if (!state.attached.length) state.attached = media;
  showAttached();
  fit();
}

function preview(m) {
  if (m.kind === "image") return made("img", { src: m.url, alt: m.name });
  return made("span", {}, `${m.name} (${m.kind})`);
}

function showAttached() {
  find("attached").replaceChildren(...state.attached.map((m) => made("li", {}, preview(m),
    button("×", () => {
      state.attached = state.attached.filter((other) => other !== m);
      showAttached();
      text.focus();
    }, { "aria-label": `Remove ${m.name}` }))));
}

// Attaches files, one after the other. The list of an event is empty once the event is over.
function attach(list) {
  const files = [...list];
  state.reading = Promise.resolve(state.reading).then(() => read(files));
  return state.reading;
}

async function read(files) {
  for (const file of files) {
    const kind = file.type.split("/")[0];
    if (!["image", "audio", "video"].includes(kind)) {
      showError(`${file.name}: images, audio and videos can be attached`);
    } else if (state.media && !state.media.includes(kind)) {
      showError(`${file.name}: this model takes no ${kind}`);
    } else {
      const url = await new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
      }).catch((error) => showError(`${file.name}: ${error.message}`));
      if (url) state.attached = [...state.attached, { kind, name: file.name, url }];
    }
  }
  showAttached();
}

function begin() {
  state.turn += 1;
  state.abort?.abort();
  Object.assign(state, { messages: [], attached: [] });
  log.replaceChildren();
  find("hint").hidden = false;
  showAttached();
  busy(false);
  text.focus();
}

// --- keys, files and buttons ------------------------------------------------------------------

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  say();
});
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  say();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !find("settings").open) state.abort?.abort();
});
stop.addEventListener("click", () => state.abort?.abort());
find("new").addEventListener("click", begin);
find("open-settings").addEventListener("click", () => openSettings());
find("settings-form").addEventListener("submit", (event) => {
  const wrong = wrongTools();
  find("asked").textContent = wrong;
  if (wrong) event.preventDefault();
});
find("tools").addEventListener("input", () => {
  if (find("asked").textContent.startsWith("Tools:")) find("asked").textContent = wrongTools();
});
find("settings").addEventListener("close", () => {
  keep();
  look();
  text.focus();
});
find("attach").addEventListener("click", () => find("files").click());
find("files").addEventListener("change", async (event) => {
  await attach(event.target.files);
  event.target.value = "";
  text.focus();
});
text.addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
// What is shown over the page is entered too: files let go just then are taken as well.
function over(event) {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  find("drop").hidden = false;
}
document.addEventListener("dragenter", over);
document.addEventListener("dragover", over);
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) find("drop").hidden = true;
});
document.addEventListener("drop", (event) => {
  if (!event.dataTransfer.types.includes("Files")) return;
  event.preventDefault();
  find("drop").hidden = true;
  attach(event.dataTransfer.files);
});

restore();
look();
setInterval(() => { if (!document.hidden && !state.locked) look(); }, LOOK_MS);
