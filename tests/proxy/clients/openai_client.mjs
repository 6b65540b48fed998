// One conversation through the openai package, as its users write it: see python_clients.py.
// node openai_client.mjs <base_url> <key>; the package must be resolvable from the working folder.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";

const require = createRequire(path.join(process.cwd(), "package.json"));
const { OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const parameters = {
  type: "object",
  properties: { q: { type: "string" }, n: { type: "number" } },
  required: ["q"],
};
const tools = [{ type: "function", function: { name: "search", parameters } }];
const messages = [{ role: "user", content: "Where is Köln?" }];
const texts = [];
const calls = [];
let pieces = 0;

for (const stream of [true, true, false, false]) {
  const request = { model: "policy", messages, tools };
  let message;
  if (stream) {
    // The package's own accumulator, which checks the chunks as it goes.
    const runner = client.chat.completions.stream(request);
    runner.on("chunk", (chunk) => {
      pieces += chunk.choices[0]?.delta.tool_calls ? 1 : 0;
    });
    message = await runner.finalMessage();
  } else {
    message = (await client.chat.completions.create(request)).choices[0].message;
  }
  texts.push(message.content ?? "");
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    calls.push([call.function.name, JSON.parse(call.function.arguments)]);
    messages.push({ role: "tool", tool_call_id: call.id, content: "50.9 N — grüße" });
  }
  if (!message.tool_calls?.length) messages.push({ role: "user", content: "And again?" });
}
console.log("\n" + JSON.stringify({ texts, calls, pieces }));
