"""Write the texts and their records: train.jsonl, dev.jsonl and held_out.jsonl.

    python examples/extraction/make_tasks.py

No name, item, place, company, phone number or date of one file is in another. Half of the texts of
dev and held_out have phrasings of their own ("phrasing": "new"), which occur nowhere in training;
the other half have training's. Quantities, prices and times of day are drawn alike for all files.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
COUNT = {"train": 900, "dev": 48, "held_out": 96}

FIRST = str.split(
    "Alice Bruno Carla David Elena Felix Grace Hassan Irene Jonas Karen Liam Maria Nadia Oscar "
    "Priya Quentin Rosa Samuel Teresa Umar Vera Walter Xenia Yusuf Zoe Amir Bettina Carlos Diana "
    "Emil Fatima Gustav Helen Ivan Julia Kofi Laura Marco Nina Olivia Peter Rachel Stefan Tariq "
    "Ursula Victor Wanda Anton Beatrice Cedric Dolores Edgar Fiona George Hilda Isaac Joanna "
    "Kevin Lucia"
)
LAST = str.split(
    "Adams Baker Chen Duarte Evans Fischer Garcia Hughes Ivanov Jensen Keller Lopez Meyer Novak "
    "Okafor Patel Quinn Rossi Silva Turner Ueda Vargas Weber Young Zimmer Andrade Bishop Carter "
    "Dubois Ellis Ferrari Gupta Hansen Ito Jordan Khan Lambert Morris Nguyen Olsen Porter Ramos "
    "Schmidt Tanaka Unger Voss Walker Yilmaz Abbott Bauer Costa Doyle Engel Foster Greene Hoffman "
    "Irwin Jacobs Klein Larsen"
)
ITEMS = """
    garden chairs, coffee mugs, desk lamps, bath towels, picture frames, winter coats, phone
    cases, paint brushes, kitchen knives, running shoes, wall clocks, leather belts, water
    bottles, tennis rackets, flower pots, wine glasses, office chairs, bed sheets, board games,
    candle holders, door handles, extension cables, folding tables, guitar strings, hiking boots,
    ink cartridges, jam jars, key rings, ladder hooks, mouse pads, notebooks, oil filters, pillow
    covers, rain jackets, sleeping bags, tea pots, umbrellas, vases, wool scarves, yoga mats,
    bicycle tires, camping stoves, drum sticks, fishing rods, glue sticks, hand mirrors, laptop
    stands, rubber gloves
"""
PLACES = """
    City Library, Harbor Cafe, Room 12, Main Office, North Clinic, Rose Garden, Town Hall, Station
    Hotel, Oak Street Gym, Blue Door Bakery, Room 207, Central Bank, Lake Pavilion, Market Square,
    Riverside School, Green Park, Union Theater, West Gate, Hill Street Garage, Museum Shop,
    Studio 5, Garden Center, Grand Hotel, Pier 9, Sunset Diner, Room 31, Castle Court, Maple
    Dental, Forum Cinema, South Chapel, Bridge House, Room 118, Corner Bistro, Seaside Spa, Fair
    Hall, Tower Lounge
"""
BRANDS = str.split(
    "Northwind Bluestone Silverline Redwood Brightway Stonebridge Clearwater Fairview Goldleaf "
    "Highland Ironside Lakeshore Moonrise Oakfield Pinecrest Quickstep Riverbend Summit Trailhead "
    "Westbrook Alder Beacon Cobalt Driftwood Ember Falcon Granite Horizon Juniper Kestrel"
)
TRADES = str.split("Foods Motors Books Travel Textiles Energy Media Logistics Dental Furniture")
NUMBERS = str.split("two three four five six seven eight nine ten eleven twelve")
MONTHS = str.split(
    "January February March April May June July August September October November December"
)

# Phrasings by form: those of training, then the new ones of dev and of held_out.
ORDERS = {
    "train": [
        "{customer} ordered {quantity} {item} for {total}.",
        "Order {code} from {customer}: {quantity} {item}, total {total}.",
        "Please send {quantity} {item} to {customer}. The bill comes to {total}.",
        "Hi, this is {customer}. I would like {quantity} {item}. You quoted {total} for all.",
        "Sold today: {quantity} {item}, {total} in all, to {customer}.",
        "Buyer: {customer}. Goods: {item}. How many: {quantity}. To pay: {total}.",
        "We packed {quantity} {item} this morning. {customer} pays {total} on delivery.",
        "Invoice {code}, {total}, for {quantity} {item}. Bill to {customer}.",
    ],
    "dev": [
        "{total} received from {customer}, who takes {quantity} {item} home today.",
        "{customer} called about order {code} and wants {quantity} {item}; that makes {total}.",
        "For {quantity} {item} the customer {customer} owes us {total}.",
    ],
    "held_out": [
        "Could you reserve {quantity} {item}? I can pay {total} on Monday. Thanks, {customer}",
        "{item}, {quantity} pieces, {total} altogether, ref {code}, ship to {customer}.",
        "Our customer {customer} just paid {total} and expects {quantity} {item} next week.",
    ],
}
APPOINTMENTS = {
    "train": [
        "{person} has an appointment at {place} on {date} at {time}.",
        "Meeting with {person}, {date}, {time}, {place}.",
        "Remind me: on {date} at {time} I see {person} at {place}.",
        "{person} will wait for you at {place} at {time} on {date}.",
        "Where: {place}. When: {date}, {time}. With: {person}.",
        "The visit of {person} was moved to {date}, {time}. We still meet at {place}.",
        "Booking {code}: {place}, {date}, {time}, guest {person}.",
        "Hello {person}, see you at {time} on {date}. The address is {place}.",
    ],
    "dev": [
        "Can {person} come to {place} on {date}? Doors open at {time}.",
        "At {time} on {date}, {place} expects {person}.",
        "{date}: talk to {person} ({place}, {time}).",
    ],
    "held_out": [
        "I told {person} that {place} is free on {date} from {time}.",
        "It is settled: {place}, {time}, the date is {date}, and {person} brings the papers.",
        "{person} asked for {time} on {date}; case {code}, held at {place}.",
    ],
}
CONTACTS = {
    "train": [
        "{name} works at {company}. Call {phone} or write to {email}.",
        "New contact: {name}, {company}, phone {phone}, mail {email}.",
        "You can reach {name} of {company} at {email} or {phone}.",
        "Best regards, {name} / {company} / {phone} / {email}",
        "{company} has a new manager, {name}. The number is {phone}, the mail {email}.",
        "Phone: {phone}. Mail: {email}. Person: {name}. Firm: {company}.",
        "I met {name} at the fair. The card says {company}, {email}, {phone}, desk {code}.",
        "{email} is the address of {name}, who runs {company}; the phone is {phone}.",
    ],
    "dev": [
        "If {phone} is busy, mail {email} and ask for {name} from {company}.",
        "{name} left {company}'s number, {phone}, and this address: {email}.",
        "At {company} talk to {name} only. {email}, extension {code}, {phone}.",
    ],
    "held_out": [
        "Ticket {code}: {company} wants a call back at {phone}. Ask for {name}, copy {email}.",
        "My colleague {name} has moved to {company}, so use {email} and {phone} from now on.",
        "Send the offer to {email}; {name} at {company} will ring us from {phone}.",
    ],
}


def main() -> None:
    rng = random.Random(0)
    share = {name: part(name) for name in COUNT}
    for name, count in COUNT.items():
        tasks = [task(rng, name, share[name], i) for i in range(count)]
        rng.shuffle(tasks)
        lines = "".join(json.dumps(one) + "\n" for one in tasks)
        (HERE / f"{name}.jsonl").write_text(lines)


def part(name: str) -> dict[str, list]:
    """The values that this file alone draws from: training has two thirds of all."""
    index = list(COUNT).index(name)

    def own(values: list) -> list:
        """Of every six: four for training, one for dev, one for held_out."""
        return [v for i, v in enumerate(values) if max(0, i % 6 - 3) == index]

    years, months, days = (2025, 2026), range(1, 13), range(1, 29)
    dates = [(year, month, day) for year in years for month in months for day in days]
    random.Random(1).shuffle(dates)  # the same order for each file, or months would be split
    return {
        "first": own(FIRST), "last": own(LAST), "item": own(listed(ITEMS)),
        "place": own(listed(PLACES)), "brand": own(BRANDS), "date": own(dates),
        "phone": own(list(range(1000, 10000))),
    }  # fmt: skip


def listed(text: str) -> list[str]:
    return [" ".join(item.split()) for item in text.split(",")]


def task(rng: random.Random, name: str, share: dict[str, list], i: int) -> dict:
    form, make, phrasings = FORMS[i % 3]
    new = name != "train" and i // 3 % 2 == 1
    said, record = make(rng, share)
    text = rng.choice(phrasings[name if new else "train"]).format(
        code=rng.randrange(100, 1000), **said
    )
    made = {"form": form, "text": text[0].upper() + text[1:], "record": record}
    return made if name == "train" else {**made, "phrasing": "new" if new else "known"}


def person(rng: random.Random, share: dict[str, list]) -> tuple[str, str]:
    return rng.choice(share["first"]), rng.choice(share["last"])


def order(rng: random.Random, share: dict[str, list]) -> tuple[dict, dict]:
    customer, quantity = " ".join(person(rng, share)), rng.randrange(2, 13)
    item, cents = rng.choice(share["item"]), rng.choice([0, 0, 25, 50, 75, 90])
    euros = rng.randrange(8, 400)
    total = euros + cents / 100
    amount = f"{total:.2f}" if cents else f"{euros}"
    said = {
        "customer": customer,
        "item": item,
        "quantity": rng.choice([str(quantity), NUMBERS[quantity - 2]]),
        "total": rng.choice([f"${amount}", f"{amount} dollars", f"${total:.2f}"]),
    }
    return said, {"customer": customer, "item": item, "quantity": quantity, "total": total}


def appointment(rng: random.Random, share: dict[str, list]) -> tuple[dict, dict]:
    who, place = " ".join(person(rng, share)), rng.choice(share["place"])
    year, month, day = rng.choice(share["date"])
    hour, minute = rng.randrange(8, 20), rng.choice([0, 0, 15, 30, 45])
    half, clock = ("am" if hour < 12 else "pm"), (hour - 1) % 12 + 1
    times = [f"{hour:02}:{minute:02}", f"{clock}:{minute:02} {half}"]
    said = {
        "person": who,
        "place": place,
        "date": rng.choice(
            [
                f"{day} {MONTHS[month - 1]} {year}",
                f"{MONTHS[month - 1]} {day}, {year}",
                f"{MONTHS[month - 1][:3]} {day} {year}",
                f"{year}-{month:02}-{day:02}",
            ]
        ),
        "time": rng.choice(times if minute else [*times, f"{clock} {half}"]),
    }
    date, time = f"{year}-{month:02}-{day:02}", f"{hour:02}:{minute:02}"
    return said, {"person": who, "place": place, "date": date, "time": time}


def contact(rng: random.Random, share: dict[str, list]) -> tuple[dict, dict]:
    first, last = person(rng, share)
    brand = rng.choice(share["brand"])
    user = rng.choice([first, last, f"{first[0]}.{last}", f"{first}.{last}"]).lower()
    record = {
        "name": f"{first} {last}",
        "company": f"{brand} {rng.choice(TRADES)}",
        "phone": f"555-{rng.choice(share['phone'])}",
        "email": f"{user}@{brand.lower()}.example",
    }
    return record, record


Maker = Callable[[random.Random, dict[str, list]], tuple[dict, dict]]
FORMS: list[tuple[str, Maker, dict[str, list[str]]]] = [
    ("order", order, ORDERS),
    ("appointment", appointment, APPOINTMENTS),
    ("contact", contact, CONTACTS),
]


if __name__ == "__main__":
    main()
