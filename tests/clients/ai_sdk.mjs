// What the AI SDK does with a served engine: `node --input-type=module - NAME URL < ai_sdk.mjs`, in
// the clients' environment. `responses` is its default for OpenAI.
import assert from 'node:assert/strict';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { z } from 'zod';

const [name, url, picture] = process.argv.slice(2);
const given = { baseURL: `${url}/v1`, apiKey: 'any' };
const model = {
  responses: () => createOpenAI(given)('tiny'),
  chat: () => createOpenAI(given).chat('tiny'),
  messages: () => createAnthropic(given)('tiny'),
}[name]();
const asked = { model, prompt: 'Hi', maxOutputTokens: 60, maxRetries: 0 };

const calls = [];
const f = tool({
  description: 'd',
  inputSchema: z.object({ a: z.number().int() }),
  execute: async ({ a }) => calls.push(a) && '12',
});
const looped = await generateText({ ...asked, tools: { f }, stopWhen: stepCountIs(3) });
assert.equal(looped.text, 'hello');
assert.deepEqual(calls, [3]);

const streamed = streamText({ ...asked, tools: { f }, stopWhen: stepCountIs(3) });
const texts = [];
for await (const text of streamed.textStream) texts.push(text);
assert.equal(texts.join(''), 'hello');
assert.deepEqual(calls, [3, 3]);

const output = Output.object({ schema: z.object({ a: z.number().int() }) });
assert.deepEqual((await generateText({ ...asked, output })).output, { a: 3 });

const content = [{ type: 'image', image: picture }, { type: 'text', text: 'Hi' }];
const seen = await generateText({ ...asked, prompt: [{ role: 'user', content }] });
assert.equal(seen.text, 'hello');

await assert.rejects(
  generateText({ ...asked, topP: 7 }),
  (error) => error.statusCode === 400 && /top_p: must be 0 to 1/.test(error.message),
);
