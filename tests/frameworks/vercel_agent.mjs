// An agent of the Vercel AI SDK: its default model, which is one of the Responses API, one tool, two
// user turns. Its reward is the length of its last answer.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
});
const model = openai(process.env.AGENTRL_MODEL);
const messages = [];
let text = "";
for (const question of ["What is 2 + 3?", "And 4 + 5?"]) {
  messages.push({ role: "user", content: question });
  const said = await generateText({ model, messages, tools: { add }, stopWhen: stepCountIs(3) });
  messages.push(...said.response.messages);
  const sent = JSON.stringify(said.steps[0].request.body.input);
  if (text && !sent.includes("item_reference")) throw new Error(`no item_reference in ${sent}`);
  text = said.text;
}
await fetch(`${process.env.OPENAI_BASE_URL}/rewards`, {
  method: "POST",
  headers: { authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
  body: JSON.stringify({ value: text.length / 10 }),
});
