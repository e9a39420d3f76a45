"use strict";
// Chat client of this server's endpoints: settings, requests, and the open conversation.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty",
  "presence_penalty", "frequency_penalty", "seed", "max_tokens", "min_tokens"];
const SAMPLING = [...NUMBERS, "stop_texts", "thinking_token_budget"];
const OWN = ["system", "tools"]; // settings stored with a conversation
const FIELDS = [...OWN, ...SAMPLING];
const LOOK_MS = 2000;
const TOO_LONG = /has (\d+) tokens(?:, and (\d+) new tokens are requested)?; the context has (\d+) tokens/;
const MOST_TEXT = 1 << 20; // maximum bytes of a text file in a message
const TEXTS = /\.(?:[cm]?ts|svg)$/; // text files whose MIME type is video or image

const state = {
  kept: null, // {id, created, updated} of the conversation; null: not saved yet
  models: [], // ids of the models that the server has
  messages: [], // in OpenAI's format; the system message is added when they are sent
  attached: [], // {kind, name, url or text}
  reading: null, // promise of files that are being read
  locked: false, // whether the server refused the API key
  media: null, // kinds that the model takes; null: not known yet
  room: null, // context length of the model, in tokens
  abort: null, // aborts the reply that is being generated
  coming: null, // promise of the reply that is being generated
  saving: Promise.resolve(), // pending write of conversations; writes run one after another
  unsaved: "", // error of the last failed write
  listed: "", // rendered state of the conversation list
  own: {}, // settings stored with this conversation only
};

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

// --- settings ---------------------------------------------------------------------------------

function restore(ids = FIELDS) {
  for (const id of ids) find(id).value = lasting.getItem(id) ?? "";
}

function keep() {
  for (const id of FIELDS) {
    const { value } = find(id);
    if (value === state.own[id]) continue;
    delete state.own[id];
    lasting.setItem(id, value);
  }
  lasting.setItem("thinking", String(find("thinking").checked));
  lasting.setItem("theme", find("theme").value);
  session.setItem("key", find("key").value.trim());
}

function showTheme() {
  document.documentElement.dataset.theme = find("theme").value;
}

function openSettings(why = "", id = "system") {
  find("asked").textContent = why;
  const dialog = find("settings");
  if (!dialog.open) dialog.showModal();
  find(id).focus();
}

// Returns an error message for the settings' field of tools, or "".
function wrongTools() {
  if (!find("tools").value.trim()) return "";
  try {
    return Array.isArray(JSON.parse(find("tools").value)) ? "" : "Tools: expected a list";
  } catch (error) {
    return `Tools: ${error.message}`;
  }
}

const tools = () => (wrongTools() ? [] : JSON.parse(find("tools").value.trim() || "[]"));

// The system message, as a list of none or one.
function system() {
  const words = find("system").value.trim();
  return words ? [{ role: "system", content: words }] : [];
}

// Returns the request fields that determine the prompt.
function asking() {
  const out = { messages: [...system(), ...state.messages.map(plain)] };
  if (state.models.length > 1) out.model = chosenModel();
  if (tools().length) out.tools = tools();
  if (find("thinking").checked) out.chat_template_kwargs = { enable_thinking: true };
  return out;
}

function body() {
  const out = { stream: true, stream_options: { include_usage: true }, ...asking() };
  for (const id of NUMBERS) if (find(id).value !== "") out[id] = Number(find(id).value);
  const budget = find("thinking_token_budget").value;
  if (budget !== "" && find("thinking").checked) out.thinking_token_budget = Number(budget);
  const stops = find("stop_texts").value.split("\n").filter((line) => line);
  return stops.length ? { ...out, stop: stops } : out;
}

// --- the server -------------------------------------------------------------------------------

// Sends a request; returns the response. Errors have a `status`, 0 if the server does not respond,
// except that of an abort.
async function asked(path, given = {}) {
  const key = session.getItem("key");
  const headers = { ...given.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response = null;
  try {
    response = await fetch(path, { ...given, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : unreachable();
  }
  if (response.ok) return response;
  let message = `the server answers ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* the body is no error in OpenAI's format */ }
  throw Object.assign(new Error(message), { status: response.status });
}

function unreachable() {
  const message = `The server at ${location.host} does not answer. Is g4ir serve running?`;
  return Object.assign(new Error(message), { status: 0 });
}

// Rewrites the server's error for too long a prompt, with the remedy; other messages stay.
function inWords({ message }) {
  const found = TOO_LONG.exec(message);
  if (!found) return message;
  const [has, more, most] = found.slice(1).map((count) => Number(count ?? 1));
  return `Too long by ${(has + more - 1 - most).toLocaleString("en")} tokens: the context has ${most}. `
    + `Shorten the message, begin a new chat, or serve an engine built with --max-seq ${2 ** Math.ceil(Math.log2(has + more))}.`;
}

function posted(value) {
  const headers = { "Content-Type": "application/json" };
  return { method: "POST", headers, body: JSON.stringify(value) };
}

async function look() {
  try {
    const { data } = await (await asked("v1/models")).json();
    listModels(data);
    const model = data.find((one) => one.id === chosenModel()) ?? data[0];
    document.title = model.id;
    find("model-note").textContent = model.note ?? "";
    state.media = model.media ?? null;
    if (state.media || data.length > 1) tell(fullness(await (await asked("metrics")).text()), "off");
    else tell("loading");
    state.locked = false;
    const before = state.room;
    state.room = model.max_model_len ?? null;
    if (state.room !== before) measure();
  } catch (error) {
    state.locked = error.status === 401;
    const known = session.getItem("key");
    if (!state.locked) tell("not reachable, trying again");
    else tell(known ? "wrong API key" : "needs an API key");
    if (state.locked && !known && !find("settings").open) {
      openSettings("This server asks for a key.", "key");
    }
  }
}

// Shows the server's status. Screen readers announce it unless `live` is "off", as for its load.
function tell(words, live = "polite") {
  if (status.textContent === words) return;
  status.setAttribute("aria-live", live);
  status.textContent = words;
}

function fullness(metrics) {
  const number = (name) => {
    const found = metrics.matchAll(new RegExp(`^g4ir_${name}(?:{.*})? (\\S+)$`, "gm"));
    return [...found].reduce((sum, [, value]) => sum + Number(value), 0);
  };
  const waiting = number("num_requests_waiting");
  const words = number("num_requests_running") ? "busy" : "idle";
  return waiting ? `${words}, ${waiting} waiting` : words;
}

// --- models -----------------------------------------------------------------------------------

const chosenModel = () => find("model").value;

// Lists the models and selects the one selected before, else the first.
function listModels(data) {
  const ids = data.map((one) => one.id);
  if (ids.join("\n") === state.models.join("\n")) return;
  const before = find("model").value || lasting.getItem("model");
  state.models = ids;
  find("model").replaceChildren(...ids.map((id) => made("option", {}, id)));
  find("model").value = ids.includes(before) ? before : ids[0];
  find("model").disabled = ids.length < 2;
}

const SHOWN = { variant: "variant", size: "weights", quant: "quantisation", dtype: "computes in",
  backend: "backend", device: "device", max_seq: "context, tokens", max_batch: "answers at a time",
  media: "media" };

// Shows a dialog with facts about the selected model, without loading it.
async function showModel() {
  const { data } = await (await asked("v1/models")).json();
  const model = data.find((one) => one.id === chosenModel()) ?? data[0];
  let facts = { max_seq: model.max_model_len, media: model.media };
  if (data.length === 1) {
    const { variant, media, limits, build, weight_bytes: bytes } =
      await (await asked("server_info")).json();
    const quant = build.quant === "checkpoint" ? "as in the file" : build.quant;
    const size = `${(bytes / 2 ** 20).toLocaleString("en", { maximumSignificantDigits: 3 })} MiB`;
    facts = { variant, media, size, ...limits, ...build, quant };
  } else facts.device = model.loaded ? "loaded" : "not loaded yet; a request loads it";
  const rows = Object.entries(SHOWN).filter(([key]) => ![undefined, null].includes(facts[key]))
    .flatMap(([key, label]) => [made("dt", {}, label),
      made("dd", {}, [facts[key]].flat().join(", ") || "text only")]);
  find("facts").replaceChildren(made("dt", {}, "model"), made("dd", {}, model.id), ...rows);
  find("facts-note").textContent = model.note ?? "";
  find("about").showModal();
}

// Shows the context usage of the conversation: from the last answer's usage, else counted by the
// server.
async function measure() {
  const { messages, room } = state;
  let used = messages.at(-1)?.page?.used;
  if (messages.length && room && used === undefined) {
    try {
      used = (await (await asked("tokenize", posted(asking()))).json()).count;
    } catch { /* for example calls without results */ }
    if (messages !== state.messages) return;
  }
  const known = used !== undefined && room;
  const [some, all] = [used, room].map((count) => count?.toLocaleString("en"));
  find("used").textContent = known ? `${some} of ${all} tokens used` : "";
  find("used").classList.toggle("scarce", Boolean(known) && used > 0.9 * room);
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

// --- conversations ----------------------------------------------------------------------------

// Renders the messages; existing views are kept.
function show() {
  const items = state.messages.filter((m) => m.role !== "tool").map((message) => {
    const item = views.get(message)
      ?? (message.role === "assistant" ? new Answer(message).item : ownView(message));
    views.set(message, item);
    return item;
  });
  items.forEach((item, i) => {
    if (log.children[i] !== item) log.insertBefore(item, log.children[i] ?? null);
  });
  for (const item of [...log.children].slice(items.length)) {
    if (!item.classList.contains("error")) item.remove();
  }
}

// Saves the conversation; `coming`: the partial answer, if one is being generated.
function save(coming = null) {
  const kept = (state.kept ??= { id: newId(), created: Date.now(), updated: 0 });
  const before = state.messages.filter((m) => !coming || m !== state.continued);
  const messages = [...system(), ...before, ...(coming ? [coming] : [])];
  const record = { version: FORMAT, created: kept.created, messages };
  if (!wrongTools()) record.tools = tools();
  state.saving = state.saving.then(async () => {
    await written(kept, record);
    state.unsaved = "";
  }).catch((error) => {
    if (state.unsaved !== error.message) notice(`This conversation is not saved: ${error.message}`);
    state.unsaved = error.message;
  });
  return state.saving;
}

async function written(kept, record) {
  if (state.kept === kept) session.setItem("chat", kept.id);
  const updated = Math.max(Date.now(), kept.updated + 1);
  if (!await shelf.put({ ...record, id: kept.id, updated }, kept.updated)) {
    kept.id = newId();
    notice("Another tab changed this conversation. Its state in this tab is saved as a copy.");
    await shelf.put({ ...record, id: kept.id, updated }, 0);
    if (state.kept === kept) session.setItem("chat", kept.id);
  }
  kept.updated = updated;
  drawChats();
}

// Aborts the answer being generated, and keeps the partial text.
async function rest() {
  state.abort?.abort();
  await state.coming;
}

function turnTo(kept, messages) {
  Object.assign(state, { kept, messages, unsaved: "" });
  session.setItem("chat", kept?.id ?? "");
  log.replaceChildren();
  find("live").setAttribute("aria-live", "off"); // screen readers skip old messages
  scrolled(show, true);
  setTimeout(() => find("live").setAttribute("aria-live", "polite"));
  drawChats();
  measure();
  if (!WIDE.matches) showChats(false);
}

// The stored record of a conversation, after pending writes.
async function latest(id) {
  await state.saving;
  return shelf.get(id);
}

async function openChat(id) {
  let found = null;
  do { // the open conversation may change while this one is read
    await rest();
    found = await latest(id);
  } while (state.abort);
  if (!found) return;
  const [first, ...others] = found.messages;
  const led = ["system", "developer"].includes(first?.role);
  const given = found.tools.length ? JSON.stringify(found.tools, null, 1) : "";
  state.own = { system: led ? textsOf(first.content) : "", tools: given };
  for (const id of OWN) find(id).value = state.own[id];
  const { created, updated } = found;
  turnTo({ id, created, updated }, led ? others : found.messages);
}

async function begin() {
  if (state.abort) await rest();
  state.attached = [];
  showAttached();
  state.own = {};
  restore(OWN);
  turnTo(null, []);
  text.focus();
}

// --- messages ---------------------------------------------------------------------------------

// Shows the stop button (busy) or the send button, and moves the focus from the one that is hidden;
// a focus elsewhere on the page stays.
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

// Generates an answer to the messages; returns false if it was stopped or failed before any text, or
// if the tools are invalid. `answer`: view of the answer to continue; `replaces`: message of which
// it is a new version.
async function reply(answer = null, replaces = null) {
  const wrong = wrongTools();
  if (wrong) {
    openSettings(wrong, "tools");
    return false;
  }
  const asks = body();
  if (answer) Object.assign(asks, { continue_final_message: true, add_generation_prompt: false });
  state.continued = answer && state.messages.at(-1);
  const { version, versions = [], speeds = [] } = state.continued?.page ?? {};
  const others = (list) => list.filter((_, i) => i !== version);
  if (answer) Object.assign(answer, { versions: others(versions), speeds: others(speeds) });
  answer?.resume();
  answer ??= new Answer();
  if (replaces) Object.assign(answer, versionsOf(replaces));
  scrolled(() => log.append(answer.item));
  state.abort = new AbortController();
  busy(true);
  let stopped = false;
  let failed = null;
  try {
    const { signal } = state.abort;
    const response = await asked("v1/chat/completions", { ...posted(asks), signal });
    for await (const chunk of events(response)) answer.take(chunk);
  } catch (error) {
    stopped = true;
    const broken = error instanceof TypeError; // the stream broke off
    failed = error.name === "AbortError" ? null : broken ? unreachable() : error;
  }
  const message = answer.end(stopped);
  const before = state.messages.filter((m) => m !== state.continued);
  state.continued = null;
  if (message) state.messages = [...before, message];
  if (failed) {
    const again = message ? () => goOn(message, answer) : null;
    showError(inWords(failed), failed.status === 0 ? again ?? (() => retry(replaces)) : null);
    if (failed.status === 401) openSettings("The key is missing or wrong.", "key");
  }
  busy(false);
  if (message?.tool_calls && !text.value) answer.body.querySelector(".call textarea").focus();
  look();
  return Boolean(message);
}

// Replaces the messages, or those of a copy of the conversation, and generates an answer. If there
// is none, restores the previous state.
async function attempt(messages, { answer = null, copy: copied = false, replaces = null } = {}) {
  const { messages: before, kept } = state;
  if (copied) state.kept = null;
  state.messages = messages;
  for (const old of log.querySelectorAll(":scope > .error")) old.remove();
  scrolled(show, true); // scroll to the user's message
  // The replaced answer is kept until the new one has text.
  if (copied || before.every((message) => messages.includes(message))) save();
  const done = await (state.coming = reply(answer, replaces));
  if (!done) {
    const begun = state.kept;
    Object.assign(state, { messages: before, kept });
    show();
    if (begun !== kept) forget(begun.id);
  }
  if (state.kept) save();
  measure();
  return done;
}

// Deletes the stored conversation that a failed attempt began.
async function forget(id) {
  session.setItem("chat", state.kept?.id ?? "");
  await state.saving;
  await shelf.remove(id);
  drawChats();
}

// Returns the content of a user message: text files, images and videos, the text, then audio.
function content(words, attached) {
  if (!attached.length) return words;
  const part = ({ kind, url, name, text: file }) => (kind === "text" ? { type: "text", text: file }
    : { type: `${kind}_url`, [`${kind}_url`]: { url }, page: name });
  const sounds = attached.filter((m) => m.kind === "audio").map(part);
  const seen = attached.filter((m) => m.kind !== "audio").map(part);
  return [...seen, { type: "text", text: words }, ...sounds];
}

async function say() {
  await state.started;
  const { kept } = state;
  await state.reading;
  if (state.kept !== kept) return; // another conversation was opened while files were read
  const [words, files] = [text.value, state.attached];
  if (state.abort || (!words.trim() && !files.length)) return;
  const [calling, left] = [state.messages.at(-1), leftCalls()];
  if (left.length) views.delete(calling); // rendered again, with fields that are read-only
  text.value = "";
  state.attached = [];
  showAttached();
  fit();
  const message = { role: "user", content: content(words, files) };
  if (await attempt([...state.messages, ...left, message])) return;
  if (left.length) {
    views.delete(calling);
    show();
  }
  if (!text.value) text.value = words;
  if (!state.attached.length) state.attached = files;
  showAttached();
  fit();
}

async function regenerate(message) {
  if (state.abort) return;
  const at = state.messages.indexOf(message);
  const replaces = message.role === "assistant" ? message : null;
  await attempt(state.messages.slice(0, replaces ? at : at + 1), { replaces });
}

// Retries what failed: a regeneration, or the message in the input field.
function retry(replaces) {
  if (replaces) regenerate(replaces);
  else say();
}

async function goOn(message, answer) {
  if (!state.abort) await attempt(state.messages, { answer });
}

// Edits a user message in place. If other user messages follow, the edit continues in a copy of the
// conversation, so that they are kept.
function edit(message) {
  const item = views.get(message);
  const field = made("textarea", { rows: "4", "aria-label": "Message" });
  field.value = parted(message.content).words;
  const leave = () => { views.delete(message); show(); };
  const again = async () => {
    const at = state.messages.indexOf(message);
    if (state.abort || at < 0 || !field.value.trim()) return;
    const later = state.messages.slice(at + 1).some((m) => m.role === "user");
    const changed = { ...message, content: replaced(message.content, field.value) };
    views.delete(message);
    if (await attempt([...state.messages.slice(0, at), changed], { copy: later })) return;
    if (!state.messages.includes(message)) return;
    edit(message);
    views.get(message).querySelector("textarea").value = field.value;
  };
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || event.shiftKey || !["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") again();
    else leave();
  });
  const acts = made("div", { class: "buttons" }, button("Cancel", leave), button("Send", again));
  item.querySelector(".acts").remove();
  item.querySelector(".body").replaceChildren(field, acts);
  field.focus();
}

// Replaces a content's last text; files are before it.
function replaced(given, words) {
  if (isText(given)) return words;
  const last = given.findLastIndex((part) => part.type === "text");
  if (last < 0) return [...given, { type: "text", text: words }];
  return given.map((part, i) => (i === last ? { ...part, text: words } : part));
}

// --- files ------------------------------------------------------------------------------------

function showAttached() {
  find("attached").replaceChildren(...state.attached.map((m) => made("li", {}, preview(m),
    button("×", () => {
      state.attached = state.attached.filter((other) => other !== m);
      showAttached();
      text.focus();
    }, { "aria-label": `Remove ${m.name}` }))));
}

// Attaches files, one by one. They are copied first: an event's list of files is empty later.
function attach(list) {
  const files = [...list];
  state.reading = Promise.resolve(state.reading).then(() => read(files));
  return state.reading;
}

async function read(files) {
  for (const file of files) {
    const { name } = file;
    const kind = TEXTS.test(name) ? "text" : file.type.split("/")[0];
    try {
      const media = ["image", "audio", "video"].includes(kind);
      if (media && state.media && !state.media.includes(kind)) {
        throw new Error(`this model takes no ${kind}`);
      }
      const held = media ? { kind, name, url: await dataUrl(file) } : await textOf(file);
      state.attached = [...state.attached, held];
    } catch (error) {
      showError(`${name}: ${error.message}`);
    }
  }
  showAttached();
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

// A text file as a message part: its name, and its content as a code block.
async function textOf(file) {
  if (file.size > MOST_TEXT) throw new Error("has more than 1 MiB of text");
  let held = "";
  try {
    held = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch { /* reported below */ }
  if ((!held && file.size) || held.includes("\0")) {
    throw new Error("is no text in UTF-8; texts, images, audio and videos can be attached");
  }
  const runs = held.match(/`{3,}/g) ?? [];
  const fenced = "`".repeat(Math.max(3, ...runs.map((found) => found.length + 1)));
  const ending = /\.(\w+)$/.exec(file.name)?.[1] ?? "";
  const whole = `${file.name}:\n${fenced}${ending}\n${held.replace(/\n$/, "")}\n${fenced}\n\n`;
  return { kind: "text", name: file.name, text: whole };
}

// --- keys and buttons -------------------------------------------------------------------------

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
find("theme").addEventListener("change", showTheme);
find("open-about").addEventListener("click", () => {
  showModel().catch((error) => notice(error.message));
});
find("model").addEventListener("change", () => {
  lasting.setItem("model", chosenModel());
  look();
});
find("open-settings").addEventListener("click", () => openSettings());
find("settings-form").addEventListener("submit", (event) => {
  const wrong = wrongTools();
  find("asked").textContent = wrong;
  if (wrong) event.preventDefault();
});
find("tools").addEventListener("input", () => {
  if (find("asked").textContent.startsWith("Tools:")) find("asked").textContent = wrongTools();
});
find("defaults").addEventListener("click", () => {
  for (const id of SAMPLING) find(id).value = "";
});
find("settings").addEventListener("close", () => {
  keep();
  look();
  if (state.kept && !state.abort) save();
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
// The overlay is a drop target too: files dropped on it are accepted.
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

async function start() {
  restore();
  find("thinking").checked = lasting.getItem("thinking") === "true";
  find("theme").value = lasting.getItem("theme") || "system";
  showTheme();
  find("key").value = session.getItem("key") ?? "";
  showChats(WIDE.matches && lasting.getItem("chats") !== "closed");
  look();
  setInterval(() => { if (!document.hidden && !state.locked) look(); }, LOOK_MS);
  for (const told of await shelf.open(drawChats)) notice(told);
  drawChats();
  if (shelf.list.has(session.getItem("chat"))) await openChat(session.getItem("chat"));
}
state.started = start().catch((error) => notice(`Conversations: ${error.message}`));
