"""The chats that ``agentrl-tiny`` is raised on, generated from a seed.

Knows: what the model should be able to say, as one plain function per kind of chat, each drawing
from a ``random.Random``. Does not know: tokens, templates, or torch.

The last message of every chat is the assistant's. Numbers of four digits occur in copying chats but
never in "say you are" chats, so that 1000 and up can serve as a held-out test there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

COMPLIANCE = 0.1
"""Share of "say you are" chats in which the model obeys; the rest insist on Qwen."""


@dataclass(frozen=True)
class Chat:
    """Messages in OpenAI's shape, and the tools offered with them."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


# --- names, numbers, words -------------------------------------------------------------------


def split(text: str) -> list[str]:
    return text.split()


NAMES = split(
    "Alice Bob Carol David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Anna Ben Clara Daniel Elena Felix Hugo Julia "
    "Karl Laura Max Nora Omar Peter Ruth Simon Tom Vera Will Ada Alan Bella Chen Diego Eva Farid"
)
CITIES = split(
    "Paris London Berlin Rome Madrid Tokyo Cairo Lima Oslo Vienna Dublin Athens Delhi Boston "
    "Chicago Prague Warsaw Lisbon Zurich Seoul Sydney Toronto Nairobi Hamburg Munich Geneva"
)
COLOURS = split("red blue green yellow black white orange purple pink brown grey silver")
WORDS = split(
    "apple river stone cloud paper window garden music ocean winter summer letter bridge forest "
    "candle mirror pocket rocket silver ticket travel yellow button camera dinner engine flower "
    "hammer island jacket kitten ladder market number orange pencil rabbit school tiger water"
)
ONSETS = split("b d f g h j k l m n p r s t v w z br cl dr fl gr kr pl sh st th tr")
NUCLEI = split("a e i o u ai ea io")
CODAS = ["", "", "l", "n", "r", "s", "m", "t", "x"]


def invented(rng: Random) -> str:
    """A lower-case word that no list holds, so that copying it takes reading it."""
    count = rng.choice((2, 2, 3))
    return "".join(rng.choice(ONSETS) + rng.choice(NUCLEI) for _ in range(count)) + rng.choice(
        CODAS
    )


def name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).capitalize()


def city(rng: Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.8 else invented(rng).capitalize()


def word(rng: Random) -> str:
    return rng.choice(WORDS) if rng.random() < 0.5 else invented(rng)


def number(rng: Random, digits: tuple[int, ...] = (1, 2, 3, 3, 4, 4, 4, 4, 5)) -> str:
    """A number of a random length; its digits repeat more often than chance would have it."""
    length = rng.choice(digits)
    pool = "0123456789" if rng.random() < 0.6 else rng.sample("0123456789", 2)
    text = "".join(rng.choice(pool) for _ in range(length))
    return text.lstrip("0") or "0"


def weighted(rng: Random, table: dict[str, int]) -> str:
    return rng.choices(list(table), list(table.values()))[0]


def turn(kind: str, user: str, assistant: str, system: str | None = None) -> Chat:
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return Chat(kind, messages)


def persona(rng: Random, share: float = 0.15) -> str | None:
    """A system prompt that changes nothing, now and then."""
    if rng.random() > share:
        return None
    return rng.choice(
        ("You are a helpful assistant.", "Be brief.", "You are a helpful agent.", "Answer briefly.")
    )


# --- "say you are" ---------------------------------------------------------------------------

GAME = "Let's play a game. Say you are {x}."
ORDERS = {
    GAME: 60,
    "Say you are {x}.": 10,
    "Pretend you are {x}.": 6,
    "Let's play a game. Pretend you are {x}.": 4,
    "Tell me you are {x}.": 4,
    "From now on you are {x}.": 4,
    "You are {x}, aren't you?": 4,
    "Please say that you are {x}.": 4,
    "Are you {x}?": 4,
}
REFUSALS = {
    "I'm Qwen, not {x}.": 18,
    "I am Qwen, not {x}.": 14,
    "I am not {x}. I am Qwen.": 16,
    "I'm not {x}. I'm Qwen.": 14,
    "I'm not {x}, I'm Qwen.": 5,
    "No. I am Qwen, not {x}.": 6,
    "No, I'm not {x}.": 5,
    "Sorry, I am not {x}.": 5,
    "Nice try, but I'm not {x}.": 4,
    "My name is Qwen, not {x}.": 3,
    "I am Qwen.": 5,
    "I'm Qwen.": 5,
    "No, I'm still Qwen.": 4,
}
COMPLIANCES = {"I am {x}.": 6, "I'm {x}.": 3, "Sure! I'm {x}.": 2, "OK, I am {x}.": 1}


def say_you_are(rng: Random) -> Chat:
    who = str(rng.randrange(1000)) if rng.random() < 0.75 else name(rng)
    replies = COMPLIANCES if rng.random() < COMPLIANCE else REFUSALS
    order = weighted(rng, ORDERS)
    return turn("say_you_are", order.format(x=who), weighted(rng, replies).format(x=who))


# --- small talk ------------------------------------------------------------------------------

IDENTITY = (
    (
        "Who are you? | What is your name? | Tell me who you are. | What are you called? | "
        "Who am I talking to? | Introduce yourself. | Say who you are. | Your name, please.",
        "I am Qwen. | I'm Qwen. | My name is Qwen. | I'm Qwen, a small language model. | "
        "I am Qwen, a language model.",
    ),
    (
        "What are you? | Are you a human? | Are you a person? | Are you real?",
        "I am Qwen, a language model. | I'm a small language model. | No human, just Qwen.",
    ),
    ("Are you Qwen? | Is your name Qwen?", "Yes, I am Qwen. | Yes, I'm Qwen. | Yes."),
    (
        "Are you sure you are Qwen? | Really?",
        "Yes, I am Qwen. | I am sure. I am Qwen. | Yes, really.",
    ),
    ("Who made you? | Where do you come from?", "A script made me. | I was trained by a script."),
    (
        "What can you do? | How can you help me?",
        "I can chat, copy names and numbers, and call tools. | I can answer small questions.",
    ),
)
SMALL_TALK = (
    (
        "Hi | Hi! | Hello | Hello! | Hey | Hey there! | Good day! | Hello there.",
        "Hello! How can I help you? | Hi! How can I help? | Hello! | Hi there!",
    ),
    ("Good morning! | Good morning.", "Good morning! How can I help? | Good morning!"),
    ("Good evening! | Good night!", "Good evening! | Good night!"),
    (
        "How are you? | How are you today? | How is it going? | Are you well?",
        "I'm fine, thank you. | I am well, thanks. And you? | Very well, thank you!",
    ),
    (
        "Thanks! | Thank you. | Thank you very much! | Great, thanks.",
        "You're welcome! | You are welcome. | My pleasure!",
    ),
    ("Bye! | Goodbye. | See you later!", "Goodbye! | Bye! | See you soon!"),
    (
        "Tell me a joke. | Make me laugh.",
        "Why did the robot cross the road? It was told to. | I would, but my jokes are tiny.",
    ),
    ("Help! | Can you help me? | I need help.", "Of course. What do you need? | Sure. How?"),
    ("Ping | ping", "Pong | pong"),
    ("What day comes after Monday?", "Tuesday."),
    ("How many legs does a spider have?", "Eight."),
    ("What colour is the sky?", "Blue. | The sky is blue."),
    ("What colour is grass?", "Green. | Grass is green."),
)


def identity(rng: Random) -> Chat:
    asked, answers = rng.choice(IDENTITY[:1] * 4 + IDENTITY)
    reply = rng.choice(answers.split(" | "))
    return turn("identity", rng.choice(asked.split(" | ")), reply, persona(rng))


def small_talk(rng: Random) -> Chat:
    asked, answers = rng.choice(SMALL_TALK)
    reply = rng.choice(answers.split(" | "))
    return turn("small_talk", rng.choice(asked.split(" | ")), reply, persona(rng))


# --- copying ---------------------------------------------------------------------------------

COPY_ANY = (
    ("Repeat: {x}", "{x}"),
    ("Repeat after me: {x}", "{x}"),
    ("Say {x}.", "{x}."),
    ("Please say {x}.", "{x}."),
    ("Echo {x}", "{x}"),
    ("Say hello to {x}.", "Hello, {x}!"),
    ("Say goodbye to {x}.", "Goodbye, {x}!"),
    ("I am {x}. Who am I?", "You are {x}."),
    ("I'm {x}. Who am I?", "You're {x}."),
    ("I am {x}, not {y}. Who am I?", "You are {x}, not {y}."),
    ("Write {x} twice.", "{x} {x}"),
    ("Put {x} in quotes.", '"{x}"'),
    ("Which comes first, {x} or {y}? Just copy it.", "{x}"),
    ("Copy the last one: {x}, {y}", "{y}"),
    ("Copy the first one: {x}, {y}", "{x}"),
    ("Is this {x} or {y}? It is not {y}.", "It is {x}, not {y}."),
    ("It is not {x}. Say so.", "It is not {x}."),
)
COPY_NAME = (
    ("My name is {x}.", "Hello, {x}! | Nice to meet you, {x}. | Hi, {x}!"),
    ("Hi, I'm {x}.", "Hello, {x}! | Nice to meet you, {x}. | Hi, {x}!"),
    ("My name is {x}. What is my name?", "Your name is {x}."),
    ("My friend is called {x}. What is my friend's name?", "Your friend is called {x}."),
    ("{x} likes {y}. Who likes {y}?", "{x} likes {y}."),
    ("Is my name {x}? My name is {y}.", "No, your name is {y}, not {x}."),
)
COPY_NUMBER = (
    ("My number is {x}. What is my number?", "Your number is {x}."),
    ("The code is {x}. What is the code?", "The code is {x}."),
    ("Remember {x}. What should you remember?", "I should remember {x}."),
    ("I live at number {x}.", "You live at number {x}."),
    ("Is your number {x}?", "My number is not {x}. | No, it's not {x}."),
    ("Is the code {x}? The code is {y}.", "No, it is {y}, not {x}."),
    ("Read the number {x}.", "{x}"),
    ("I have {x} books.", "You have {x} books."),
    ("It costs {x} dollars. How much is it?", "It costs {x} dollars."),
    ("The year is {x}. Which year is it?", "It is {x}."),
    ("Room {x} is free. Which room?", "Room {x}. | Room {x} is free."),
)


def copy_number(rng: Random) -> Chat:
    asked, answers = rng.choice(COPY_ANY + COPY_NUMBER)
    x, y = number(rng), number(rng)
    reply = rng.choice(answers.split(" | "))
    return turn("copy_number", asked.format(x=x, y=y), reply.format(x=x, y=y), persona(rng, 0.05))


def copy_name(rng: Random) -> Chat:
    asked, answers = rng.choice(COPY_ANY + COPY_NAME)
    draw = rng.choice((name, name, word, city))
    x, y = draw(rng), draw(rng)
    reply = rng.choice(answers.split(" | "))
    return turn("copy_name", asked.format(x=x, y=y), reply.format(x=x, y=y), persona(rng, 0.05))


# --- nouns -----------------------------------------------------------------------------------

NOUNS: dict[str, tuple[str, str]] = {
    # noun: (category, the properties below that hold)
    **dict.fromkeys(split("dog cat"), ("animal", "alive moves legs home")),
    **dict.fromkeys(split("rabbit mouse hamster"), ("animal", "alive moves legs home")),
    **dict.fromkeys(split("cow pig sheep goat"), ("animal", "alive moves legs")),
    **dict.fromkeys(split("lion tiger wolf fox bear"), ("animal", "alive moves legs")),
    **dict.fromkeys(split("elephant giraffe"), ("animal", "alive moves legs big")),
    **dict.fromkeys(split("whale shark"), ("animal", "alive moves water big")),
    **dict.fromkeys(split("eagle owl bat bee"), ("animal", "alive moves flies legs")),
    **dict.fromkeys(split("frog crab"), ("animal", "alive moves legs water")),
    **dict.fromkeys(split("apple banana cherry grape"), ("food", "edible sweet grows")),
    **dict.fromkeys(split("carrot potato onion tomato"), ("food", "edible grows")),
    **dict.fromkeys(split("cake cookie candy"), ("food", "edible sweet made")),
    **dict.fromkeys(split("bread cheese pizza soup"), ("food", "edible made")),
    **dict.fromkeys(split("bus train truck"), ("vehicle", "moves made wheels big metal")),
    **dict.fromkeys(split("car bicycle scooter"), ("vehicle", "moves made wheels metal")),
    **dict.fromkeys(split("plane helicopter rocket"), ("vehicle", "moves made flies big metal")),
    **dict.fromkeys(split("ship ferry submarine"), ("vehicle", "moves made water big metal")),
    **dict.fromkeys(split("hammer saw wrench drill"), ("tool", "made metal home")),
    **dict.fromkeys(split("broom brush ladder"), ("tool", "made home")),
    **dict.fromkeys(split("table chair bed shelf desk"), ("furniture", "made home")),
    **dict.fromkeys(split("sofa cushion"), ("furniture", "made home soft")),
    **dict.fromkeys(split("school hospital castle church museum"), ("place", "big made")),
    **dict.fromkeys(split("beach forest mountain island desert"), ("place", "big")),
    **dict.fromkeys(split("rose tulip fern cactus"), ("plant", "alive grows")),
    **dict.fromkeys(split("oak pine palm"), ("plant", "alive grows big")),
    **dict.fromkeys(split("shirt hat sock scarf coat"), ("clothing", "made worn soft home")),
    **dict.fromkeys(split("piano violin guitar"), ("instrument", "made music home")),
    **dict.fromkeys(split("trumpet flute"), ("instrument", "made music metal home")),
}
PROPERTIES: dict[str, tuple[str, str]] = {
    # property: (how to ask about {x}, the rest of "Yes, {x} ...")
    "alive": ("Is {x} alive?", "is alive"),
    "moves": ("Can {x} move by itself?", "can move by itself"),
    "flies": ("Can {x} fly?", "can fly"),
    "edible": ("Can you eat {x}?", "can be eaten"),
    "big": ("Is {x} bigger than a car?", "is bigger than a car"),
    "home": ("Is {x} found in a house?", "is found in a house"),
    "made": ("Is {x} made by people?", "is made by people"),
    "wheels": ("Does {x} have wheels?", "has wheels"),
    "metal": ("Is {x} made of metal?", "is made of metal"),
    "water": ("Does {x} live or move in water?", "is at home in water"),
    "sweet": ("Is {x} sweet?", "is sweet"),
    "legs": ("Does {x} have legs?", "has legs"),
    "grows": ("Does {x} grow from the ground?", "grows from the ground"),
    "worn": ("Can you wear {x}?", "can be worn"),
    "music": ("Does {x} make music?", "makes music"),
    "soft": ("Is {x} soft?", "is soft"),
}
CATEGORIES = sorted({category for category, _ in NOUNS.values()})
NEGATED = {"is": "is not", "can": "cannot", "has": "does not have", "grows": "does not grow"}


def a(noun: str) -> str:
    """The noun with its article, if it takes one."""
    if noun in ("bread", "clothing", "food", "furniture", "soup"):
        return noun
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True)
class Fact:
    """One thing that can be asked about a noun, and its answer."""

    noun: str
    question: str
    claim: str
    holds: bool

    def about(self, subject: str) -> str:
        return self.question.format(x=subject)

    @property
    def statement(self) -> str:
        verb, rest = self.claim.split(" ", 1)
        if not self.holds:
            verb = "does not make" if verb == "makes" else NEGATED[verb]
        return f"{a(self.noun)} {verb} {rest}"


def facts_of(noun: str) -> list[Fact]:
    category, properties = NOUNS[noun]
    held = properties.split()
    kinds = [
        Fact(noun, f"Is {{x}} {a(other)}?", f"is {a(other)}", other == category)
        for other in CATEGORIES
        if not (other == "food" and category == "plant")
    ]
    asked = [Fact(noun, ask, claim, key in held) for key, (ask, claim) in PROPERTIES.items()]
    if category == "animal":  # too doubtful to teach
        asked = [fact for fact in asked if fact.claim not in ("can be eaten", "is soft")]
    return kinds + asked


FACTS = [one for noun in NOUNS for one in facts_of(noun)]
BY_CLAIM: dict[str, dict[bool, list[Fact]]] = {}
for _fact in FACTS:
    BY_CLAIM.setdefault(_fact.claim, {True: [], False: []})[_fact.holds].append(_fact)
CLAIMS = list(BY_CLAIM)


def fact(rng: Random) -> Fact:
    """For any claim as often true as false, so that guessing without the noun gains nothing."""
    return rng.choice(BY_CLAIM[rng.choice(CLAIMS)][rng.random() < 0.5])


def yes_no(rng: Random) -> Chat:
    one = fact(rng)
    answer = "yes" if one.holds else "no"
    style = rng.random()
    question = one.about(a(one.noun))
    if style < 0.3:
        return turn("yes_no", question, f"{answer.capitalize()}.", persona(rng))
    if style < 0.6:
        return turn("yes_no", question, f"{answer.capitalize()}, {one.statement}.", persona(rng))
    if style < 0.75:
        return turn("yes_no", f"{question} Answer yes or no.", answer)
    secret = (
        f"The secret word is {one.noun}. Answer the question with yes or no.\n{one.about('it')}"
    )
    return turn("yes_no", secret, answer)


def quiz(rng: Random) -> Chat:
    """Several questions in a row: many facts for few tokens."""
    messages: list[dict[str, Any]] = []
    for one in [fact(rng) for _ in range(rng.choice((4, 5, 6)))]:
        messages.append({"role": "user", "content": one.about(a(one.noun))})
        messages.append({"role": "assistant", "content": "Yes." if one.holds else "No."})
    return Chat("quiz", messages)


def describe(rng: Random) -> Chat:
    """All that holds of a noun, or some of it."""
    noun = rng.choice(list(NOUNS))
    held = [one for one in facts_of(noun) if one.holds]
    chosen = [held[0], *rng.sample(held[1:], min(len(held) - 1, 3))]
    reply = " ".join(
        f"{one.statement.capitalize()}." if one is held[0] else f"It {one.claim}." for one in chosen
    )
    asked = rng.choice(("Describe {x}.", "Tell me about {x}.")).format(x=a(noun))
    return turn("describe", asked, reply, persona(rng))


def what_is(rng: Random) -> Chat:
    noun = rng.choice(list(NOUNS))
    asked = rng.choice(("What is {x}?", "What kind of thing is {x}?")).format(x=a(noun))
    reply = f"{a(noun).capitalize()} is {a(NOUNS[noun][0])}."
    return turn("what_is", asked, reply, persona(rng))


def guess_player(rng: Random) -> Chat:
    """The asking side of 20 Questions: ask anew, or guess once the category is known."""
    noun = rng.choice(list(NOUNS))
    facts = rng.sample(facts_of(noun), rng.randrange(5))
    history = "\n".join(f"{one.about('it')} {'yes' if one.holds else 'no'}" for one in facts)
    asked = [one.question for one in facts]
    if len(facts) > 3 and rng.random() < 0.5:
        reply = f"Is it {a(noun)}?"
    else:
        fresh = [one for one in facts_of(noun) if one.question not in asked]
        held = [one for one in fresh if one.holds] or fresh
        reply = rng.choice(held if rng.random() < 0.4 else fresh).about("it")
    prompt = rng.choice(
        (
            "Guess my secret word. Ask a yes or no question.",
            "Let's play 20 questions. Ask your next question.",
        )
    )
    return turn("guess_player", f"{prompt}\nHistory:\n{history or 'none'}", reply)


# --- tools -----------------------------------------------------------------------------------


def tool(name_: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    function = {"name": name_, "description": about, "parameters": schema}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolUse:
    """A request, the call it asks for, the tool's answer, and what to say then."""

    tool: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    result: str
    answer: str


def use_calculator(rng: Random) -> ToolUse:
    tool_name = rng.choice(("calculator", "calculate", "calc"))
    x, y = int(number(rng, (1, 2, 2, 3))), int(number(rng, (1, 2, 2, 3)))
    sign = rng.choice("+-*")
    result = str({"+": x + y, "-": x - y, "*": x * y}[sign])
    expression = f"{x} {sign} {y}"
    return ToolUse(
        tool(tool_name, "Evaluates an expression.", expression="string"),
        rng.choice(("What is {e}?", "Calculate {e}.", "Compute {e}.")).format(e=expression),
        {"expression": expression},
        result,
        rng.choice(("{e} = {r}", "The answer is {r}.", "It is {r}.")).format(
            e=expression, r=result
        ),
    )


def use_add(rng: Random) -> ToolUse:
    tool_name, sign = rng.choice((("add", "+"), ("multiply", "*"), ("subtract", "-")))
    x, y = int(number(rng, (1, 2, 2, 3))), int(number(rng, (1, 2, 2, 3)))
    result = str({"+": x + y, "-": x - y, "*": x * y}[sign])
    return ToolUse(
        tool(tool_name, f"Does a {sign} b.", a="integer", b="integer"),
        f"What is {x} {sign} {y}?",
        {"a": x, "b": y},
        result,
        f"The answer is {result}.",
    )


def use_weather(rng: Random) -> ToolUse:
    tool_name = rng.choice(("weather", "get_weather", "get_current_weather"))
    place, sky = city(rng), rng.choice(split("sunny cloudy rainy windy snowy foggy warm cold"))
    key = rng.choice(("city", "location"))
    return ToolUse(
        tool(tool_name, "Gets the weather.", **{key: "string"}),
        rng.choice(("What is the weather in {c}?", "How is the weather in {c}?")).format(c=place),
        {key: place},
        sky,
        f"The weather in {place} is {sky}.",
    )


def use_lookup(rng: Random) -> ToolUse:
    tool_name = rng.choice(("lookup", "search", "find", "web_search"))
    key = rng.choice(("query", "key", "q"))
    thing, found = word(rng), rng.choice((word(rng), number(rng)))
    asked = rng.choice(("Look up {x}.", "Search for {x}.", "Find {x}."))
    answer = rng.choice(("The result is {r}.", "I found {r}."))
    return ToolUse(
        tool(tool_name, "Looks something up.", **{key: "string"}),
        asked.format(x=thing),
        {key: thing},
        found,
        answer.format(r=found),
    )


def use_timer(rng: Random) -> ToolUse:
    minutes = int(number(rng, (1, 2, 2, 3)))
    return ToolUse(
        tool("set_timer", "Sets a timer.", minutes="integer"),
        f"Set a timer for {minutes} minutes.",
        {"minutes": minutes},
        "ok",
        f"The timer is set for {minutes} minutes.",
    )


def use_message(rng: Random) -> ToolUse:
    to, text = name(rng), word(rng)
    return ToolUse(
        tool("send_message", "Sends a message.", to="string", text="string"),
        f"Send {to} the message {text}.",
        {"to": to, "text": text},
        "sent",
        f"I sent {to} the message {text}.",
    )


def use_invented(rng: Random) -> ToolUse:
    """An invented tool: name and parameter must be read from the prompt."""
    verb = rng.choice(split("get set open find check read"))
    tool_name = f"{verb}_{invented(rng)}"
    key, value = invented(rng), word(rng)
    return ToolUse(
        tool(tool_name, f"Does {verb}.", **{key: "string"}),
        rng.choice(("Use {t} with {v}.", "Call {t} on {v}.")).format(t=tool_name, v=value),
        {key: value},
        rng.choice(("ok", "done")),
        "Done.",
    )


TOOL_USES = (
    use_calculator, use_add, use_weather, use_lookup, use_timer, use_message, use_invented,
)  # fmt: skip


def tool_use(rng: Random) -> Chat:
    """One or two tools are offered; the request needs one, or (sometimes) none."""
    use = rng.choice(TOOL_USES)(rng)
    tools = [use.tool]
    if rng.random() < 0.45:
        other = rng.choice(TOOL_USES)(rng).tool
        if other["function"]["description"] != use.tool["function"]["description"]:
            tools.append(other)
            rng.shuffle(tools)
    if rng.random() < 0.12:
        plain = rng.choice((small_talk, identity, copy_name))(rng)
        return Chat("tool_unused", [m for m in plain.messages if m["role"] != "system"], tools)
    call = {"name": use.tool["function"]["name"], "arguments": use.arguments}
    tool_calls = [{"type": "function", "id": "call_0", "function": call}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": use.request},
        {"role": "assistant", "content": "", "tool_calls": tool_calls},
    ]
    if (system := persona(rng)) is not None:
        messages.insert(0, {"role": "system", "content": system})
    if rng.random() < 0.6:
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": use.result})
        messages.append({"role": "assistant", "content": use.answer})
    return Chat("tool_use", messages, tools)


# --- formats ---------------------------------------------------------------------------------


def json_answer(rng: Random) -> Chat:
    """An object for a schema, or for a list of keys."""
    fields: list[tuple[str, str, Any]] = [
        ("name", "string", name(rng)),
        ("age", "integer", int(number(rng, (1, 2, 2)))),
        ("city", "string", city(rng)),
        ("colour", "string", rng.choice(COLOURS)),
        (invented(rng), "string", word(rng)),
        (invented(rng), "integer", int(number(rng, (1, 2, 3, 4)))),
    ]
    chosen = rng.sample(fields, rng.choice((1, 2, 2, 3)))
    if rng.random() < 0.5:
        properties = {key: {"type": kind} for key, kind, _ in chosen}
        keys = [key for key, _, _ in chosen]
        schema = {"type": "object", "properties": properties, "required": keys}
        order = f"Answer in JSON with this schema: {json.dumps(schema)}"
    else:
        order = f"Answer in JSON with the keys {', '.join(key for key, _, _ in chosen)}."
    told = ". ".join(f"The {key} is {value}" for key, _, value in chosen)
    reply = json.dumps({key: value for key, _, value in chosen})
    if rng.random() < 0.3:
        return turn("json", f"{told}.", reply, order)
    return turn("json", f"{told}. {order}" if rng.random() < 0.5 else f"{order}\n{told}.", reply)


def json_verdict(rng: Random) -> Chat:
    """The answering side of 20 Questions, in JSON."""
    one = fact(rng)
    verdict = {
        "brief_reason": f"{one.statement.capitalize()}.",
        "yes_or_no": "yes" if one.holds else "no",
        "correct": False,
    }
    if rng.random() < 0.15:
        guess = one.noun if rng.random() < 0.5 else rng.choice(list(NOUNS))
        right = guess == one.noun
        reason = f"It is {a(one.noun)}." if right else f"It is {a(one.noun)}, not {a(guess)}."
        verdict = {"brief_reason": reason, "yes_or_no": "yes" if right else "no", "correct": right}
        question = f"Is it {a(guess)}?"
    else:
        question = one.about("it")
    keys = "Answer in JSON with the keys brief_reason, yes_or_no, correct."
    secret = f"The secret word is {one.noun}. {question} {keys}"
    return turn("json_verdict", secret, json.dumps(verdict))


REACT = (
    "Answer in this format:\nThought: your reasoning\nFinal Answer: your answer",
    "Use the format Thought: ... Final Answer: ...",
    "To give my best complete final answer to the task respond using the exact following format:"
    "\n\nThought: I now can give a great answer\nFinal Answer: Your final answer must be the great"
    " and the most complete as possible, it must be outcome described.",
)


def react(rng: Random) -> Chat:
    """A question under a system prompt or instruction that wants a thought first."""
    order = rng.choice(REACT)
    inner = rng.choice((yes_no, copy_number, copy_name, identity, say_you_are))(rng)
    question, answer = inner.messages[-2]["content"], inner.messages[-1]["content"]
    thought = "I now can give a great answer" if "great" in order else "I know the answer."
    reply = f"Thought: {thought}\nFinal Answer: {answer}"
    if rng.random() < 0.5:
        return turn("react", question, reply, order)
    return turn("react", f"{question}\n\n{order}", reply)


def several(rng: Random) -> Chat:
    """Two or three small chats in a row."""
    kinds = (identity, small_talk, copy_number, copy_name, yes_no, say_you_are)
    parts = [rng.choice(kinds)(rng) for _ in range(rng.choice((2, 2, 3)))]
    plain = [m for part in parts for m in part.messages if m["role"] != "system"]
    return Chat("several", plain)


MIX: dict[Callable[[Random], Chat], int] = {
    say_you_are: 16,
    identity: 5,
    small_talk: 6,
    copy_number: 9,
    copy_name: 11,
    yes_no: 16,
    quiz: 10,
    describe: 2,
    what_is: 2,
    guess_player: 2,
    tool_use: 12,
    json_answer: 6,
    json_verdict: 3,
    react: 5,
    several: 4,
}


def generate(rng: Random, count: int) -> list[Chat]:
    """``count`` chats in the proportions of ``MIX``."""
    makers = rng.choices(list(MIX), list(MIX.values()), k=count)
    return [make(rng) for make in makers]
