// What ollama's JavaScript client does with a served engine: `node --input-type=module - URL PICTURE
// < ollama.mjs`, in the clients' environment.
import assert from 'node:assert/strict';
import { Ollama } from 'ollama';

const [host, picture] = process.argv.slice(2);
const client = new Ollama({ host });
const model = 'tiny';
const messages = [{ role: 'user', content: 'Hi' }];

assert.deepEqual((await client.list()).models.map((m) => m.name), [model]);
assert.ok((await client.show({ model })).capabilities.includes('vision'));

let text = '';
let thinking = '';
let last;
for await (last of await client.chat({ model, messages, think: true, stream: true })) {
  text += last.message.content;
  thinking += last.message.thinking ?? '';
}
assert.deepEqual([text, thinking, last.done, last.done_reason], ['hello', 'hmm', true, 'stop']);

const parameters = { type: 'object', properties: { a: { type: 'integer' } }, required: ['a'] };
const tools = [{ type: 'function', function: { name: 'f', description: 'd', parameters } }];
const { message } = await client.chat({ model, messages, tools });
assert.deepEqual(message.tool_calls.map((c) => c.function), [{ name: 'f', arguments: { a: 3 } }]);
const answer = { role: 'tool', tool_name: 'f', content: '12' };
const next = await client.chat({ model, messages: [...messages, message, answer], tools });
assert.equal(next.message.content, 'hello');

const formed = await client.chat({ model, messages, format: parameters });
assert.deepEqual(JSON.parse(formed.message.content), { a: 3 });
const seen = await client.chat({ model, messages: [{ ...messages[0], images: [picture] }] });
assert.equal(seen.message.content, 'hello');
assert.equal((await client.generate({ model, prompt: 'Hi' })).response, 'hello');
await assert.rejects(client.chat({ model: 'other', messages }), /there is no 'other' here/);
