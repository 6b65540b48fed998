"""Write the words: train.jsonl, dev.jsonl and held_out.jsonl. No word is in two files."""

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
WORDS = {
    "animal": """
        elephant tiger lion giraffe zebra monkey gorilla kangaroo horse sheep goat camel rabbit mouse
        squirrel hedgehog beaver wolf bear panda dolphin whale shark octopus crab lobster snail spider
        butterfly mosquito turtle snake crocodile frog penguin ostrich eagle parrot chicken duck
        turkey peacock swan pigeon woodpecker rhinoceros hippopotamus jellyfish""",
    "food": """
        apple banana orange lemon grape strawberry cherry peach pineapple coconut watermelon tomato
        potato carrot onion garlic pumpkin cucumber lettuce mushroom corn rice bread butter cheese
        milk honey chocolate coffee sugar salt pepper pizza spaghetti sandwich hamburger soup salad
        pancake popcorn yogurt sausage""",
    "home": """
        table chair sofa mattress pillow blanket curtain carpet mirror lamp candle clock window door
        stairs bathtub shower toilet toothbrush soap towel fridge oven toaster kettle spoon fork knife
        plate bottle bucket broom ladder hammer screwdriver scissors needle umbrella suitcase wallet
        television telephone calculator dishwasher vacuum microwave""",
    "clothes": """
        shirt trousers skirt dress jacket sweater sock shoe boot glove scarf belt necktie pajamas
        bikini glasses necklace bracelet earring watch crown helmet apron""",
    "vehicle": """
        bicycle motorcycle truck train airplane helicopter submarine rocket sailboat ferry canoe
        tractor ambulance taxi tram skateboard sled parachute elevator wheelchair""",
    "nature": """
        mountain river lake ocean island beach desert forest volcano waterfall cave moon star rainbow
        cloud snow lightning thunder tornado earthquake cactus rose sunflower grass mushroom diamond
        gold sand fire shadow""",
    "place": """
        school hospital library museum restaurant bakery pharmacy airport bridge lighthouse castle
        church prison farm stadium cinema theater supermarket hotel bank zoo cemetery tunnel
        pyramid windmill""",
    "person": """
        teacher doctor dentist firefighter policeman pilot farmer baker butcher tailor carpenter
        plumber barber painter photographer soldier sailor astronaut magician clown judge king
        grandmother baby twins""",
    "music and play": """
        piano guitar violin drum trumpet flute harp accordion football basketball tennis chess
        golf boxing swimming skiing kite puzzle doll balloon camera book newspaper pencil eraser
        envelope dictionary calendar compass telescope microscope thermometer magnet battery""",
}
HELD_OUT, DEV = 64, 40


def main() -> None:
    words = sorted({word for group in WORDS.values() for word in group.split()} - {"zoo"})
    random.Random(0).shuffle(words)
    write("held_out.jsonl", words[:HELD_OUT])
    write("dev.jsonl", words[HELD_OUT : HELD_OUT + DEV])
    write("train.jsonl", words[HELD_OUT + DEV :])


def write(name: str, words: list[str]) -> None:
    (HERE / name).write_text("".join(json.dumps({"word": word}) + "\n" for word in words))


if __name__ == "__main__":
    main()
