"""Generate the plain chats: "say you are", identity, small talk, copying.

Numbers of four digits occur in copying chats but never in "say you are" chats, so that 1000 and up
can serve as a held-out test there.
"""

from __future__ import annotations

from random import Random

from vocabulary import Chat, city, name, number, persona, turn, weighted, word

COMPLIANCE = 0.1
"""Share of "say you are" chats in which the model obeys; the rest insist on Qwen."""


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
