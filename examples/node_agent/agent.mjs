// A Node program that turns a line of text into JSON, with the npm package `openai`.
//
// It knows the OpenAI API, and how to report a reward with one HTTP request. Run it by itself
// against any OpenAI endpoint with
//
//     OPENAI_BASE_URL=... OPENAI_API_KEY=... node agent.mjs Alice 42

import OpenAI from "openai";

const [name, age] = process.argv.slice(2);

const completion = await new OpenAI().chat.completions.create({
  model: process.env.AGENTRL_MODEL ?? "gpt-4o-mini",
  messages: [
    {
      role: "user",
      content: `Name: ${name}. Age: ${age}. Answer in JSON with the keys name, age.`,
    },
  ],
  max_tokens: 32,
});
const reply = completion.choices[0].message.content ?? "";
console.log(`${name}, ${age}: ${reply}`);
await emitReward(score(reply));

/** 1 for the right object; half for one with one of the two values right. */
function score(text) {
  try {
    const found = JSON.parse(text);
    return ((found.name === name) + (found.age === Number(age))) / 2;
  } catch {
    return 0;
  }
}

/** Rewards the rollout that is running; outside training this does nothing. */
async function emitReward(value) {
  const { AGENTRL_GATEWAY: gateway, AGENTRL_ROLLOUT_ID: rollout, AGENTRL_KEY: key } = process.env;
  if (!rollout) return;
  const answer = await fetch(`${gateway}/rollouts/${rollout}/v1/rewards`, {
    method: "POST",
    headers: { authorization: `Bearer ${key}`, "content-type": "application/json" },
    body: JSON.stringify({ value }),
  });
  if (!answer.ok) throw new Error(`the reward was refused: ${await answer.text()}`);
}
