"use strict";
// Conversations in the browser's storage, and their format.
//
// A conversation: {version, id, title, created, updated, tools, messages}; tools and messages in
// OpenAI's format; title "": the list shows the first words. Data of the page's own about a message
// or a part are under its key `page`.

const FORMAT = 1;
const MOST_TITLE = 60;
const ROLES = ["user", "assistant", "tool"];
const PART = /^(?:text|input_audio|(?:image|audio|video)(?:_url)?)$/;

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
const isObject = (given) => typeof given === "object" && given !== null && !Array.isArray(given);
const isText = (given) => typeof given === "string";
const missing = (given) => given === undefined || given === null;
const asObject = (given) => (isObject(given) ? given : {});

function wrongCall(given) {
  const { id, function: called } = asObject(given);
  const { name, arguments: json } = asObject(called);
  return ![id, name, json].every(isText);
}

function isPart(given) {
  const { type, page } = asObject(given);
  if (!isText(type) || !PART.test(type) || !(missing(page) || isText(page))) return false;
  const { [type]: held } = given;
  if (type === "text") return isText(held);
  return missing(held) || isText(isObject(held) ? held.url ?? held.data : held);
}

// Returns a message's validation error, or "".
function wrongMessage(given, first) {
  if (!isObject(given)) return ": expected an object";
  const { role, content, tool_calls: calls, page } = given;
  const known = first ? ["system", "developer", ...ROLES] : ROLES;
  if (!known.includes(role)) return `.role: expected one of ${known.join(", ")}`;
  const good = isText(content) || (Array.isArray(content) ? content.every(isPart)
    : missing(content) && role === "assistant");
  if (!good) return ".content: expected a text, or a list of text and media parts";
  if (!missing(given.reasoning_content) && !isText(given.reasoning_content)) {
    return ".reasoning_content: expected a text";
  }
  if (!missing(calls) && (!Array.isArray(calls) || calls.some(wrongCall))) {
    return ".tool_calls: expected a list of calls, each with id, function.name and .arguments";
  }
  const { speed = "", used = 0, version = 0, versions = [], speeds = [] } = asObject(page);
  const shown = missing(page) || (isObject(page) && isText(speed) && Number.isFinite(used)
    && Array.isArray(versions) && versions.every((one) => !asObject(one).page
      && !wrongMessage(one, false)) && Number.isInteger(version)
    && (!versions.length || version in versions) && Array.isArray(speeds) && speeds.every(isText));
  return shown ? "" : ".page: is damaged";
}

function wrongMessages(given) {
  if (!Array.isArray(given)) return "messages: expected a list";
  for (const [i, message] of given.entries()) {
    const wrong = wrongMessage(message, i === 0);
    if (wrong) return `messages[${i}]${wrong}`;
  }
  return "";
}

function wrongRecord(given, id) {
  if (!isObject(given)) return "damaged";
  const { version, title, tools, created, updated } = given;
  if (version !== FORMAT) return `of version ${version} (this page reads ${FORMAT})`;
  if (given.id !== id) return "damaged: its id is not its key";
  if (!isText(title)) return "damaged: it has no title";
  if (!Array.isArray(tools)) return "damaged: tools: expected a list";
  if (!Number.isFinite(created) || !Number.isFinite(updated)) return "damaged: a time is missing";
  const wrong = wrongMessages(given.messages);
  return wrong && `damaged: ${wrong}`;
}

// Returns a stored conversation's validation error, or "". Never throws, so that one broken record
// does not prevent reading the others.
function wrongConversation(given, id) {
  try {
    return wrongRecord(given, id);
  } catch (error) {
    return `damaged: ${error.message}`;
  }
}

// A message without the page's own data.
function plain({ page, ...message }) {
  const parts = Array.isArray(message.content) ? message.content : null;
  return parts ? { ...message, content: parts.map(({ page: name, ...part }) => part) } : message;
}

// Splits a content into typed text (the last text part), text files before it, and media.
function parted(content) {
  if (!Array.isArray(content)) return { words: content ?? "", files: [], media: [] };
  const texts = content.filter((part) => part.type === "text").map((part) => part.text);
  const media = content.filter((part) => part.type !== "text");
  return { words: texts.at(-1) ?? "", files: texts.slice(0, -1), media };
}

// Joins all texts of a content.
function textsOf(content) {
  const { words, files } = parted(content);
  return [...files, words].join("\n");
}

function titleOf({ title, messages }) {
  const said = messages.find((message) => message.role === "user");
  const line = parted(said?.content).words.trim().split("\n")[0];
  return title || line.slice(0, MOST_TITLE) || "Without words";
}

function summary(conversation) {
  const { id, updated, messages } = conversation;
  const title = titleOf(conversation);
  const texts = messages.map(({ content }) => textsOf(content));
  return { id, updated, title, words: [title, ...texts].join("\n").toLowerCase() };
}

// --- IndexedDB --------------------------------------------------------------------------------

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function openDatabase() {
  const request = indexedDB.open("g4ir", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations");
    request.result.createObjectStore("aside", { autoIncrement: true });
  };
  const database = await settled(request);
  database.onversionchange = () => database.close();
  return database;
}

// A key-value store in IndexedDB.
class Kept {
  constructor(database, name) {
    Object.assign(this, { database, name });
  }

  // Runs `act` in a transaction; returns its result after the commit.
  async within(mode, act) {
    const transaction = this.database.transaction(this.name, mode);
    const written = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error ?? new Error("the browser aborted the write"));
    });
    const [result] = await Promise.all([act(transaction.objectStore(this.name)), written]);
    return result;
  }

  get(key) { return this.within("readonly", (store) => settled(store.get(key))); }

  delete(key) { return this.within("readwrite", (store) => settled(store.delete(key))); }

  // Replaces a value by `make(value)`, unless that is undefined; returns `make(value)`.
  change(key, make) {
    return this.within("readwrite", async (store) => {
      const value = make(await settled(store.get(key)));
      if (value !== undefined) await settled(store.put(value, key));
      return value;
    });
  }

  add(value) { return this.within("readwrite", (store) => settled(store.add(value))); }

  // Calls see(key, value) for each entry.
  each(see) {
    return this.within("readonly", async (store) => {
      const request = store.openCursor();
      for (let at = await settled(request); at; at = await settled(request)) {
        see(at.key, at.value);
        at.continue();
      }
    });
  }
}

// In-memory store, used unless the browser's can be opened.
class Held extends Map {
  async get(key) { return super.get(key); }

  async change(key, make) {
    const value = make(super.get(key));
    if (value !== undefined) this.set(key, value);
    return value;
  }

  async add(value) { this.set(newId(), value); }

  async each(see) { for (const [key, value] of this) see(key, value); }
}

// All conversations of this browser; `list`: summaries by id.
class Shelf {
  constructor() {
    this.list = new Map();
    this.asides = 0;
    [this.conversations, this.aside] = [new Held(), new Held()];
    this.channel = new BroadcastChannel("g4ir");
  }

  // Reads the store; `changed` is called when another tab changes it. Returns warnings for the
  // user: why storage is unavailable, and which records could not be read and were set aside.
  async open(changed) {
    const [told, bad] = [[], []];
    try {
      const database = await openDatabase();
      const kept = new Kept(database, "conversations");
      await kept.each((id, value) => {
        const why = wrongConversation(value, id);
        if (why) bad.push({ id, value, why });
        else this.list.set(id, summary(value));
      });
      [this.conversations, this.aside] = [kept, new Kept(database, "aside")];
    } catch (error) {
      const newer = "the stored ones are of a newer version, and stay unchanged";
      const why = error.name === "VersionError" ? newer : error.message;
      told.push(`Conversations are not saved in this browser: ${why}.`);
    }
    for (const one of bad) {
      await this.aside.add(one);
      await this.conversations.delete(one.id);
    }
    for (const why of new Set(bad.map((one) => one.why))) {
      const count = bad.filter((one) => one.why === why).length;
      told.push(`Conversations set aside, see the list: ${count} ${why}.`);
    }
    await this.aside.each(() => { this.asides += 1; });
    this.channel.onmessage = async ({ data: id }) => {
      const value = await this.conversations.get(id);
      if (value && !wrongConversation(value, id)) this.list.set(id, summary(value));
      else this.list.delete(id);
      changed();
    };
    return told;
  }

  get(id) { return this.conversations.get(id); }

  // Saves a conversation unless another tab has changed it since the time `seen`; returns whether
  // it was saved. An absent title or tools stay unchanged.
  async put(conversation, seen) {
    const { id } = conversation;
    const value = await this.conversations.change(id, (old) => (old && old.updated !== seen
      ? undefined : { title: "", tools: [], ...old, ...conversation }));
    if (!value) return false;
    this.list.set(id, summary(value));
    this.channel.postMessage(id);
    return true;
  }

  async remove(id) {
    await this.conversations.delete(id);
    this.list.delete(id);
    this.channel.postMessage(id);
  }
}
