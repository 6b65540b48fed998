"""Generate chats about nouns: their category, their properties, the asking side of 20 Questions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from vocabulary import Chat, persona, split, turn

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
